"""The tables of the paper's experiments, and the verdicts, as a page and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from simulations.results.summary import ATTACK_WORDS, final, losses
from simulations.results.summary import table as markdown_table
from simulations.studies.paper.cases import (
    ATTACKS,
    PAPER_ATTACKS,
)

# "Around 80% in the low and moderate regimes, around 75% in the high one (a bit lower
# under the FOE attack)": the bracket is about high privacy alone.
from simulations.studies.paper.statements import (
    PAPER_ACCURACY,
    PAPER_EPSILON,
    late_loss,
    verdicts,
)
from simulations.studies.paper.summary import (
    METHOD_WORDS,
    Runs,
    regimes,
    table,
)

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
  m_0 = 0, so that theta_1 = theta_0: ours is that run shifted by one step, exactly so
  because its rates are constant.
- **The attacks' anchor** is the mean of the vectors that honest clients send, and tau
  maximises the distance of the aggregate from it. In the paper the anchor is the mean
  of the clipped gradients before noise and momentum, and whose distance is maximised is
  not said. Ours is the stronger reading.
- **Weight decay** is added after clipping and noise; the paper does not say where.
- The features are LIBSVM's, every row of norm 1; the paper does not say whether it
  scaled them, and the level of all accuracies depends on that.
"""


def markdown(runs: Runs) -> str:
    """Return the tables, the verdicts and the notes."""
    title = "# The paper's experiments, reproduced"
    return "\n\n".join([title, tables(runs), NOTES])


def tables(runs: Runs) -> str:
    """Return the tables and the verdicts."""
    seeds = sorted({case.seed for case in runs})
    lines = [f"Seeds {', '.join(map(str, seeds))}.", "", "### Test accuracy", ""]
    lines += ["After the last step, mean ± standard deviation over the seeds.", ""]
    paper = [
        f"around {PAPER_ACCURACY[regime]:.2f}" if attack in PAPER_ATTACKS else "-"
        for regime in regimes(runs)
        for attack in ATTACKS
    ]
    lines += _table(table(runs, final), {"paper, SMEA": paper})
    lines += [
        "",
        "### Training loss",
        "",
        "From first to last step, mean over seeds.",
        "",
    ]
    lines += _table(table(runs, losses), {})
    lines += [
        "",
        "### Training loss over the last quarter of the steps",
        "",
        "Adversaries who push a model with momentum make it swing, and where the last "
        "step catches it is chance. Mean over steps and seeds.",
        "",
    ]
    lines += _table(table(runs, late_loss), {})
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
