"""Time SMEA, its floor and its rivals on one input, in turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from statistics import median

import numpy as np

from flwr_safedshb.aggregation import SMEA, Filter, Weighing
from flwr_safedshb.aggregation.gram import gram_matrix
from flwr_safedshb.aggregation.rule import check_vectors
from simulations.benchmarks.families import FAMILIES, HOSTILE, Vectors, family
from simulations.benchmarks.measure import in_turns, worked
from simulations.benchmarks.rivals import Price, Rival, price

Cell = tuple[int, int, int]

# Above so many clients an exact answer is not expected: the search is told when to end.
PATIENT, TIME_LIMIT = 60, 10.0
# Turns on one input, before and after the rivals had theirs: seconds and number.
ENOUGH, MOST = 0.12, 12


@dataclass(frozen=True)
class Sample:
    """What was measured on one input.

    Attributes
    ----------
    n, f, d : int
    family : str
    seed : int
    seconds : dict
        Medians of "SMEA" (checks, Gram matrix, search, mean), "gram" (its Gram matrix),
        "BLAS" (the product alone, of an array that is float64 already), "eigvalsh" (of
        one n x n matrix).
    gap : float
        lambda_max of the answer over its proven lower bound, minus 1: 0 is exact.
    kappa : float
        Certified constant of the answer.
    prices : dict of name to Price
        What rivals cost, if they were asked.
    """

    n: int
    f: int
    d: int
    family: str
    seed: int
    seconds: dict[str, float]
    gap: float
    kappa: float
    prices: dict[str, Price] = field(default_factory=dict)

    @property
    def cell(self) -> Cell:
        """n, f and d."""
        return self.n, self.f, self.d


def rule_for(n: int) -> SMEA:
    """Return the rule that is measured at n clients."""
    return SMEA() if n < PATIENT else SMEA(time_limit=TIME_LIMIT)


def measure(
    cell: Cell,
    name: str,
    seed: int,
    rivals: Mapping[str, Rival],
    limit: float,
) -> Sample:
    """Measure one input.

    Parameters
    ----------
    cell : n, f, d
    name, seed : str, int
        See `family`.
    rivals : mapping
        Who else is asked.
    limit : float
        Seconds of a rival's call above which it is sampled.
    """
    n, f, d = cell
    vectors = family(name, n, f, d, seed)
    calls, answers = _calls(vectors, f)
    turns = in_turns(calls, ENOUGH, MOST)
    answer = answers[-1]
    assert answer.subset is not None
    best = tuple(answer.subset.tolist())
    rng = np.random.default_rng([seed, n, d])
    prices = {
        who: price(rival, vectors, f, best, limit, rng) for who, rival in rivals.items()
    }
    if prices and sum(turns["SMEA"]) < 1.0:
        for key, seconds in in_turns(calls, ENOUGH, MOST).items():
            turns[key] += seconds
    gap, kappa = certificate(answer)
    medians = {key: median(seconds) for key, seconds in turns.items()}
    return Sample(n, f, d, name, seed, medians, gap, kappa, prices)


def _calls(
    vectors: Vectors, f: int
) -> tuple[dict[str, Callable[[], object]], list[Weighing]]:
    """Return what is timed, and a list that collects SMEA's answers."""
    rule = rule_for(len(vectors))
    answers: list[Weighing] = []

    def smea() -> None:
        # What calling the rule does, without losing the certificate.
        _, weighing = rule.aggregate(check_vectors(vectors, f), f)
        assert weighing is not None
        answers.append(weighing)

    clients = [[row] for row in vectors]
    wide = vectors.astype(np.float64)
    product = wide @ wide.T
    calls: dict[str, Callable[[], object]] = {
        "SMEA": smea,
        "gram": lambda: gram_matrix(clients),
        "BLAS": lambda: wide @ wide.T,
        "eigvalsh": lambda: np.linalg.eigvalsh(product),
    }
    return calls, answers


def certificate(answer: Weighing) -> tuple[float, float]:
    """Return the relative gap to the proven lower bound, and kappa."""
    assert answer.lower_bound is not None
    assert answer.kappa is not None
    exact = answer.lambda_max <= answer.lower_bound
    gap = 0.0 if exact else answer.lambda_max / answer.lower_bound - 1.0
    return gap, answer.kappa


def warm_up() -> float:
    """Return the seconds of a first call that searches; later ones have it compiled."""
    vectors = family(FAMILIES[0], 15, 6, 20, 0)
    seconds, _ = worked(lambda: SMEA()(vectors, 6))
    return seconds


def filter_turns(n: int, f: int, d: int) -> dict[str, float]:
    """Return the median seconds of Filter and of its Gram matrix."""
    vectors = family("alie", n, f, d, seed=4)
    clients = [[row] for row in vectors]
    turns = in_turns(
        {"Filter": lambda: Filter()(vectors, f), "gram": lambda: gram_matrix(clients)},
        enough=10.0,
        most=3,
    )
    return {key: median(seconds) for key, seconds in turns.items()}


def hostile_ends() -> dict[str, dict[str, float]]:
    """Return seconds, gap and kappa of SMEA on inputs made to defeat its search."""
    ends = {}
    for name, (vectors, f) in HOSTILE.items():
        products = gram_matrix([[row] for row in vectors])
        seconds, answer = worked(partial(SMEA().weigh, products, f))
        gap, kappa = certificate(answer)
        ends[name] = {"seconds": seconds, "gap": gap, "kappa": kappa}
    return ends
