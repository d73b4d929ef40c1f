"""What the paper says, what the runs show, and how the two differ."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from simulations.results.record import RunRecord
from simulations.results.summary import ATTACK_WORDS, curve, final, losses
from simulations.results.summary import table as markdown_table
from simulations.studies.paper.cases import ATTACKS, BENCHMARK
from simulations.studies.paper.summary import (
    METHOD_WORDS,
    Runs,
    group,
    regimes,
    table,
)

# "Around 80% in the low and moderate regimes, around 75% in the high one (a bit lower
# under the FOE attack)": the bracket is about high privacy alone.
PAPER_ACCURACY = {"low": 0.80, "moderate": 0.80, "high": 0.75}
A_BIT = 0.10
# Where the paper sees the losses match DP-DSGD's in the end.
MATCHING = {"label-flip": ("low", "moderate", "high"), "alie": ("low", "moderate")}
PAPER_EPSILON = {"low": 1.14, "moderate": 0.32, "high": 0.19}

NOTES = """\
### How this differs from the paper, and what had to be inferred

- **m = 2763 examples for each honest client.** The paper does not say how the data is
  shared. Its epsilons (1.14 / 0.32 / 0.19 at delta = 1e-4) are what Opacus' RDP
  accountant gives for b = 25, T = 400 and m = 2763 = 11055 // 4, all points over the
  four honest clients, and for no other plausible m.
- **The test set is the training set.** With m = 2763 no example is left to hold out,
  so accuracy is on all 11055 points (`data=phishing-held-out` holds a fifth out).
- **Epsilon** is stated for the mechanism that runs: fixed-size batches without
  replacement, one example replaced, by privacy loss distributions. The paper's figures
  are for Poisson sampling, one example added or removed.
- **DP-DSGD** is the average of the four honest clients without momentum.
- **LF**: the three adversaries hold the flipped shards of three honest clients.
- **The grid of tau** of ALIE and FOE is not in the paper; here 17
  values from 0.1 to 10.
- **Filter** is the paper's listing with sigma_0 = 0, run to its end, which leaves all
  weight on one vector. The listing's test is the wrong way round in the paper and is
  turned here. "Default stop" is what users get: it stops before its mass falls to
  n - 2f, and a mean that f colluders may hold alone does not count.
- **The first momentum** is (1 - beta) times the first gradient. In the listing it is
  m_0 = 0, so that theta_1 = theta_0: ours is that run shifted by one step.
- **The attacks' anchor** is the mean of the vectors that honest clients send, and tau
  maximises the distance of the aggregate from it. In the paper the anchor is the mean
  of the clipped gradients before noise and momentum, and whose distance is maximised is
  not said. Ours is the stronger reading.
- **Weight decay** is added after clipping and noise; the paper does not say where.
- The features are LIBSVM's, every row of norm 1; the paper does not say whether it
  scaled them, and the level of all accuracies depends on that.
"""


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
    return [*said, _filter_does_the_same(runs), _benchmark_is_best(runs, there[1:])]


def _accuracies(runs: Runs, rule: str) -> Iterator[Verdict]:
    """Around 80% and 75%; of Filter the paper says that the same is observed."""
    for regime in regimes(runs):
        wanted = PAPER_ACCURACY[regime]
        found = {a: final(group(runs, regime, rule, a)).mean for a in ATTACKS}
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
        for attack in ATTACKS
        if not losses(group(runs, regime, method, attack)).falls
    ]
    text = f"the training loss falls in every panel: {METHOD_WORDS[method]}"
    return Verdict(text, not rising, "; ".join(rising) or "falls in all of them")


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


def _error_of_difference(some: NDArray[np.float64], best: NDArray[np.float64]) -> float:
    if min(len(some), len(best)) < 2:
        return float("inf")  # one seed says nothing
    return float(np.sqrt(some.var(ddof=1) / len(some) + best.var(ddof=1) / len(best)))


def _degrades(runs: Runs, method: str) -> Verdict:
    """Look whether accuracy, averaged over the attacks, falls with each regime."""
    means = {
        regime: float(
            np.mean([final(group(runs, regime, method, a)).mean for a in ATTACKS])
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
        for attack in ATTACKS:
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


def markdown(runs: Runs) -> str:
    """Return the tables, the verdicts and the notes."""
    title = "# The paper's experiments, reproduced"
    return "\n\n".join([title, tables(runs), NOTES])


def tables(runs: Runs) -> str:
    """Return the tables and the verdicts."""
    seeds = sorted({case.seed for case in runs})
    lines = [f"Seeds {', '.join(map(str, seeds))}.", "", "### Test accuracy", ""]
    lines += ["After the last step, mean ± standard deviation over the seeds.", ""]
    paper = [f"around {PAPER_ACCURACY[r]:.2f}" for r in regimes(runs) for _ in ATTACKS]
    lines += _table(table(runs, final), {"paper, SMEA": paper})
    lines += [
        "",
        "### Training loss",
        "",
        "From first to last step, mean over seeds.",
        "",
    ]
    lines += _table(table(runs, losses), {})
    lines += ["", "### Statements of the paper, and ours", ""]
    said = [
        [v.statement, v.whose, "holds" if v.holds else "**does not hold**", v.evidence]
        for v in verdicts(runs)
    ]
    lines += markdown_table(["statement", "whose", "", "seen"], said)
    lines += ["", "### Privacy", ""]
    for regime in regimes(runs):
        privacy = next(r for c, r in runs.items() if c.regime == regime)["privacy"]
        quoted = f"the paper quotes {PAPER_EPSILON[regime]}"
        lines.append(f"- {regime}: {privacy['statement']}; {quoted}.")
    note = next(iter(runs.values()))["privacy"]["note"]
    return "\n".join([*lines, "", note])


def write(runs: Runs, folder: Path) -> None:
    """Write the tables as ``results.md`` and ``results.json``."""
    content = {
        name: [
            {k: v if isinstance(v, str) else vars(v) for k, v in row.items()}
            for row in table(runs, measure)
        ]
        for name, measure in (("accuracy", final), ("training_loss", losses))
    }
    content["statements"] = [vars(verdict) for verdict in verdicts(runs)]
    (folder / "results.json").write_text(json.dumps(content, indent=2) + "\n")
    (folder / "results.md").write_text(markdown(runs))


def _table(
    rows: Sequence[Mapping[str, object]], more: Mapping[str, Sequence[str]]
) -> list[str]:
    """Return the lines of a table, with further columns at its end."""
    heads = ["regime", "attack", *METHOD_WORDS.values(), *more]
    cells = [
        [str(found["regime"]), ATTACK_WORDS[str(found["attack"])]]
        + [str(found.get(method, "-")) for method in METHOD_WORDS]
        + [column[i] for column in more.values()]
        for i, found in enumerate(rows)
    ]
    return markdown_table(heads, cells)
