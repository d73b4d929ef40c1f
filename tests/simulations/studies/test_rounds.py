"""The plan's bounds against rounds that adversaries do their worst in."""

import numpy as np
import pytest

from flwr_safedshb import theory
from flwr_safedshb.aggregation import SMEA
from flwr_safedshb.attacks import ALIE, FOE
from simulations.studies import rounds
from simulations.study import Case, Runs

pytestmark = pytest.mark.federation


@pytest.mark.parametrize(("n", "f"), [(7, 3), (7, 2)])
@pytest.mark.parametrize("d", [69, 1000])
def test_the_bounds_hold_within_the_stated_factor(n: int, f: int, d: int) -> None:
    found = rounds.measure(n, f, d, draws=1)
    assert all(1.0 <= found[key] <= rounds.FACTOR for key in found if "factor" in key)


def test_momentums_are_as_noisy_as_the_theory_says() -> None:
    found = rounds.draw_momentums(40, 300, np.random.default_rng(0))
    expected = theory.noise_in_momentum(1.0, rounds.MOMENTUM, rounds.STEPS)
    assert found.std() == pytest.approx(expected, rel=0.02)


def test_shifted_copies_do_more_than_the_usual_attacks() -> None:
    rng = np.random.default_rng(0)
    honest = rounds.draw_momentums(4, 69, rng)
    along = np.eye(1, 69)[0]
    copied = rounds.find_worst(SMEA(), honest, 3, along, lambda out: float(out @ out))
    for attack in (ALIE(), FOE()):
        sent = np.concatenate([honest, attack(honest, 3, rng, SMEA())])
        out = SMEA()(sent, 3)
        assert float(out @ out) < copied / 2


def test_a_bound_that_is_broken_or_too_far_away_fails_the_command() -> None:
    def runs(factor: float) -> Runs[dict[str, dict[str, float]]]:
        metrics = {"error_factor": 2.0, "radius_factor": factor}
        return Runs({Case({"d": "1"}): {"metrics": metrics}})

    failing = [rounds.is_outside(runs(factor)) for factor in (0.9, 1.1, 3.9, 4.1)]
    assert failing == [True, False, False, True]
