"""The paper's experiments again: ``python -m simulations.study paper``.

Allouah et al., ICML 2023: three privacy regimes, four attacks, Safe-DSHB with SMEA and
with Filter, and DP-DSGD without adversaries, five seeds: 135 runs. Beyond the paper 60
of Filter with the stop that users get by default, and 90 of all three rules under
attacks that search for the worst, mimic-shift and strongest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise, product

import numpy as np

from simulations.results.comparison import (
    ATTACK_WORDS,
    draw_panels,
    tabulate,
)
from simulations.results.schema import RunRecord
from simulations.results.statistics import curve, final, late, losses
from simulations.results.tables import Table
from simulations.study import Runs, Section, Study, grid

REGIMES = ("low", "moderate", "high")
PAPER_ATTACKS = ("alie", "foe", "sign-flip", "label-flip")
OWN_ATTACKS = ("mimic-shift", "strongest")
ATTACKS = PAPER_ATTACKS + OWN_ATTACKS
PAPER_RULES = ("smea", "filter-literal")
BENCHMARK = "dp-dsgd"
WORDS = {
    "dp-dsgd": "DP-DSGD, no attack",
    "smea": "Safe-DSHB, SMEA",
    "filter-literal": "Safe-DSHB, Filter",
    "filter": "Filter, default stop",
}
# "Around 80% in the low and moderate regimes, around 75% in the high one (a bit lower
# under the FOE attack)": the bracket is about high privacy alone.
PAPER_ACCURACY = {"low": 0.80, "moderate": 0.80, "high": 0.75}
A_BIT = 0.10
# Where the paper sees the losses match DP-DSGD's in the end.
MATCHING = {"label-flip": ("low", "moderate", "high"), "alie": ("low", "moderate")}
PAPER_EPSILON = {"low": 1.14, "moderate": 0.32, "high": 0.19}
Group = Sequence[RunRecord]


class Verdicts:
    """Statements of the paper, and some of ours, held against the runs."""

    def __init__(self, runs: Runs[RunRecord]) -> None:
        self.runs = runs
        self.regimes = runs.labels("privacy")
        self.methods = [m for m in WORDS if m in runs.labels("aggregation")]
        self.rows: list[list[str]] = []

    def judge(self) -> Table:
        """Return a row for each statement: whose it is, and whether it holds."""
        robust = [m for m in self.methods if m != BENCHMARK]
        for rule in PAPER_RULES:
            self._accuracy_is_as_stated(rule)
            self._loss_falls(rule, "the paper")
        for rule in PAPER_RULES:
            self._loss_matches_benchmark(rule)
        if len(self.regimes) > 1:
            for method in (BENCHMARK, "smea"):
                self._accuracy_falls_with_privacy(method)
        for method in self.methods:
            if method in (BENCHMARK, "filter"):
                self._loss_falls(method, "ours")
        for method in robust:
            self._loss_falls_under_own_attacks(method)
        for method in robust:
            self._strongest_is_worst(method)
        self._filter_is_like_smea()
        self._benchmark_is_best(robust)
        return Table(["statement", "whose", "verdict", "seen"], self.rows)

    def group(self, regime: str, method: str, attack: str) -> Group:
        """Return the runs that differ in their seed alone."""
        labels = {"privacy": regime, "aggregation": method, "attack": attack}
        return list(self.runs.where(**labels).values())

    def _say(self, text: str, holds: bool, seen: str, whose: str = "the paper") -> None:
        verdict = "holds" if holds else "**does not hold**"
        self.rows.append([text, whose, verdict, seen])

    def _pairs(
        self, attacks: Sequence[str] = ATTACKS
    ) -> Iterator[tuple[str, str, str]]:
        for regime, attack in product(self.regimes, attacks):
            yield regime, attack, f"{regime} {ATTACK_WORDS[attack]}"

    def _accuracy_is_as_stated(self, rule: str) -> None:
        """Around 80% and 75%; of Filter the paper says that the same is observed."""
        for regime in self.regimes:
            wanted = PAPER_ACCURACY[regime]
            found = {a: final(self.group(regime, rule, a)).mean for a in PAPER_ATTACKS}
            where = f"{WORDS[rule]} at {regime} privacy"
            if regime == "high":
                foe = found.pop("foe")
                self._say(
                    f"{where}: a bit lower than {wanted:.2f} under FOE at worst",
                    foe >= wanted - A_BIT,
                    f"mean {foe:.3f}; a bit is read as {A_BIT:.2f}",
                )
            attack = min(found, key=lambda a: found[a])
            self._say(
                f"{where}: around {wanted:.2f}, or more",
                found[attack] >= wanted,
                f"lowest mean {found[attack]:.3f}, under {ATTACK_WORDS[attack]}",
            )

    def _rising(self, method: str, attacks: Sequence[str]) -> list[str]:
        return [
            f"rises at {regime} privacy under {ATTACK_WORDS[attack]}"
            for regime, attack, _ in self._pairs(attacks)
            if not losses(self.group(regime, method, attack)).falls
        ]

    def _loss_falls(self, method: str, whose: str) -> None:
        rising = self._rising(method, PAPER_ATTACKS)
        text = f"the training loss falls under its four attacks: {WORDS[method]}"
        self._say(text, not rising, "; ".join(rising) or "falls in all of them", whose)

    def _loss_falls_under_own_attacks(self, method: str) -> None:
        rising = self._rising(method, OWN_ATTACKS)
        text = f"it falls under mimic-shift and strongest, too: {WORDS[method]}"
        self._say(text, not rising, "; ".join(rising) or "falls in all of them", "ours")

    def _strongest_is_worst(self, method: str) -> None:
        """Compare the training losses over the last quarter, within two errors."""
        worse = []
        for regime, attack, words in self._pairs():
            most = late(self.group(regime, method, "strongest"), "training_loss")
            some = late(self.group(regime, method, attack), "training_loss")
            gap = float(some.mean() - most.mean())
            if gap > 2 * _error_of_difference(some, most):
                worse.append(f"{words}: {gap:+.3f}")
        text = f"no attack leaves a higher loss than strongest: {WORDS[method]}"
        self._say(text, not worse, "; ".join(worse) or "none does", "ours")

    def _loss_matches_benchmark(self, rule: str) -> None:
        """Look whether it ends as low as DP-DSGD's, within two errors."""
        higher = []
        for attack, where in MATCHING.items():
            for regime in (r for r in self.regimes if r in where):
                some, best = (
                    curve(self.group(regime, method, attack), "training_loss")
                    for method in (rule, BENCHMARK)
                )
                last, least = some.values[:, -1], best.values[:, -1]
                gap = float(last.mean() - least.mean())
                if gap > 2 * _error_of_difference(last, least):
                    higher.append(f"{regime} {ATTACK_WORDS[attack]}: {gap:+.3f}")
        text = "the loss ends where DP-DSGD's does, under LF, and under ALIE but at "
        text += f"high privacy: {WORDS[rule]}"
        self._say(text, not higher, "; ".join(higher) or "within two errors, or lower")

    def _accuracy_falls_with_privacy(self, method: str) -> None:
        means = {
            regime: float(
                np.mean(
                    [final(self.group(regime, method, a)).mean for a in PAPER_ATTACKS]
                )
            )
            for regime in self.regimes
        }
        falls = all(b < a for a, b in pairwise(means.values()))
        seen = ", ".join(f"{regime} {mean:.3f}" for regime, mean in means.items())
        self._say(f"accuracy falls as privacy tightens: {WORDS[method]}", falls, seen)

    def _filter_is_like_smea(self) -> None:
        apart = []
        for regime, attack, words in self._pairs(PAPER_ATTACKS):
            some = final(self.group(regime, "filter-literal", attack))
            other = final(self.group(regime, "smea", attack))
            gap = some.mean - other.mean
            if abs(gap) > 2 * float(np.hypot(some.error, other.error)):
                apart.append(f"{words}: {gap:+.3f}")
        text = "Filter's accuracy is SMEA's, within two errors"
        self._say(
            text, not apart, "; ".join(apart) or "no difference is larger", "ours"
        )

    def _benchmark_is_best(self, methods: Sequence[str]) -> None:
        better = []
        for (regime, attack, _), method in product(self._pairs(), methods):
            best = final(self.group(regime, BENCHMARK, ""))
            some = final(self.group(regime, method, attack))
            gain = some.mean - best.mean
            if gain > 2 * float(np.hypot(some.error, best.error)):
                words = f"{WORDS[method]} under {ATTACK_WORDS[attack]}"
                better.append(f"{regime}: {words} is {gain:.3f} higher")
        text = "DP-DSGD is at least as good as every attacked run, within two errors"
        self._say(text, not better, "; ".join(better) or "no run is better", "ours")


def _error_of_difference(
    some: np.ndarray[tuple[int], np.dtype[np.float64]],
    other: np.ndarray[tuple[int], np.dtype[np.float64]],
) -> float:
    if min(len(some), len(other)) < 2:
        return float("inf")  # one seed says nothing
    return float(np.sqrt(some.var(ddof=1) / len(some) + other.var(ddof=1) / len(other)))


def report(runs: Runs[RunRecord]) -> Iterator[Section]:
    """Yield a section for each regime, then losses, statements, and differences."""
    words = {**ATTACK_WORDS, **WORDS}
    for regime, some in runs.by("privacy").items():
        table = tabulate(some, words, heads=["regime", "attack"])
        wanted = f"around {PAPER_ACCURACY[regime]:.2f}"
        attacks = some.labels("attack")
        stated = [wanted if a in PAPER_ATTACKS else "-" for a in attacks]
        privacy = next(iter(some.values()))["privacy"]
        yield Section(
            f"{regime.capitalize()} privacy",
            f"{privacy['statement']}; the paper quotes {PAPER_EPSILON[regime]}. Test "
            "accuracy after the last step, mean ± standard deviation over the seeds "
            f"{', '.join(map(str, some.seeds))}.",
            Table(
                [*table.heads[1:], "paper, SMEA"],
                [
                    [*row[1:], cell]
                    for row, cell in zip(table.rows, stated, strict=True)
                ],
            ),
            draw_panels(some, {**words, regime: f"{regime} privacy"}),
        )
    heads = ["regime", "attack"]
    yield Section(
        "Training loss",
        "From first to last step, mean over the seeds.",
        tabulate(runs, words, losses, heads),
    )
    yield Section(
        "Training loss over the last quarter of the steps",
        "Adversaries who push a model with momentum make it swing, and where the last "
        "step catches it is chance. Mean over steps and seeds.",
        tabulate(runs, words, _mean_late_loss, heads),
        notes=next(iter(runs.values()))["privacy"]["note"],
    )
    if all(
        list(runs.where(privacy=regime, attack=attack, aggregation=rule))
        for regime in runs.labels("privacy")
        for attack, rule in product(ATTACKS, (*PAPER_RULES, BENCHMARK))
    ):
        yield Section("Statements of the paper, and ours", "", Verdicts(runs).judge())


def _mean_late_loss(runs: Group) -> str:
    return f"{late(runs, 'training_loss').mean():.3f}"


study = Study(
    "paper",
    "Safe-DSHB: the paper's experiments, reproduced",
    "Three privacy regimes, six attacks, Safe-DSHB with SMEA and with Filter, and "
    "DP-DSGD without adversaries. What the paper does not say, and had to be inferred, "
    "is on the page docs/reproduce.md.",
    # The paper's runs come before those that it does not have.
    [
        *grid(
            "experiment=dp-dsgd",
            privacy=REGIMES,
            attack={"": ""},
            aggregation={BENCHMARK: ""},
        ),
        *grid(
            "experiment=paper",
            privacy=REGIMES,
            attack=PAPER_ATTACKS,
            aggregation=PAPER_RULES,
        ),
        *grid(
            "experiment=paper",
            privacy=REGIMES,
            attack=PAPER_ATTACKS,
            aggregation=["filter"],
        ),
        *grid(
            "experiment=paper",
            privacy=REGIMES,
            attack=OWN_ATTACKS,
            aggregation=[*PAPER_RULES, "filter"],
        ),
    ],
    seeds=(1, 2, 3, 4, 5),
    report=report,
    words=WORDS,
    page="docs/reproduce.md",
)
