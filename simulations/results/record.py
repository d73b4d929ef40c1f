"""What came of one run, as one JSON file.

A file says everything that its figures depend on: the resolved configuration, the
versions, and which mechanism the stated epsilon is true for.
"""

from __future__ import annotations

import json
import platform
import shlex
from collections.abc import Sequence
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import TypedDict, cast

from flwr.app import MetricRecord
from hydra.utils import instantiate
from omegaconf import DictConfig

from flwr_safedshb.files import replace_file
from flwr_safedshb.grids.in_process import InProcessGrid
from flwr_safedshb.privacy.plan import PrivacyPlan, PrivacyStatement
from flwr_safedshb.server.checkpoint import Progress
from simulations.app import make_client_app
from simulations.config import composed, resolved
from simulations.data import fingerprint
from simulations.experiment import attacked, federation

FORMAT = 2
PACKAGES = (
    "flwr-safedshb",
    "flwr",
    "torch",
    "numpy",
    "opacus",
    "dp-accounting",
    "cryptography",
)
SEEDED = (
    "The noise of this run was seeded so that it can be repeated: whoever knows the "
    "seed can remove it. The epsilon is that of the same run with noise from the "
    "operating system; this run itself is a simulation and protects nobody."
)
SECURE = "Noise and batches came from the operating system's entropy."


class Evaluations(TypedDict):
    """What the model was worth after some steps; all lists have the same length."""

    step: list[int]
    accuracy: list[float]
    test_loss: list[float]
    training_loss: list[float]


class Rounds(TypedDict):
    """What the server saw in every step; None where the rule does not tell."""

    left_out: list[list[int] | None]
    excluded: dict[str, list[int]]
    kappa: list[float | None]
    lambda_max: list[float | None]
    replies: list[int]
    skipped: list[int]


class Privacy(TypedDict):
    """An epsilon and what it is true for."""

    epsilon: float | None
    delta: float
    steps: int
    sampler: str
    adjacency: str
    accountant: str
    num_examples: int
    seeded_noise: bool
    note: str
    statement: str


class RunRecord(TypedDict):
    """One run.

    ``nodes`` names the nodes that ``rounds["left_out"]`` counts from 0; ``adversaries``
    are among these numbers. ``seconds`` is wall time.
    """

    format: int
    overrides: list[str]
    config: dict[str, object]
    seed: int
    versions: dict[str, str]
    data: dict[str, object]
    nodes: list[str]
    adversaries: list[int]
    evaluations: Evaluations
    rounds: Rounds
    privacy: Privacy
    seconds: float


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
    cfg = composed(text)
    data = federation(text)
    ids = _node_ids(cfg, progress)
    told = attacked(cfg) and len(ids) == cfg.num_nodes
    f = cfg.num_malicious_nodes if told else 0
    return RunRecord(
        format=FORMAT,
        overrides=list(overrides),
        config=dict(resolved(text)),
        seed=cfg.seed,
        versions=versions(),
        data={**data.summary(), "sha256": fingerprint(instantiate(cfg.data))},
        nodes=[f"node {i}" for i in range(len(ids))],
        adversaries=list(range(len(ids) - f, len(ids))),
        evaluations=_evaluations(progress),
        rounds=_rounds(progress, ids),
        privacy=_privacy(cfg, min(data.sizes), progress.step),
        seconds=seconds,
    )


def same(run: RunRecord, overrides: Sequence[str]) -> bool:
    """Whether a run is what the overrides, today's data and versions would give."""
    text = shlex.join(overrides)
    return (
        run["config"] == resolved(text)
        and run["versions"] == versions()
        and run["data"].get("sha256") == fingerprint(instantiate(composed(text).data))
    )


@lru_cache(maxsize=1)
def versions() -> dict[str, str]:
    """Return the versions that figures may depend on."""
    return {"python": platform.python_version()} | {
        package: metadata.version(package) for package in PACKAGES
    }


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
    reasons = {
        name for metrics in history for name in metrics if name.startswith("excluded-")
    }

    def maybe(name: str) -> list[float | None]:
        return [_number(m, name) if name in m else None for m in history]

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
        kappa=maybe("kappa"),
        lambda_max=maybe("lambda-max"),
        replies=counts("replies"),
        skipped=counts("skipped"),
    )


def _privacy(cfg: DictConfig, num_examples: int, steps: int) -> Privacy:
    """State the privacy of the honest node that holds the fewest examples."""
    plan: PrivacyPlan = instantiate(cfg.privacy.plan, num_examples=num_examples)
    said = _statement(plan, steps, cfg.privacy.delta)
    seeded = bool(cfg.engine.seeded_noise)
    return Privacy(
        # JSON has no infinity.
        epsilon=said.epsilon if plan.noise_multiplier > 0 else None,
        delta=said.delta,
        steps=said.steps,
        sampler=said.sampler,
        adjacency=said.adjacency,
        accountant=said.accountant,
        num_examples=num_examples,
        seeded_noise=seeded,
        note=SEEDED if seeded else SECURE,
        statement=str(said),
    )


@lru_cache(maxsize=32)
def _statement(plan: PrivacyPlan, steps: int, delta: float) -> PrivacyStatement:
    return plan.statement(steps, delta)


def _number(metrics: MetricRecord, name: str) -> float:
    return float(cast(float, metrics[name]))
