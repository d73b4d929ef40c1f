"""Results of runs that were never run."""

import shlex
from collections.abc import Sequence

from hydra.utils import instantiate

from simulations.config import compose_config, resolve_config
from simulations.data import hash_data
from simulations.results.machine import versions
from simulations.results.record import FORMAT
from simulations.results.schema import RunRecord


def made_up(
    accuracy: float,
    losses: tuple[float, float],
    seed: int = 1,
    overrides: Sequence[str] = (),
) -> RunRecord:
    return RunRecord(
        format=FORMAT, overrides=list(overrides), seed=seed, versions={}, data={},
        seconds=2.0, nodes=["node 0", "node 1"], adversaries=[1],
        config={"privacy": {"plan": {"noise_multiplier": 1.0}}},
        evaluations={
            "step": [0, 400], "accuracy": [0.5, accuracy],
            "test_loss": [0.7, 0.2], "training_loss": list(losses),
        },
        rounds={
            "left_out": [[1], []], "excluded": {}, "replies": [2] * 2,
            "skipped": [0] * 2, "metrics": {"kappa": [1.0] * 2},
        },
        returned={"accuracy": accuracy, "test_loss": 0.2},
        answers={
            "step": [], "accuracy": [], "low": [], "high": [], "open_to_liars": [],
        },
        by_node=[],
        privacy={
            "epsilon": 1.5, "delta": 1e-4, "steps": 2, "sampler": "s", "adjacency": "a",
            "accountant": "p", "num_examples": 3, "seeded_noise": True, "note": "n",
            "statement": "epsilon = 1",
        },
    )  # fmt: skip


def as_if_of(run: RunRecord, overrides: Sequence[str]) -> RunRecord:
    """Return a run that says of itself that it is what the overrides give here."""
    text = shlex.join(overrides)
    digest = hash_data(instantiate(compose_config(text).data))
    return {
        **run,
        "config": dict(resolve_config(text)),
        "versions": versions(),
        "data": {"sha256": digest},
    }
