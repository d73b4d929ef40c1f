"""The rules against attacks, without training: ``python -m simulations.study duel``.

Honest clients send one noisy vector each, adversaries see them all and answer, and the
table says how far each rule is moved. ``--set n=20 f=4 d=1000 signal=0`` changes the
setting.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_safedshb.aggregation import (
    CAF,
    MDA,
    NNM,
    SMEA,
    Average,
    Filter,
    GeometricMedian,
    Krum,
    Median,
    MultiKrum,
    Rule,
    TrimmedMean,
)
from flwr_safedshb.attacks import (
    ALIE,
    FOE,
    Attack,
    FarCluster,
    MimicShift,
    NonFinite,
    SignFlip,
)
from flwr_safedshb.theory import check_num_malicious
from simulations.results.tables import Table
from simulations.study import Runs, Section, Study, grid

Floats = NDArray[np.float32]

RULES: dict[str, Rule] = {
    "Average": Average(),
    "Median": Median(),
    "TrimmedMean": TrimmedMean(),
    "Krum": Krum(),
    "MultiKrum": MultiKrum(),
    "GeometricMedian": GeometricMedian(),
    "MDA": MDA(),
    "CAF": CAF(),
    "Filter": Filter(),
    "SMEA": SMEA(),
    "NNM(TrimmedMean)": NNM(TrimmedMean()),
}
ATTACKS: dict[str, Attack | None] = {
    "none": None,
    "sign flip": SignFlip(),
    "ALIE": ALIE(),
    "FOE": FOE(),
    "mimic-shift": MimicShift(directions=("mean", "spectrum"), aim="distance"),
    "far cluster": FarCluster(),
    "NaN": NonFinite(),
}
# In standard errors: above, a rule is called moved.
BAD = 3.0


def displace(
    rule: str,
    attack: str,
    n: int = 10,
    f: int = 3,
    d: int = 69,
    signal: float = 1.0,
    seed: int = 0,
) -> Mapping[str, object]:
    """Return how far a rule is from the honest mean, in its standard errors.

    The standard error is sqrt(trace(cov) / h) over the h honest vectors: how far their
    mean itself is, on average, from what they were drawn around.

    Parameters
    ----------
    rule, attack : str
        Keys of `RULES` and `ATTACKS`.
    n, f, d : int
        Clients, adversaries among them, dimension.
    signal : float
        Every coordinate of the vector that honest clients send noisily; the noise has
        standard deviation 1.
    seed : int
    """
    check_num_malicious(n, f)
    rng = np.random.default_rng(seed)
    chosen, aggregate = ATTACKS[attack], RULES[rule]
    honest_clients = n if chosen is None else n - f
    noise = rng.standard_normal((honest_clients, d), dtype=np.float32)
    honest = np.float32(signal) + noise
    sent = honest
    if chosen is not None:
        sent = np.concatenate((honest, chosen(honest, f, rng, aggregate)))
    error = math.sqrt(honest.var(axis=0).sum() / honest_clients)
    distance = np.linalg.norm(receive(aggregate, sent, f) - honest.mean(axis=0))
    kappa = aggregate.kappa(n, f)
    return {
        "displacement": float(distance) / error,
        "kappa": "-" if kappa is None else f"{kappa:.1f} {aggregate.kappa_kind[0]}",
        "setting": f"f = {f} of n = {n}, d = {d}",
    }


def receive(rule: Rule, sent: Floats, f: int) -> NDArray[np.floating]:
    """Aggregate (n, d) vectors as the server does.

    What is not finite is excluded, and whoever sent it was an adversary.
    """
    finite = np.isfinite(sent).all(axis=1)
    return rule(sent[finite], max(0, f - int((~finite).sum())))


def report(runs: Runs[Any]) -> Iterator[Section]:
    """Yield the mean displacement of every rule under every attack."""
    rows = []
    for rule, by_rule in runs.by("rule").items():
        metrics: list[dict[str, Any]] = []
        cells = []
        for some in by_rule.groups("attack").values():
            metrics = [run["metrics"] for run in some]
            mean = np.mean([one["displacement"] for one in metrics])
            cells.append(f"{mean:.2f}" if mean <= BAD else f"**{mean:.2f}**")
        rows.append([rule, *cells, str(metrics[0]["kappa"])])
    yield Section(
        f"How far adversaries move each rule, {metrics[0]['setting']}",
        table=Table(["rule", *runs.labels("attack"), "kappa"], rows),
        notes="A cell is the distance of the rule's output from the mean of the honest "
        "vectors, in standard errors of that mean (averages over "
        f"{len(runs.seeds)} tries): 1 costs as much as the chance in the honest "
        f"vectors does anyway. Above {BAD:g} is bold. Adversaries see every honest "
        "vector; ALIE, FOE and mimic-shift choose, for each rule, the strength that "
        "harms it the most. Who sends NaN is excluded by the server and counts as "
        "found, so f falls. kappa is the proven constant, in which the squared "
        "distance is bounded: s in units of the largest eigenvalue of the honest "
        "covariance, v in units of its trace, up to n - f - 1 times larger; - where "
        "there is none. For f < n/3 Filter's default is CAF. One table is no proof: an "
        "attack that is not in it may do better.",
    )


study = Study(
    "duel",
    "The rules against attacks, without training",
    "How far do adversaries move each rule in one step?",
    grid(rule=[*RULES], attack=[*ATTACKS]),
    seeds=range(10),
    report=report,
    measure=displace,
)
