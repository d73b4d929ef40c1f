"""What the aggregation should achieve, and whether it does on this machine."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from statistics import median
from typing import TypeVar

from simulations.benchmarks.cells import TIME_LIMIT, Sample
from simulations.benchmarks.outcome import Check, at_least, at_most, short

K = TypeVar("K", bound=Hashable)
WIDE = 100_000


def ratio(samples: Iterable[Sample], above: str, below: str) -> float:
    """Return the median over inputs of the ratio of two times of the same turns."""
    return median(s.seconds[above] / s.seconds[below] for s in samples)


def speedup(samples: Iterable[Sample], rival: str) -> float | None:
    """Return how many times longer a rival takes: the median over its inputs."""
    asked = [s for s in samples if rival in s.prices]
    ratios = [s.prices[rival].seconds / s.seconds["SMEA"] for s in asked]
    return median(ratios) if ratios else None


def extrapolated(samples: Iterable[Sample], rival: str) -> bool:
    """Say whether any price of a rival comes from a sample of the subsets."""
    return any(s.prices[rival].extrapolated for s in samples if rival in s.prices)


def sample_checks(samples: Sequence[Sample]) -> list[Check]:
    """Return the checks for which there are samples."""
    small = [s for s in samples if s.n <= 30 and s.d == WIDE]
    return [
        *_faster(samples, "ByzFL", 69, 300.0),
        *_faster(samples, "ByzFL", WIDE, 10_000.0),
        *_faster(samples, "ByzPy", 4096, 50.0),
        *_floor(small),
        *_exact([s for s in samples if (s.n, s.f) == (50, 10)]),
        *_certified([s for s in samples if (s.n, s.f) == (100, 10)]),
        *_answers(samples),
    ]


def _faster(samples: Sequence[Sample], rival: str, d: int, bound: float) -> list[Check]:
    cell = [s for s in samples if s.cell == (20, 6, d)]
    value = speedup(cell, rival)
    if value is None:
        return []
    note = "extrapolated" if extrapolated(cell, rival) else "whole calls"
    return [at_least(f"(20, 6), d = {short(d)}: {rival} / SMEA", value, bound, note)]


def _floor(samples: Sequence[Sample]) -> list[Check]:
    """Check the size and family that is worst against the Gram matrix."""
    groups = grouped((f"({s.n}, {s.f}) {s.family}", s) for s in samples)
    if not groups:
        return []
    where, worst = max(groups, key=lambda group: ratio(group[1], "SMEA", "gram"))
    return [
        at_most(
            f"n <= 30, d = {short(WIDE)}",
            ratio(worst, "SMEA", "gram"),
            3.0,
            "Gram",
            f"worst: {where}, {short(ratio(worst, 'SMEA', 'BLAS'))} BLAS",
        )
    ]


def _exact(samples: Sequence[Sample]) -> list[Check]:
    """Check (50, 10): families by their median, and every answer by its gap."""
    checks = []
    for (d, name), group in grouped(((s.d, s.family), s) for s in samples):
        ratios = [s.seconds["SMEA"] / s.seconds["eigvalsh"] for s in group]
        exact = sum(s.gap == 0.0 for s in group)
        check = at_most(
            f"(50, 10), d = {short(d)}, {name}",
            median(ratios),
            5000.0,
            "eig",
            f"max {short(max(ratios))}, exact {exact} of {len(group)}",
        )
        if exact < len(group):
            gap = max(s.gap for s in group)
            note = f"{check.note}, gap {gap:.0%}"
            check = Check(check.what, check.measured, check.bound, False, note)
        checks.append(check)
    return checks


def _certified(samples: Sequence[Sample]) -> list[Check]:
    if not samples:
        return []
    exact = sum(s.gap == 0.0 for s in samples)
    gap, kappa = max(s.gap for s in samples), max(s.kappa for s in samples)
    seconds = max(s.seconds["SMEA"] for s in samples)
    return [
        Check(
            f"(100, 10), time_limit={TIME_LIMIT:g}",
            f"gap {gap:.1%}",
            "certified",
            math.isfinite(kappa),
            f"exact {exact} of {len(samples)}, kappa {kappa:.3f}, {seconds:.1f} s",
        )
    ]


def _answers(samples: Sequence[Sample]) -> list[Check]:
    """Check SMEA against brute force, where that looked at every subset."""
    found = finds(samples).get("brute force")
    if not found:
        return []
    hits, runs = found
    measured = f"{hits} of {runs}"
    return [Check("same subset as brute force", measured, "all", hits == runs)]


def finds(samples: Iterable[Sample]) -> dict[str, tuple[int, int]]:
    """Count for each rival how often it gave SMEA's answer, of its whole calls."""
    counts: dict[str, tuple[int, int]] = {}
    for sample in samples:
        for rival, price in sample.prices.items():
            if price.found is not None:
                hits, runs = counts.get(rival, (0, 0))
                counts[rival] = hits + price.found, runs + 1
    return counts


def grouped(pairs: Iterable[tuple[K, Sample]]) -> list[tuple[K, list[Sample]]]:
    """Group samples by key, in the order of their first."""
    groups: dict[K, list[Sample]] = {}
    for key, sample in pairs:
        groups.setdefault(key, []).append(sample)
    return list(groups.items())


def filter_check(seconds: Mapping[str, float], n: int, d: int) -> Check:
    """Check Filter against its Gram matrix."""
    value = seconds["Filter"] / seconds["gram"]
    return at_most(f"Filter, n = {n:,}, d = {short(d)}", value, 3.0, "Gram")


def memory_check(models: float, n: int, d: int) -> Check:
    """Check the memory beyond the replies, in models."""
    what = f"extra memory, n = {n}, d = {short(d)}"
    return at_most(what, models, 1.5, "models")


def hostile_checks(ends: Mapping[str, Mapping[str, float]]) -> list[Check]:
    """Check that the default budget ends searches that would go on for ever."""
    return [
        Check(
            f"hostile: {name}",
            f"{end['seconds']:.2f} s",
            "certified",
            math.isfinite(end["kappa"]),
            f"gap {end['gap']:.1%}, kappa {end['kappa']:.2f}",
        )
        for name, end in ends.items()
    ]
