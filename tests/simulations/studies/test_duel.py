import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from flwr_safedshb.aggregation import Average, CoordinatewiseRule, Krum
from flwr_safedshb.aggregation.rule import FloatArray
from flwr_safedshb.attacks import FarCluster, NonFinite
from simulations.studies import duel
from simulations.studies.duel import ATTACKS, RULES, Settings, displacement, receive


class Recorder(CoordinatewiseRule):
    """A mean that remembers what it was given."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def reduce(self, block: FloatArray, f: int) -> FloatArray:
        self.seen.append((len(block), f))
        mean: FloatArray = block.mean(axis=0)
        return mean


def test_displacement_is_in_standard_errors_of_the_honest_mean() -> None:
    settings = Settings(n=10, f=3, d=4000, signal=2.0)
    # All cov entries are near 1, so the standard error of 7 vectors is sqrt(6/7 d/7),
    # and the average moves by 3/10 of the distance.
    attack = FarCluster(distance=50.0, radius=0.0)
    expected = 0.3 * 50.0 / np.sqrt(6 / 7 * 4000 / 7)
    assert displacement(Average(), attack, settings, 1) == pytest.approx(
        expected, rel=0.03
    )


def test_without_attack_the_average_is_not_moved_and_one_vector_is_far() -> None:
    settings = Settings(n=10, f=3, d=500)
    assert displacement(Average(), None, settings, 0) < 1e-5
    # One vector is sqrt(n) standard errors from the mean of n.
    moved = displacement(Krum(), None, settings, 0)
    assert moved == pytest.approx(np.sqrt(10), rel=0.1)


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
    moved = displacement(RULES["SMEA"], NonFinite(), Settings(d=8), 0)
    assert moved < 1e-5


@pytest.mark.parametrize(
    ("value", "colour"), [(1.5, "green"), (1.6, "yellow"), (3.1, "red")]
)
def test_bad_cells_are_seen(value: float, colour: str) -> None:
    assert colour in duel._coloured(value)


@pytest.mark.federation
def test_run_prints_every_rule_and_writes_its_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    out = tmp_path / "new" / "duel.json"
    duel.main(["--seeds", "2", "--d", "5", "--out", str(out)])
    written = json.loads(out.read_text())
    assert written["settings"] == {"n": 10, "f": 3, "d": 5, "signal": 1.0, "seeds": 2}
    assert written["results"].keys() == RULES.keys()
    printed = capsys.readouterr().out
    for name, row in written["results"].items():
        assert row.keys() == ATTACKS.keys()
        line = next(x for x in printed.splitlines() if x.strip().startswith(name))
        cells = line.split()[1 : 1 + len(ATTACKS)]
        assert [float(cell) for cell in cells] == pytest.approx(
            list(row.values()), abs=0.006
        )
    # Colluders break the average and none of the rules with a constant.
    assert written["results"]["Average"]["far cluster"] > duel.BAD
    assert written["results"]["SMEA"]["far cluster"] < duel.FAIR


@pytest.mark.process
def test_needs_no_torch() -> None:
    script = "import simulations.studies.duel, sys; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"
