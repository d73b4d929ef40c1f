"""What the paper says, what the runs show, and how the two differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from simulations.results.schema import RunRecord
from simulations.results.summary import ATTACK_WORDS, curve, final, late, losses
from simulations.studies.paper.cases import (
    ATTACKS,
    BENCHMARK,
    OWN_ATTACKS,
    PAPER_ATTACKS,
)
from simulations.studies.paper.summary import (
    METHOD_WORDS,
    Runs,
    group,
    regimes,
)

# "Around 80% in the low and moderate regimes, around 75% in the high one (a bit lower
# under the FOE attack)": the bracket is about high privacy alone.
PAPER_ACCURACY = {"low": 0.80, "moderate": 0.80, "high": 0.75}
A_BIT = 0.10
# Where the paper sees the losses match DP-DSGD's in the end.
MATCHING = {"label-flip": ("low", "moderate", "high"), "alie": ("low", "moderate")}
PAPER_EPSILON = {"low": 1.14, "moderate": 0.32, "high": 0.19}


@dataclass(frozen=True)
class Verdict:
    """A statement, whose it is, and whether these runs bear it out."""

    statement: str
    holds: bool
    evidence: str
    whose: Literal["the paper", "ours"] = "the paper"


def verdicts(runs: Runs) -> list[Verdict]:
    """Hold the paper's statements against the runs, and then some of our own."""
    there = [m for m in METHOD_WORDS if any(case.method == m for case in runs)]
    said = [
        verdict
        for rule in ("smea", "filter-literal")
        for verdict in (*_accuracies(runs, rule), _loss_falls(runs, rule))
    ]
    said += [_losses_match(runs, rule) for rule in ("smea", "filter-literal")]
    if len(regimes(runs)) > 1:
        said += [_degrades(runs, method) for method in (BENCHMARK, "smea")]
    own = [m for m in there if m in (BENCHMARK, "filter")]
    said += [replace(_loss_falls(runs, method), whose="ours") for method in own]
    said += [_withstands(runs, method) for method in there if method != BENCHMARK]
    said += [_strongest_is_worst(runs, m) for m in there if m != BENCHMARK]
    return [*said, _filter_does_the_same(runs), _benchmark_is_best(runs, there[1:])]


def _accuracies(runs: Runs, rule: str) -> Iterator[Verdict]:
    """Around 80% and 75%; of Filter the paper says that the same is observed."""
    for regime in regimes(runs):
        wanted = PAPER_ACCURACY[regime]
        found = {a: final(group(runs, regime, rule, a)).mean for a in PAPER_ATTACKS}
        where = f"{METHOD_WORDS[rule]} at {regime} privacy"
        if regime == "high":
            foe = found.pop("foe")
            yield Verdict(
                f"{where}: a bit lower than {wanted:.2f} under FOE at worst",
                foe >= wanted - A_BIT,
                f"mean {foe:.3f}; a bit is read as {A_BIT:.2f}",
            )
        attack = min(found, key=lambda a: found[a])
        yield Verdict(
            f"{where}: around {wanted:.2f}, or more",
            found[attack] >= wanted,
            f"lowest mean {found[attack]:.3f}, under {ATTACK_WORDS[attack]}",
        )


def _loss_falls(runs: Runs, method: str) -> Verdict:
    rising = [
        f"rises at {regime} privacy under {ATTACK_WORDS[attack]}"
        for regime in regimes(runs)
        for attack in PAPER_ATTACKS
        if not losses(group(runs, regime, method, attack)).falls
    ]
    text = f"the training loss falls under its four attacks: {METHOD_WORDS[method]}"
    return Verdict(text, not rising, "; ".join(rising) or "falls in all of them")


def _withstands(runs: Runs, method: str) -> Verdict:
    """Look whether it also falls under colluders who search for the worst."""
    rising = [
        f"rises at {regime} privacy under {ATTACK_WORDS[attack]}"
        for regime in regimes(runs)
        for attack in OWN_ATTACKS
        if not losses(group(runs, regime, method, attack)).falls
    ]
    text = f"it falls under mimic-shift and strongest, too: {METHOD_WORDS[method]}"
    words = "; ".join(rising) or "falls in all of them"
    return Verdict(text, not rising, words, "ours")


def _strongest_is_worst(runs: Runs, method: str) -> Verdict:
    """Compare the training losses over the last quarter, within two errors."""
    worse = []
    for regime in regimes(runs):
        most = late(group(runs, regime, method, "strongest"), "training_loss")
        for attack in ATTACKS:
            some = late(group(runs, regime, method, attack), "training_loss")
            gap = float(some.mean() - most.mean())
            if gap > 2 * _error_of_difference(some, most):
                worse.append(f"{regime} {ATTACK_WORDS[attack]}: {gap:+.3f}")
    text = f"no attack leaves a higher loss than strongest: {METHOD_WORDS[method]}"
    return Verdict(text, not worse, "; ".join(worse) or "none does", "ours")


def _losses_match(runs: Runs, rule: str) -> Verdict:
    """In the end as low as DP-DSGD's, within two errors of the difference."""
    higher = []
    for attack, where in MATCHING.items():
        for regime in (r for r in regimes(runs) if r in where):
            some, best = (
                _last_losses(group(runs, regime, method, attack))
                for method in (rule, BENCHMARK)
            )
            gap = float(some.mean() - best.mean())
            if gap > 2 * _error_of_difference(some, best):
                higher.append(f"{regime} {ATTACK_WORDS[attack]}: {gap:+.3f}")
    text = "the loss ends where DP-DSGD's does, under LF, and under ALIE but at high "
    text += f"privacy: {METHOD_WORDS[rule]}"
    return Verdict(text, not higher, "; ".join(higher) or "within two errors, or lower")


def _last_losses(runs: Sequence[RunRecord]) -> NDArray[np.float64]:
    return curve(runs, "training_loss").values[:, -1]


def late_loss(runs: Sequence[RunRecord]) -> str:
    """Return the mean training loss over the last quarter of the steps."""
    return f"{late(runs, 'training_loss').mean():.3f}"


def _error_of_difference(some: NDArray[np.float64], best: NDArray[np.float64]) -> float:
    if min(len(some), len(best)) < 2:
        return float("inf")  # one seed says nothing
    return float(np.sqrt(some.var(ddof=1) / len(some) + best.var(ddof=1) / len(best)))


def _degrades(runs: Runs, method: str) -> Verdict:
    """Look whether accuracy, averaged over the attacks, falls with each regime."""
    means = {
        regime: float(
            np.mean([final(group(runs, regime, method, a)).mean for a in PAPER_ATTACKS])
        )
        for regime in regimes(runs)
    }
    values = list(means.values())
    falls = all(b < a for a, b in pairwise(values))
    evidence = ", ".join(f"{regime} {mean:.3f}" for regime, mean in means.items())
    text = f"accuracy falls as privacy tightens: {METHOD_WORDS[method]}"
    return Verdict(text, falls, evidence)


def _filter_does_the_same(runs: Runs) -> Verdict:
    apart = []
    for regime in regimes(runs):
        for attack in PAPER_ATTACKS:
            some, other = (
                final(group(runs, regime, method, attack))
                for method in ("filter-literal", "smea")
            )
            gap = some.mean - other.mean
            if abs(gap) > 2 * float(np.hypot(some.error, other.error)):
                apart.append(f"{regime} {ATTACK_WORDS[attack]}: {gap:+.3f}")
    text = "Filter's accuracy is SMEA's, within two errors"
    words = "; ".join(apart) or "no difference is larger"
    return Verdict(text, not apart, words, "ours")


def _benchmark_is_best(runs: Runs, methods: Sequence[str]) -> Verdict:
    better = []
    for regime in regimes(runs):
        best = final(group(runs, regime, BENCHMARK, None))
        for attack in ATTACKS:
            for method in methods:
                some = final(group(runs, regime, method, attack))
                if some.mean - best.mean > 2 * float(np.hypot(some.error, best.error)):
                    words = f"{METHOD_WORDS[method]} under {ATTACK_WORDS[attack]}"
                    gain = some.mean - best.mean
                    better.append(f"{regime}: {words} is {gain:.3f} higher")
    text = "DP-DSGD is at least as good as every attacked run, within two errors"
    words = "; ".join(better) or "no run is better"
    return Verdict(text, not better, words, "ours")
