"""The arena: who takes part, how it is scored, and an entry from outside."""

import csv
import shlex
import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest

from flwr_safedshb.algorithm.model_arrays import trained_parameters
from simulations.config import SettingsError
from simulations.experiment import build_untrained
from simulations.results.statistics import MeanStd
from simulations.studies.arena import (
    NO_ATTACK,
    TASKS,
    find_worst,
    load_entry,
    report,
    study,
)
from simulations.study import Case, Runs, main
from tests.records import made_up

# What somebody else publishes: a rule, and its entry.
OUTSIDE = '''
"""The coordinatewise median of means, as an entry of the arena."""

from dataclasses import dataclass

import numpy as np

from flwr_safedshb.aggregation import CoordinatewiseRule
from simulations.studies.arena import Entry


@dataclass(frozen=True)
class MedianOfMeans(CoordinatewiseRule):
    """The median of the means of so many groups."""

    groups: int = 5

    def reduce(self, block, f):
        """Return one value for each column of an (n, k) block."""
        groups = np.array_split(block, min(self.groups, len(block)))
        return np.median([group.mean(axis=0) for group in groups], axis=0)


entry = Entry(
    "median of means",
    "aggregation._target_=outside_entry.MedianOfMeans +aggregation.groups=6",
    assumes="few adversaries a group",
)
'''


def test_the_score_is_the_worst_mean_over_attacks() -> None:
    scores = {
        NO_ATTACK: MeanStd(0.9, 0.0, 2),
        "FOE": MeanStd(0.6, 0.3, 2),
        "target": MeanStd(0.7, 0.0, 2),
    }
    assert find_worst(scores) == "FOE"


def test_entries_are_ranked_by_their_worst_attack() -> None:
    accuracies = {
        ("SMEA", NO_ATTACK): 0.9,
        ("SMEA", "FOE"): 0.7,
        ("Krum", NO_ATTACK): 0.95,
        ("Krum", "FOE"): 0.4,
    }
    runs = Runs(
        {
            Case(
                {"task": "phishing-7-3", "entry": entry, "attack": attack}, seed=seed
            ): made_up(value, (0.7, 0.2), seed)
            for (entry, attack), value in accuracies.items()
            for seed in (1, 2)
        }
    )
    ranking, assumptions = report(runs)
    assert ranking.table is not None
    assert [row[0] for row in ranking.table.rows] == ["SMEA", "Krum"]
    assert ranking.table.rows[1][2].startswith("**0.400")
    assert len(ranking.figures) == 1
    assert assumptions.table is not None
    assert [row[0] for row in assumptions.table.rows] == ["SMEA", "Krum"]


def test_a_task_says_how_many_weights_its_model_has() -> None:
    cases = study.list_cases(Namespace())
    some = next(case for case in cases if case.labels["task"] == "tumours-7-2")
    model = build_untrained(shlex.join([*some.overrides, "seed=1"]))
    sizes = [p.numel() for p in trained_parameters(model).values()]
    assert sum(sizes) == TASKS["tumours-7-2"].num_weights


@pytest.mark.parametrize("path", ["nowhere:entry", "math:pi", "math", "math:nothing"])
def test_what_is_no_entry_is_refused(path: str) -> None:
    with pytest.raises(SettingsError, match="--own"):
        load_entry(path)


@pytest.mark.process
@pytest.mark.federation
def test_an_entry_from_outside_takes_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(OUTSIDE.splitlines()) <= 40
    (tmp_path / "outside_entry.py").write_text(OUTSIDE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    chosen = ["--task", "tumours-7-2", "--entry", "SMEA", "--attack", "FOE"]
    own = ["--own", "outside_entry:entry", "--seeds", "1", "--workers", "1"]
    assert main(["arena", *chosen, *own, "--output", "out"]) == 0
    rows = list(csv.DictReader((tmp_path / "out" / "results.csv").open()))
    assert {row["entry"] for row in rows} == {"SMEA", "median of means"}
    assert np.isfinite([float(row["accuracy"]) for row in rows]).all()
