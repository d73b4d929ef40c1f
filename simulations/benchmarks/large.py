"""Default calls of SMEA on hundreds of vectors: what they take, what they certify.

No call may take much longer than the one on 100 isotropic vectors, 10 of them hostile,
which spends its whole budget.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean

import numpy as np

from flwr_safedshb.aggregation import SMEA
from flwr_safedshb.aggregation.gram import gram_matrix
from flwr_safedshb.aggregation.rule import FloatArray, Weighing
from flwr_safedshb.aggregation.scatter import scatter_lambda, squared_distances
from flwr_safedshb.theory import kappa_smea
from simulations.benchmarks.families import (
    Vectors,
    make_circle,
    make_clusters,
    make_family,
)
from simulations.benchmarks.grid import count_share, read_certificate
from simulations.benchmarks.measure import thread_seconds
from simulations.benchmarks.result import Measurement, ResultTable

REFERENCE = (100, 10)
SIZES = (128, 200, 256, 300, 500, 1000)
# Subsets of either kind that are held against a certificate.
OTHERS = 4

INPUTS: dict[str, Callable[[int, int], Vectors]] = {
    "isotropic": lambda n, f: make_family("isotropic", n, f, 69, 0),
    "circle": lambda n, f: make_circle(n),
    "clustered": lambda n, f: make_clusters(n, 69, 0),
}
SHARES: dict[str, Callable[[int], int]] = {
    "n/10": lambda n: n // 10,
    "n/5": lambda n: n // 5,
    "(n-1)//2": lambda n: (n - 1) // 2,
}


@dataclass(frozen=True)
class LargeCall:
    """A default call and its certificate.

    `name` and `share` are of `INPUTS` and `SHARES`; `seconds` are the processor's,
    without the Gram matrix; `true` is what `is_true` says of the certificate.
    """

    name: str
    share: str
    n: int
    f: int
    seconds: float
    gap: float
    kappa: float
    true: bool


def measure_call(name: str, share: str, n: int, f: int) -> LargeCall:
    """Make one default call."""
    products = gram_matrix([[row] for row in INPUTS[name](n, f)])
    seconds, answer = thread_seconds(lambda: SMEA().weigh(products, f))
    gap, kappa = read_certificate(answer)
    true = is_true(products, answer, gap, kappa)
    return LargeCall(name, share, n, f, seconds, gap, kappa, true)


def is_true(products: FloatArray, answer: Weighing, gap: float, kappa: float) -> bool:
    """Return whether a certificate withstands what can be tried at any n.

    The subset has its eigenvalue, kappa follows from the gap, and none of some other
    subsets is below the bound: the n - f nearest to some of the vectors, and n - f
    at random. `products` is the (n, n) Gram matrix.
    """
    subset, bound = answer.subset, answer.lower_bound
    assert subset is not None
    assert bound is not None
    n, m = len(products), len(subset)
    distances = squared_distances(products)
    rng = np.random.default_rng(0)
    others = [rng.permutation(n)[:m] for _ in range(OTHERS)]
    others += [np.argsort(distances[i])[:m] for i in rng.permutation(n)[:OTHERS]]
    values = [scatter_lambda(distances, some) / m for some in (subset, *others)]
    return (
        math.isclose(values[0], answer.lambda_max, rel_tol=1e-6)
        and min(values) >= bound * (1.0 - 1e-6)
        and gap >= 0.0
        and math.isclose(kappa, kappa_smea(n, n - m, gap), rel_tol=1e-9)
    )


def measure_calls(sizes: Sequence[int] = SIZES) -> list[LargeCall]:
    """Make the reference call, first and last, and every other one between."""
    reference = ("isotropic", "n/10", *REFERENCE)
    first = measure_call(*reference)
    between = [
        measure_call(name, share, n, SHARES[share](n))
        for name in INPUTS
        for share in SHARES
        for n in sizes
    ]
    return [first, *between, measure_call(*reference)]


def _reference_seconds(calls: Sequence[LargeCall]) -> float:
    return mean([calls[0].seconds, calls[-1].seconds])


def _group_lines(calls: Sequence[LargeCall]) -> dict[tuple[str, str], list[LargeCall]]:
    """Return the calls on one kind of input, by growing n."""
    lines: dict[tuple[str, str], list[LargeCall]] = {}
    for call in sorted(calls[1:-1], key=lambda call: call.n):
        lines.setdefault((call.name, call.share), []).append(call)
    return lines


def make_table(calls: Sequence[LargeCall]) -> ResultTable:
    """Return every call in calls at `REFERENCE`, and its gap."""
    unit = _reference_seconds(calls)
    lines = _group_lines(calls)
    sizes = [call.n for call in next(iter(lines.values()))]
    rows = [
        (*kind, *(f"{call.seconds / unit:.2f}, {call.gap:.0%}" for call in line))
        for kind, line in lines.items()
    ]
    return ResultTable(
        "Default calls of SMEA on many vectors",
        ("vectors", "f", *(f"n = {n:,}" for n in sizes)),
        rows,
        f"Each: time in calls at {REFERENCE} on isotropic vectors ({unit:.1f} s), and "
        "how far above the proven lower bound the answer can be at most.",
    )


def read_figures(calls: Sequence[LargeCall]) -> dict[str, Measurement]:
    """Return the longest call, the true certificates, and how gaps go with n."""
    longest = max(calls[1:-1], key=lambda call: call.seconds)
    steps = [
        ((1.0 + after.gap) / (1.0 + before.gap), after)
        for line in _group_lines(calls).values()
        for before, after in pairwise(line)
    ]
    looser, where = max(steps, key=lambda step: step[0], default=(0.0, longest))
    return {
        "n up to 1,000: longest call": Measurement(
            longest.seconds / _reference_seconds(calls),
            f"{longest.name} ({longest.n}, {longest.f})",
        ),
        "n up to 1,000: true certificates": count_share([call.true for call in calls]),
        "n up to 1,000: answer over its bound": Measurement(
            looser, f"{where.name} ({where.n}, {where.f})"
        ),
    }
