import csv
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from flwr_safedshb.aggregation import CoordinatewiseRule
from flwr_safedshb.aggregation.rule import FloatArray
from flwr_safedshb.attacks import FarCluster
from simulations.studies.duel import ATTACKS, BAD, RULES, displace, receive
from simulations.study import main


class Recorder(CoordinatewiseRule):
    """A mean that remembers what it was given."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def reduce(self, block: FloatArray, f: int) -> FloatArray:
        self.seen.append((len(block), f))
        mean: FloatArray = block.mean(axis=0)
        return mean


def displacement(rule: str, attack: str, **setting: int) -> float:
    return float(displace(rule, attack, **setting)["displacement"])  # type: ignore[arg-type]


def test_displacement_is_in_standard_errors_of_the_honest_mean(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # All cov entries are near 1, so the standard error of 7 vectors is sqrt(6/7 d/7),
    # and the average moves by 3/10 of the distance.
    monkeypatch.setitem(ATTACKS, "far", FarCluster(distance=50.0, radius=0.0))
    expected = 0.3 * 50.0 / np.sqrt(6 / 7 * 4000 / 7)
    moved = displacement("Average", "far", n=10, f=3, d=4000, signal=2, seed=1)
    assert moved == pytest.approx(expected, rel=0.03)


def test_without_attack_the_average_is_not_moved_and_one_vector_is_far() -> None:
    assert displacement("Average", "none", d=500) < 1e-5
    # One vector is sqrt(n) standard errors from the mean of n.
    assert displacement("Krum", "none", d=500) == pytest.approx(np.sqrt(10), rel=0.1)


def test_what_is_not_finite_is_excluded_and_lowers_f() -> None:
    rule = Recorder()
    rng = np.random.default_rng(0)
    sent = rng.normal(size=(7, 2)).astype(np.float32)
    sent[3, 1], sent[5, 0] = np.nan, -np.inf
    output = receive(rule, sent, 3)
    assert rule.seen == [(5, 1)]
    np.testing.assert_allclose(output, sent[[0, 1, 2, 4, 6]].mean(axis=0), rtol=1e-6)
    receive(rule, sent, 1)
    assert rule.seen[-1] == (5, 0)


def test_adversaries_who_send_nan_leave_the_honest_mean() -> None:
    assert displacement("SMEA", "NaN", d=8) < 1e-5


@pytest.mark.process
def test_run_prints_every_rule_and_leaves_a_row_a_try(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    given = ["--seeds", "0", "1", "--set", "d=5", "--output", str(tmp_path)]
    assert main(["duel", *given]) == 0
    with (tmp_path / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(RULES) * len(ATTACKS) * 2
    printed = capsys.readouterr().out
    for rule in RULES:
        line = next(x for x in printed.splitlines() if x.strip().startswith(rule))
        for cell, attack in zip(line.split()[1:], ATTACKS, strict=False):
            mine = [
                float(row["displacement"])
                for row in rows
                if (row["rule"], row["attack"]) == (rule, attack)
            ]
            assert float(cell) == pytest.approx(np.mean(mine), abs=0.006)
            # Colluders break the average and none of the rules with a constant.
            if attack == "far cluster" and rule in ("Average", "SMEA"):
                assert (np.mean(mine) > BAD) == (rule == "Average")


@pytest.mark.process
def test_needs_no_torch() -> None:
    script = "import simulations.studies.duel, sys; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"
