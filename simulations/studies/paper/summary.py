"""The runs of the reproduction by panel, and a measure of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from simulations.results import summary
from simulations.results.schema import RunRecord
from simulations.results.summary import ATTACK_WORDS, Figure, Losses
from simulations.studies.paper.cases import ATTACKS, BENCHMARK, REGIMES, Case

Runs = Mapping[Case, RunRecord]
Groups = dict[str, list[RunRecord]]

METHOD_WORDS = {
    "dp-dsgd": "DP-DSGD, no attack",
    "smea": "Safe-DSHB, SMEA",
    "filter-literal": "Safe-DSHB, Filter",
    "filter": "Filter, default stop",
}


def group(runs: Runs, regime: str, method: str, attack: str | None) -> list[RunRecord]:
    """Return the runs that differ in their seed alone."""
    if method == BENCHMARK:
        attack = None
    return [
        run
        for case, run in runs.items()
        if (case.regime, case.method, case.attack) == (regime, method, attack)
    ]


def by_method(runs: Runs, regime: str, attack: str) -> Groups:
    """Return the runs of a panel, by method."""
    found = {method: group(runs, regime, method, attack) for method in METHOD_WORDS}
    return {method: some for method, some in found.items() if some}


def panels(runs: Runs, *chosen: str) -> dict[str, tuple[str, Groups]]:
    """Return title and groups of each panel, of all regimes or of those chosen."""
    return {
        f"{regime}_{attack}": (
            f"{ATTACK_WORDS[attack]}, {regime} privacy",
            {METHOD_WORDS[m]: v for m, v in by_method(runs, regime, attack).items()},
        )
        for regime in chosen or regimes(runs)
        for attack in ATTACKS
    }


def draw(runs: Runs, folder: Path) -> None:
    """Write every panel, and those of a regime and a quantity together."""
    for regime in regimes(runs):
        summary.draw(panels(runs, regime), regime, folder)


def regimes(runs: Runs) -> list[str]:
    """Return the regimes there are, in their order."""
    return [regime for regime in REGIMES if any(c.regime == regime for c in runs)]


def table(
    runs: Runs, measure: Callable[[Sequence[RunRecord]], Figure | Losses | str]
) -> list[dict[str, object]]:
    """Return a measure of the runs that differ in their seed, a row for each panel."""
    return [
        {"regime": regime, "attack": attack}
        | {m: measure(some) for m, some in by_method(runs, regime, attack).items()}
        for regime in regimes(runs)
        for attack in ATTACKS
    ]
