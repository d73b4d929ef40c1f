"""What came of one run, as one JSON file.

A file says everything that its figures depend on: the resolved configuration, the
versions, and which mechanism the stated epsilon is true for.
"""

from __future__ import annotations

import copy
import json
import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from flwr.app import MetricRecord
from hydra.utils import instantiate
from omegaconf import DictConfig

from flwr_safedshb.algorithm.output import select_output
from flwr_safedshb.algorithm.progress import Progress
from flwr_safedshb.atomic_io import replace_file
from flwr_safedshb.simulation.in_process import InProcessGrid
from simulations.app import make_client_app
from simulations.config import compose_config, resolve_config
from simulations.data import hash_data
from simulations.experiment import build_untrained, is_attacked, load_federation
from simulations.models import evaluate_model
from simulations.plans import compute_spent, make_plans, state_privacy
from simulations.results.machine import versions
from simulations.results.schema import (
    Answers,
    Evaluations,
    Node,
    Privacy,
    Returned,
    Rounds,
    RunRecord,
)

FORMAT = 5
SEEDED = (
    "The noise of this run was seeded so that it can be repeated: whoever knows the "
    "seed can remove it. The epsilon is that of the same run with noise from the "
    "operating system; this run itself is a simulation and protects nobody."
)
_MEDIAN = "median-node-accuracy"
SECURE = "Noise and batches came from the operating system's entropy."


def record(overrides: Sequence[str], progress: Progress, seconds: float) -> RunRecord:
    """Return what came of a run.

    Parameters
    ----------
    overrides : sequence of str
        Of Hydra, from which the run was composed.
    progress : Progress
        Of the server, at the end.
    seconds : float
        Wall time.
    """
    text = shlex.join(overrides)
    cfg = compose_config(text)
    data = load_federation(text)
    ids = _node_ids(cfg, progress)
    told = is_attacked(cfg) and len(ids) == cfg.num_nodes
    f = cfg.num_malicious_nodes if told else 0
    return RunRecord(
        format=FORMAT,
        overrides=list(overrides),
        config=dict(resolve_config(text)),
        seed=cfg.seed,
        versions=versions(),
        data={**data.summary(), "sha256": hash_data(instantiate(cfg.data))},
        nodes=[f"node {i}" for i in range(len(ids))],
        adversaries=list(range(len(ids) - f, len(ids))),
        evaluations=_evaluations(progress),
        rounds=_rounds(progress, ids),
        returned=_returned(text, progress),
        answers=_answers(progress),
        by_node=_nodes(cfg, data.sizes),
        privacy=_privacy(cfg, min(data.sizes), progress.step * cfg.local_steps),
        seconds=seconds,
    )


def same(run: RunRecord, overrides: Sequence[str]) -> bool:
    """Whether a run is what the overrides, today's data and versions would give."""
    text = shlex.join(overrides)
    return (
        run["config"] == resolve_config(text)
        and run["versions"] == versions()
        and run["data"].get("sha256")
        == hash_data(instantiate(compose_config(text).data))
    )


def write(path: Path, run: RunRecord) -> None:
    """Write a run to `path`, whole or not at all."""
    text = json.dumps(run, allow_nan=False) + "\n"
    replace_file(path, lambda file: file.write(text.encode()))


def read(path: Path) -> RunRecord | None:
    """Return the run in a file; None if there is none, or not of this format."""
    try:
        run = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None
    if not isinstance(run, dict) or run.get("format") != FORMAT:
        return None
    return cast(RunRecord, run)


def _node_ids(cfg: DictConfig, progress: Progress) -> list[int]:
    """Return the ids of the nodes in their order; elsewhere, of those left out."""
    if cfg.engine.name in ("inprocess", "batched"):
        grid = InProcessGrid(make_client_app(""), cfg.num_nodes, seed=cfg.seed)
        return grid.get_node_ids()
    return sorted(
        {
            node
            for metrics in progress.train.values()
            for node in cast(list[int], metrics.get("left-out", []))
        }
    )


def _evaluations(progress: Progress) -> Evaluations:
    history = sorted(progress.evaluate_serverapp.items())

    def numbers(name: str) -> list[float]:
        return [_number(metrics, name) for _, metrics in history]

    return Evaluations(
        step=[number for number, _ in history],
        accuracy=numbers("accuracy"),
        test_loss=numbers("loss"),
        training_loss=numbers("training-loss"),
    )


def _rounds(progress: Progress, ids: Sequence[int]) -> Rounds:
    history = [metrics for _, metrics in sorted(progress.train.items())]
    position = {node: i for i, node in enumerate(ids)}
    names = {
        name
        for metrics in history
        for name, value in metrics.items()
        if isinstance(value, int | float)
    }
    reasons = {name for name in names if name.startswith("excluded-")}

    def numbers(name: str) -> list[float | None]:
        values = [_number(m, name) if name in m else math.nan for m in history]
        # JSON has neither infinity nor NaN.
        return [value if math.isfinite(value) else None for value in values]

    def counts(name: str) -> list[int]:
        return [int(_number(m, name)) if name in m else 0 for m in history]

    return Rounds(
        left_out=[
            [position[node] for node in cast(list[int], metrics["left-out"])]
            if "left-out" in metrics
            else None
            for metrics in history
        ],
        excluded={name[len("excluded-") :]: counts(name) for name in sorted(reasons)},
        replies=counts("replies"),
        skipped=counts("skipped"),
        metrics={
            name: numbers(name)
            for name in sorted(names - reasons - {"replies", "skipped"})
        },
    )


def _returned(overrides: str, progress: Progress) -> Returned:
    """Test the model that the run returned; its last evaluation is of the last."""
    cfg = compose_config(overrides)
    model = copy.deepcopy(build_untrained(overrides))
    arrays = select_output(progress, cfg.output)
    model.load_state_dict(arrays.to_torch_state_dict())
    found = evaluate_model(model, load_federation(overrides).test)
    return Returned(accuracy=found["accuracy"], test_loss=found["loss"])


def _privacy(cfg: DictConfig, num_examples: int, steps: int) -> Privacy:
    """State the privacy of the honest node that holds the fewest examples."""
    plans = make_plans(cfg, num_examples)
    (first, _), *others = plans.charges
    said = state_privacy(((first, steps), *others), cfg.privacy.delta)
    seeded = bool(cfg.engine.seeded_noise)
    return Privacy(
        # JSON has no infinity.
        epsilon=said.epsilon if said.epsilon < math.inf else None,
        delta=said.delta,
        steps=steps,
        sampler=said.sampler,
        adjacency=said.adjacency,
        accountant=said.accountant,
        num_examples=num_examples,
        seeded_noise=seeded,
        note=SEEDED if seeded else SECURE,
        statement=str(said),
    )


def _nodes(cfg: DictConfig, sizes: Sequence[int]) -> list[Node]:
    """Return what every honest node does to its data, where it is each its own."""
    if cfg.privacy.get("target_epsilon") is None:
        return []
    return [
        Node(
            num_examples=size,
            noise_multiplier=make_plans(cfg, size).training.noise_multiplier,
            epsilon=compute_spent(cfg, size),
        )
        for size in sizes
    ]


def _answers(progress: Progress) -> Answers:
    """Return what the nodes answered about the model, as the server concluded."""
    found = [
        (number, metrics)
        for number, metrics in sorted(progress.evaluate_clientapp.items())
        if f"{_MEDIAN}-low" in metrics
    ]
    return Answers(
        step=[number for number, _ in found],
        accuracy=[_number(metrics, _MEDIAN) for _, metrics in found],
        low=[_number(metrics, f"{_MEDIAN}-low") for _, metrics in found],
        high=[_number(metrics, f"{_MEDIAN}-high") for _, metrics in found],
        open_to_liars=[bool(metrics["ends-open-to-liars"]) for _, metrics in found],
    )


def _number(metrics: MetricRecord, name: str) -> float:
    return float(cast(float, metrics[name]))
