"""Measure what weights by size are worth: ``python -m simulations.study sizes``.

A node of size w has w times the examples, and at equal epsilon 1/w of the noise. A rule
that counts it as w copies is robust in the usual sense for the copies, with f' the
copies of the f largest nodes: against every set of n' - f' honest copies. That
constant, and the error under the worst of many attacks by the largest node, are
compared with those of the rule that counts every node once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_safedshb.aggregation import SMEA
from flwr_safedshb.theory import kappa_smea
from simulations.results.tables import Table
from simulations.study import Runs, Section, Study, grid

SIZES = {
    "seven of equal size": (1, 1, 1, 1, 1, 1, 1),
    "one is twice as large": (1, 1, 1, 1, 1, 1, 2),
    "three are twice as large": (1, 1, 1, 1, 2, 2, 2),
    "from 1 to 3": (1, 1, 1, 2, 2, 2, 3),
    "one has half of all": (1, 1, 1, 1, 1, 1, 6),
}
Integers = NDArray[np.int64]
DIMENSION, TRIALS = 69, 20
# Lengths of what the adversary adds to the honest mean, in units of a node's noise.
LENGTHS = np.geomspace(0.1, 10.0, 12)


def measure_weights(sizes: int, num_malicious_nodes: int) -> dict[str, float]:
    """Return constants and errors of a place in `SIZES`, for f nodes.

    Errors are root mean squares over draws, in units of the error of the honest
    weighted mean. "copies" are missing where the largest nodes have half of all.
    """
    weights, f = np.array([*SIZES.values()][sizes]), num_malicious_nodes
    once = np.ones_like(weights)
    found: dict[str, float] = {}
    for name, copies in (("once", once), ("copies", weights)):
        n, worst = int(copies.sum()), int(np.sort(copies)[-f:].sum())
        if n <= 2 * worst:
            continue
        found[f"kappa_{name}"] = kappa_smea(n, worst)
        for kind, attacked in (("unharmed", False), ("attacked", True)):
            found[f"{kind}_{name}"] = _measure_error(weights, copies, f, attacked)
    return found


def _measure_error(
    weights: Integers, copies: Integers, f: int, attacked: bool
) -> float:
    """Return the error of SMEA over nodes that count as so many copies each."""
    rng = np.random.default_rng(7)
    errors = []
    honest = np.argsort(weights, kind="stable")[:-f] if attacked else slice(None)
    repeats = copies[honest]
    num_malicious = int(np.sort(copies)[-f:].sum())
    best = 1.0 / np.sqrt(weights[honest].sum() ** 2 / len(weights[honest]))
    for _ in range(TRIALS):
        noise = rng.normal(size=(len(weights), DIMENSION)) / weights[:, None]
        vectors = np.repeat(noise[honest], repeats, axis=0)
        if not attacked:
            errors.append(float(np.linalg.norm(SMEA()(vectors, num_malicious))))
            continue
        mean, scale = vectors.mean(axis=0), np.sqrt(DIMENSION)
        directions = [mean, *rng.normal(size=(2, DIMENSION)), *noise[honest][:2]]
        candidates = []
        for direction in directions:
            unit = direction / np.linalg.norm(direction)
            for length in LENGTHS:
                sent = np.tile(mean + length * scale * unit, (num_malicious, 1))
                moved = SMEA()(np.concatenate([vectors, sent]), num_malicious)
                candidates.append(float(np.linalg.norm(moved)))
        errors.append(max(candidates))
    return float(np.sqrt(np.mean(np.square(errors))) / (best * np.sqrt(DIMENSION)))


def report(runs: Runs[Any]) -> Iterator[Section]:
    """Yield constants and errors."""
    rows = []
    for case, run in runs.items():
        found = run["metrics"]
        cells = [
            f"{found[key]:.2f}" if key in found else "no rule can"
            for kind in ("kappa", "unharmed", "attacked")
            for key in (f"{kind}_once", f"{kind}_copies")
        ]
        rows.append([case.labels["sizes"], case.labels["f"], *cells])
    heads = ["sizes", "f", "κ", "κ, copies", "error", "error, copies"]
    heads += ["attacked", "attacked, copies"]
    yield Section(
        "Every node once, or as many copies as its size", table=Table(heads, rows)
    )


study = Study(
    "sizes",
    "Weights by size",
    "Is a robust rule better if larger nodes count as several?",
    grid(
        sizes={name: f"sizes={i}" for i, name in enumerate(SIZES)},
        f={str(f): f"num_malicious_nodes={f}" for f in (1, 2)},
    ),
    seeds=(0,),
    report=report,
    measure=measure_weights,
)
