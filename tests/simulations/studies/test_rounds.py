"""The plan's bounds against rounds that adversaries do their worst in."""

from pathlib import Path

import numpy as np
import pytest

from flwr_safedshb import theory
from flwr_safedshb.aggregation import SMEA
from flwr_safedshb.attacks import ALIE, FOE
from simulations.studies import rounds

pytestmark = pytest.mark.federation


@pytest.mark.parametrize(("n", "f"), [(7, 3), (7, 2)])
@pytest.mark.parametrize("d", [69, 1000])
def test_the_bounds_hold_within_the_stated_factor(n: int, f: int, d: int) -> None:
    found = rounds.measure(n, f, d, draws=1)
    assert all(1.0 <= factor <= rounds.FACTOR for factor in found.factors)


def test_momentums_are_as_noisy_as_the_theory_says() -> None:
    found = rounds.momentums(40, 300, np.random.default_rng(0))
    expected = theory.noise_in_momentum(1.0, rounds.MOMENTUM, rounds.STEPS)
    assert found.std() == pytest.approx(expected, rel=0.02)


def test_shifted_copies_do_more_than_the_usual_attacks() -> None:
    rng = np.random.default_rng(0)
    honest = rounds.momentums(4, 69, rng)
    along = np.eye(1, 69)[0]
    copied = rounds.worst(SMEA(), honest, 3, along, lambda out: float(out @ out))
    for attack in (ALIE(), FOE()):
        sent = np.concatenate([honest, attack(honest, 3, rng, SMEA())])
        out = SMEA()(sent, 3)
        assert float(out @ out) < copied / 2


def test_the_command_states_its_factor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "new" / "rounds.md"
    arguments = ["--draws", "1", "--largest", "7", "--out", str(out)]
    assert rounds.main(arguments) == 0
    printed = capsys.readouterr().out
    assert out.read_text() in printed
    assert "within 4 is stated" in printed
    # A bound further from what is measured than stated is told.
    monkeypatch.setattr(rounds, "FACTOR", 1.1)
    assert rounds.main(arguments) == 1
