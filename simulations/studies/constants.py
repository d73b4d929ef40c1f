"""Every constant against an optimiser: ``python -m simulations.studies.constants``.

A constant kappa says that no n vectors take the rule's output farther from the mean of
n - f of them than kappa times their spread. Here an optimiser looks for vectors that
do: an evolution strategy from many starts, some of them built for it. It finds nothing
above, and how near it comes says how much of a constant is real.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.progress import track

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
from simulations.command import Parser, at_least, complaining, prepare_file

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


@dataclass(frozen=True)
class Found:
    """The worst vectors that were found for a claim."""

    claim: str
    n: int
    f: int
    proven: float
    best: float
    vectors: Floats


def claims() -> Iterator[Claim]:
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


def attack(
    claim: Claim, n: int, f: int, starts: int, steps: int, seed: int = 0
) -> Found | None:
    """Look for vectors that break a claim; None where nothing is claimed."""
    proven = claim.kappa(n, f)
    if proven is None:
        return None
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
    return Found(claim.name, n, f, proven, best, worst)


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


def pairs(largest: int) -> Iterator[tuple[int, int]]:
    """Yield every n from 5 on with every f."""
    for n in range(5, largest + 1):
        for f in range(1, (n - 1) // 2 + 1):
            yield n, f


def table(found: Sequence[Found]) -> str:
    """Return what was found as a table, a row for each claim, n and f."""
    lines = ["| constant | n | f | proven | best found | proven / found | f/(n-2f) |"]
    lines.append("|---" * 7 + "|")
    for one in found:
        limit = kappa_lower_bound(one.n, one.f)
        lines.append(
            f"| {one.claim} | {one.n} | {one.f} | {one.proven:.4g} | {one.best:.4g} | "
            f"{one.proven / one.best:.3g} | {limit:.3g} |"
        )
    return "\n".join(lines) + "\n"


def summary(found: Sequence[Found]) -> str:
    """Return how near the optimiser came to each constant, over all n and f."""
    lines = ["| constant | proven / found, least | at n, f | most | at n, f |"]
    lines.append("|---" * 5 + "|")
    for name in dict.fromkeys(one.claim for one in found):
        rows = [one for one in found if one.claim == name]
        low, high = (
            pick(rows, key=lambda one: one.proven / one.best) for pick in (min, max)
        )
        cells = [name]
        for one in (low, high):
            cells += [f"{one.proven / one.best:.3g}", f"{one.n}, {one.f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


@complaining
def main(arguments: Sequence[str] | None = None) -> int:
    """Attack every constant; 1 if one is broken."""
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--largest", type=at_least(5), default=9, help="n (default: 9)")
    parser.add_argument(
        "--starts", type=at_least(1), default=12, help="of the optimiser"
    )
    parser.add_argument(
        "--steps", type=at_least(0), default=250, help="from each start"
    )
    parser.add_argument("--out", type=Path, default=Path("outputs/constants.md"))
    options = parser.parse_args(arguments)
    prepare_file(options.out)
    cases = [(claim, n, f) for claim in claims() for n, f in pairs(options.largest)]
    found = [
        one
        for case in track(cases, "attacking constants")
        if (one := attack(*case, options.starts, options.steps)) is not None
    ]
    broken = [one for one in found if one.best > one.proven * (1.0 + RESOLUTION)]
    text = table(found) + "\n" + summary(found)
    print(text)
    options.out.write_text(text)
    print(f"{len(found)} constants attacked, {len(broken)} broken; see {options.out}")
    return 1 if broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
