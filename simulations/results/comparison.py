"""Sections that compare the runs along one axis, in a panel for each of the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product

from simulations.results.plots import Curve
from simulations.results.schema import RunRecord
from simulations.results.statistics import (
    QUANTITIES,
    curve,
    final,
    format_epsilons,
)
from simulations.results.tables import Table
from simulations.study import Runs, Section

Measure = Callable[[Sequence[RunRecord]], object]
ATTACK_WORDS = {
    "alie": "ALIE",
    "foe": "FOE",
    "sign-flip": "SF",
    "label-flip": "LF",
    "mimic": "mimic",
    "min-max": "min-max",
    "min-sum": "min-sum",
    "mimic-shift": "mimic-shift",
    "drift": "drift",
    "strongest": "strongest",
    "target": "target",
    "lookahead": "lookahead",
    "sign-far": "sign-far",
}
ACCURACY = (
    "Accuracy of the model that the runs return, on the test set: mean ± standard "
    "deviation over the seeds."
)


def split_axes(runs: Runs[RunRecord]) -> tuple[list[str], str]:
    """Return the axes that name panels, and the last one, which is compared."""
    *others, last = dict.fromkeys(axis for case in runs for axis in case.labels)
    return others, last


def split_panels(
    runs: Runs[RunRecord], axes: Sequence[str]
) -> dict[tuple[str, ...], Runs[RunRecord]]:
    """Return the runs of each panel, by its labels on some axes."""
    choices = [runs.labels(axis) or [""] for axis in axes]
    found = {}
    for labels in product(*choices):
        wanted = dict(zip(axes, labels, strict=True))
        # A run without adversaries alone makes no panel.
        if any(wanted.items() <= case.labels.items() for case in runs):
            found[labels] = runs.where(**wanted)
    return found


def name_panel(labels: Sequence[str], words: Mapping[str, str]) -> str:
    """Return a panel's title."""
    return ", ".join(words.get(label, label) for label in labels if label) or "All runs"


def tabulate(
    runs: Runs[RunRecord],
    words: Mapping[str, str],
    measure: Measure = final,
    heads: Sequence[str] = (),
    epsilon: bool = False,
) -> Table:
    """Return a measure of the runs: a row for each panel, a column for each label.

    Parameters
    ----------
    runs : Runs
    words : mapping of a label to what readers see
    measure : callable from the runs of all seeds to a cell
    heads : sequence of str
        Of the columns that name the panel; without them it is named in one.
    epsilon : bool
        Whether the last column is the runs' epsilon.
    """
    axes, last = split_axes(runs)
    columns, rows = runs.labels(last), []
    for labels, panel in split_panels(runs, axes).items():
        groups = panel.groups(last)
        name = [words.get(one, one) for one in labels]
        cells = [str(measure(groups[c])) if c in groups else "-" for c in columns]
        rows.append([*(name if heads else [name_panel(labels, words)]), *cells])
        if epsilon:
            rows[-1].append(format_epsilons(list(panel.values())))
    first = list(heads) or [" and ".join(axes) or "runs"]
    return Table(
        [*first, *(words.get(c, c) for c in columns), *["epsilon"] * epsilon], rows
    )


def draw_panels(
    runs: Runs[RunRecord], words: Mapping[str, str]
) -> dict[str, dict[str, dict[str, Curve]]]:
    """Return the curves of each panel: by title, then quantity, then label."""
    axes, last = split_axes(runs)
    return {
        name_panel(labels, words): {
            quantity: {
                words.get(label, label): curve(some, quantity)
                for label, some in panel.groups(last).items()
            }
            for quantity in QUANTITIES
        }
        for labels, panel in split_panels(runs, axes).items()
    }


def compare_last_axis(runs: Runs[RunRecord], words: Mapping[str, str]) -> list[Section]:
    """Return one section: the panels, and a table of the final accuracies."""
    words = {**ATTACK_WORDS, **words}
    return [
        Section(
            "Test accuracy",
            ACCURACY,
            tabulate(runs, words, epsilon=True),
            draw_panels(runs, words),
        )
    ]
