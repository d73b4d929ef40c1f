"""The numbers of every round, for reports: all that a round states, by its name.

A metric that `aggregate_round` adds is in every report without another line here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from simulations.results import page, plots
from simulations.results.plots import LOOKS, Curve
from simulations.results.schema import RunRecord
from simulations.results.tables import MAX_ROWS


def rounds_section(groups: Mapping[str, Sequence[RunRecord]]) -> str:
    """Return means and curves of the metrics that change in a round or between runs."""
    names = _changing_metrics([run for some in groups.values() for run in some])
    if not names:
        return ""
    curves = {
        name: {
            label: curve
            for label, some in groups.items()
            if (curve := _curve(some, name)) is not None
        }
        for name in names
    }
    # Down the page and not across it, for phones.
    rows = [
        [name, label, f"{np.nanmean(curve.values):.4g}"]
        for name, by_label in curves.items()
        for label, curve in by_label.items()
    ]
    shown = page.table(["metric", "runs", "mean"], rows)
    pictures = [
        page.picture(plots.panel(by_label, name, name), "")
        for name, by_label in curves.items()
        if len(by_label) <= len(LOOKS)
    ]
    return (
        page.heading(2, "The rounds")
        + "<p>Every number that the server states about a round and that changes: "
        "means over steps and seeds.</p>"
        + (shown if len(rows) <= MAX_ROWS else page.details("Table", shown))
        + (page.details("By step", page.pictures(pictures)) if pictures else "")
    )


def _changing_metrics(runs: Sequence[RunRecord]) -> list[str]:
    found: dict[str, set[float]] = {}
    for run in runs:
        for name, values in run["rounds"]["metrics"].items():
            known = {value for value in values if value is not None}
            found.setdefault(name, set()).update(known)
    return sorted(name for name, values in found.items() if len(values) > 1)


def _curve(runs: Sequence[RunRecord], name: str) -> Curve | None:
    """Return a metric by step for all seeds, NaN in rounds without; None if nowhere."""
    steps = len(runs[0]["rounds"]["replies"])
    unknown: list[float | None] = [None] * steps
    values = [run["rounds"]["metrics"].get(name, unknown) for run in runs]
    array = np.array(values, dtype=np.float64)
    if np.isnan(array).all():
        return None
    return Curve(np.arange(1.0, steps + 1.0), array)
