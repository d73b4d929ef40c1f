"""Every constant against an optimiser: ``python -m simulations.study constants``.

A constant kappa says that no n vectors take the rule's output farther from the mean of
n - f of them than kappa times their spread. Here an optimiser looks for vectors that
do: an evolution strategy from many starts, some of them built for it. It finds nothing
above, and how near it comes says how much of a constant is real.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_safedshb.aggregation import (
    CAF,
    NNM,
    SMEA,
    Filter,
    GeometricMedian,
    GramRule,
    Krum,
    Median,
    Rule,
    TrimmedMean,
)
from flwr_safedshb.theory import (
    heterogeneity,
    kappa_filter_agnostic,
    kappa_lower_bound,
    kappa_spectral,
)
from simulations.results.tables import Table
from simulations.study import Runs, Section, Study, grid

LARGEST = 9
Floats = NDArray[np.float64]
# From n vectors, (n, d), of which the last n - f are S: error over kappa times spread.
Excess = Callable[[Floats, int], float]

DIMENSIONS = (1, 2, 4)
# Below this share of the vectors' own size a spread is round-off.
RESOLUTION = 1e-9


@dataclass(frozen=True)
class Claim:
    """A constant, as what an optimiser should push above 1.

    Attributes
    ----------
    name : str
    kappa : callable (n, f) -> float or None
        None where nothing is claimed.
    error : callable (vectors, f) -> float
        Squared distance over the spread, or over kappa times that where the constant is
        the answer's own and `kappa` is 1.
    """

    name: str
    kappa: Callable[[int, int], float | None]
    error: Excess


def list_claims() -> Iterator[Claim]:
    """Yield every constant that the package states of a rule."""
    for rule in (SMEA(), Krum(), Median(), GeometricMedian(), TrimmedMean()):
        yield from _in_both_senses(rule, type(rule).__name__)
    yield from _in_both_senses(NNM(TrimmedMean()), "NNM(TrimmedMean)")
    for other in (Filter(), CAF()):
        name = f"{type(other).__name__}, f < n/3"
        yield Claim(name, kappa_filter_agnostic, _error(other, spectral=True))
        name = f"{type(other).__name__}, its answer's own"
        yield Claim(name, lambda n, f: 1.0, _certified(other))
    bounded = Filter(spectral_bound=1.0)
    yield Claim("Filter with a bound", bounded.kappa, _bounded)


def _in_both_senses(rule: Rule, name: str) -> Iterator[Claim]:
    spectral = rule.kappa_kind == "spectral"
    yield Claim(f"{name}, {rule.kappa_kind}", rule.kappa, _error(rule, spectral))
    if not spectral:

        def kappa(n: int, f: int) -> float | None:
            proven = rule.kappa(n, f)
            return None if proven is None else kappa_spectral(proven, n, f)

        yield Claim(f"{name}, spectral", kappa, _error(rule, spectral=True))


def _error(rule: Rule, spectral: bool) -> Excess:
    def error(vectors: Floats, f: int) -> float:
        return _ratio(vectors, f, rule(vectors, f), spectral)

    return error


def _certified(rule: GramRule) -> Excess:
    def error(vectors: Floats, f: int) -> float:
        answer = rule.weigh(vectors @ vectors.T, f)
        if answer.kappa is None or not 0.0 < answer.kappa < np.inf:
            return 0.0
        return _ratio(vectors, f, answer.weights @ vectors, True) / answer.kappa

    return error


def _bounded(vectors: Floats, f: int) -> float:
    """Error of Filter whose bound is the eigenvalue itself."""
    top = heterogeneity(vectors[f:])[1] ** 2
    if top <= RESOLUTION * float(np.square(vectors).sum()):
        return 0.0
    return _ratio(vectors, f, Filter(spectral_bound=top)(vectors, f), True)


def _ratio(vectors: Floats, f: int, out: NDArray[np.floating], spectral: bool) -> float:
    honest = vectors[f:]
    total, top = heterogeneity(honest)
    spread = (top if spectral else total) ** 2
    if spread <= RESOLUTION * float(np.square(vectors).sum()):
        return 0.0
    return float(np.square(out - honest.mean(axis=0)).sum()) / spread


def attack_claim(
    claim: str, n: int, f: int, starts: int = 12, steps: int = 250, seed: int = 0
) -> dict[str, object]:
    """Look for vectors that break a claim, by its name; return how near they come."""
    (chosen,) = (one for one in list_claims() if one.name == claim)
    proven, (best, _) = chosen.kappa(n, f), search(chosen, n, f, starts, steps, seed)
    assert proven is not None
    return {"n": n, "f": f, "proven": proven, "found": best}


def search(
    claim: Claim, n: int, f: int, starts: int, steps: int, seed: int = 0
) -> tuple[float, Floats]:
    """Return the largest error over spread that an optimiser finds, and its vectors."""
    rng = np.random.default_rng([seed, n, f])
    best, worst = 0.0, np.zeros((n, 1))
    for start in range(starts):
        d = DIMENSIONS[start % len(DIMENSIONS)]
        x = _start(start, n, f, d, rng)
        value, step = claim.error(x, f), 0.3
        for _ in range(steps):
            # One vector or all of them: ties break one at a time.
            moved = x + step * rng.normal(size=x.shape) * _some(n, rng)
            new = claim.error(moved, f)
            if new > value:
                x, value, step = moved, new, 1.5 * step
            else:
                step = max(0.9 * step, 1e-6)
        if value > best:
            best, worst = value, x
    return best, worst


def _start(start: int, n: int, f: int, d: int, rng: np.random.Generator) -> Floats:
    """Return vectors to begin with: built to tie, on a lattice, or anywhere."""
    x = np.zeros((n, d))
    if start % 4 == 0:
        # Hostile on one side, f of S on the other: SMEA cannot tell them apart.
        x[:f, 0], x[n - f :, 0] = -1.0 + 1e-4, 1.0
    elif start % 4 == 1:
        # The example behind f/(n-2f): f of S stand out, and the hostile join the rest.
        x[n - f :, 0] = 1.0
        x[:f] = 1e-6 * rng.normal(size=(f, d))
    elif start % 4 == 2:
        x = rng.integers(-2, 3, size=(n, d)).astype(np.float64)
    else:
        x = rng.normal(size=(n, d))
        x[:f] = x[:f].mean(axis=0) * rng.uniform(0.5, 4.0)
    return x


def _some(n: int, rng: np.random.Generator) -> Floats:
    if rng.random() < 0.5:
        return np.ones((n, 1))
    chosen = np.zeros((n, 1))
    chosen[rng.integers(n)] = 1.0
    return chosen


def list_pairs(largest: int) -> Iterator[tuple[int, int]]:
    """Yield every n from 5 on with every f."""
    for n in range(5, largest + 1):
        for f in range(1, (n - 1) // 2 + 1):
            yield n, f


def make_grid() -> Iterator[Any]:
    """Yield a case for each claim, n and f for which there is a constant."""
    for claim in list_claims():
        for n, f in list_pairs(LARGEST):
            if claim.kappa(n, f) is not None:
                yield from grid(
                    claim={claim.name: shlex.quote(f"claim={claim.name}")},
                    n={f"{n}": f"n={n}"},
                    f={f"{f}": f"f={f}"},
                )


def report(runs: Runs[Any]) -> Iterator[Section]:
    """Yield how near the optimiser came to each constant, and every search."""
    rows, summary = [], []
    for claim, groups in runs.groups("claim").items():
        metrics = [run["metrics"] for run in groups]
        ends: list[str] = []
        for pick in (min, max):
            one = pick(metrics, key=lambda m: m["proven"] / m["found"])
            ends += [f"{one['proven'] / one['found']:.3g}", f"{one['n']}, {one['f']}"]
        summary.append([claim, *ends])
        for one in metrics:
            n, f, proven, best = (one[key] for key in ("n", "f", "proven", "found"))
            figures = [f"{proven:.4g}", f"{best:.4g}", f"{proven / best:.3g}"]
            limit = f"{kappa_lower_bound(n, f):.3g}"
            rows.append([claim, f"{n}", f"{f}", *figures, limit])
    broken = sum(map(_is_broken, runs.values()))
    heads = ["constant", "proven / found, least", "at n, f", "most", "at n, f"]
    yield Section(
        "How near an optimiser comes",
        f"{len(runs)} constants attacked, {broken} broken.",
        Table(heads, summary),
    )
    heads = ["constant", "n", "f", "proven", "best found", "proven / found", "f/(n-2f)"]
    yield Section("All searches", table=Table(heads, rows))


def _is_broken(run: dict[str, Any]) -> bool:
    found = run["metrics"]
    return bool(found["found"] > found["proven"] * (1.0 + RESOLUTION))


def is_any_broken(runs: Runs[Any]) -> bool:
    """Return True if a constant is broken."""
    return any(map(_is_broken, runs.values()))


study = Study(
    "constants",
    "Every constant against an optimiser",
    "Do any vectors take a rule farther from the honest mean than its constant says?",
    list(make_grid()),
    seeds=(0,),
    report=report,
    measure=attack_claim,
    failed=is_any_broken,
)
