"""Default calls of SMEA on hundreds of vectors: what they take, what they certify.

No call may take much longer than the one on 100 isotropic vectors, 10 of them hostile,
which spends its whole budget; and a certificate must not get looser with the number of
vectors, as it would if the search were left out somewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from flwr_safedshb.aggregation import SMEA
from flwr_safedshb.aggregation.gram import gram_matrix
from flwr_safedshb.aggregation.rule import FloatArray, Weighing
from flwr_safedshb.aggregation.scatter import scatter_lambda, squared_distances
from flwr_safedshb.theory import kappa_smea
from simulations.benchmarks.cells import certificate
from simulations.benchmarks.families import Vectors, circle, clustered, family
from simulations.benchmarks.measure import worked
from simulations.benchmarks.outcome import Check, Table, at_most

REFERENCE = (100, 10)
SIZES = (128, 200, 256, 300, 500, 1000)
# The most that a call may take, in calls at `REFERENCE`; and how many times that of the
# next smaller n the ratio of an answer to its lower bound may be.
LONGEST, LOOSER = 2.0, 1.2
# Subsets of either kind that are held against a certificate.
OTHERS = 4

INPUTS: dict[str, Callable[[int, int], Vectors]] = {
    "isotropic": lambda n, f: family("isotropic", n, f, 69, 0),
    "circle": lambda n, f: circle(n),
    "clustered": lambda n, f: clustered(n, 69, 0),
}
SHARES: dict[str, Callable[[int], int]] = {
    "n/10": lambda n: n // 10,
    "n/5": lambda n: n // 5,
    "(n-1)//2": lambda n: (n - 1) // 2,
}


@dataclass(frozen=True)
class Call:
    """A default call, and its certificate.

    Attributes
    ----------
    name, share : str
        Of `INPUTS` and `SHARES`.
    n, f : int
    seconds : float
        The processor's, without the Gram matrix.
    gap, kappa : float
    true : bool
        Whether the certificate is: see `_true`.
    """

    name: str
    share: str
    n: int
    f: int
    seconds: float
    gap: float
    kappa: float
    true: bool


def call(name: str, share: str, n: int, f: int) -> Call:
    """Make one default call."""
    products = gram_matrix([[row] for row in INPUTS[name](n, f)])
    seconds, answer = worked(lambda: SMEA().weigh(products, f))
    found = certificate(answer)
    return Call(name, share, n, f, seconds, *found, _true(products, answer, *found))


def _true(products: FloatArray, answer: Weighing, gap: float, kappa: float) -> bool:
    """Whether a certificate withstands what can be tried at any n.

    The subset has its eigenvalue, kappa follows from the gap, and none of some other
    subsets is below the bound: the n - f nearest to some of the vectors, and n - f
    at random.
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


def calls(sizes: Sequence[int]) -> list[Call]:
    """Make the reference call, first and last, and every other one between."""
    reference = ("isotropic", "n/10", *REFERENCE)
    first = call(*reference)
    between = [
        call(name, share, n, SHARES[share](n))
        for name in INPUTS
        for share in SHARES
        for n in sizes
    ]
    return [first, *between, call(*reference)]


def _reference(made: Sequence[Call]) -> float:
    ends = [c.seconds for c in (made[0], made[-1])]
    return float(np.mean(ends))


def table(made: Sequence[Call]) -> Table:
    """Return every call in calls at `REFERENCE`, and its gap."""
    unit = _reference(made)
    sizes = sorted({c.n for c in made[1:-1]})
    rows = [
        (
            name,
            share,
            *(
                f"{c.seconds / unit:.2f}, {c.gap:.0%}"
                for c in sorted(_line(made, name, share), key=lambda c: c.n)
            ),
        )
        for name in INPUTS
        for share in SHARES
    ]
    return Table(
        "Default calls of SMEA on many vectors",
        ("vectors", "f", *(f"n = {n:,}" for n in sizes)),
        rows,
        f"Each: time in calls at {REFERENCE} on isotropic vectors ({unit:.1f} s), and "
        "how far above the proven lower bound the answer can be at most.",
    )


def _line(made: Sequence[Call], name: str, share: str) -> list[Call]:
    return [c for c in made[1:-1] if (c.name, c.share) == (name, share)]


def checks(made: Sequence[Call]) -> list[Check]:
    """Check the longest call, every certificate, and how gaps go with n."""
    unit = _reference(made)
    longest = max(made[1:-1], key=lambda c: c.seconds)
    untrue = [c for c in made if not c.true]
    steps = [
        ((1.0 + later.gap) / (1.0 + before.gap), later)
        for name in INPUTS
        for share in SHARES
        for before, later in _neighbours(_line(made, name, share))
    ]
    worst, where = max(steps, key=lambda step: step[0], default=(0.0, made[0]))
    return [
        at_most(
            "SMEA, n up to 1,000: longest default call",
            longest.seconds / unit,
            LONGEST,
            f"calls at {REFERENCE}",
            f"{longest.name} ({longest.n}, {longest.f})",
        ),
        Check(
            "SMEA, n up to 1,000: certificates that are true",
            f"{len(made) - len(untrue)} of {len(made)}",
            "all",
            not untrue,
        ),
        at_most(
            "SMEA, n up to 1,000: answer over its bound, from one n to the next",
            worst,
            LOOSER,
            "times",
            f"{where.name} ({where.n}, {where.f})",
        ),
    ]


def _neighbours(line: Sequence[Call]) -> list[tuple[Call, Call]]:
    ordered = sorted(line, key=lambda c: c.n)
    return list(pairwise(ordered))
