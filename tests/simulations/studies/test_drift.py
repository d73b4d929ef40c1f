"""The counterexample to the paper's drift lemma, docs/convergence.md."""

import numpy as np
import pytest

from simulations.studies.drift import CROSS, compare_sides, draw_drifts, is_not_broken
from simulations.study import Case, Runs


@pytest.mark.parametrize(
    ("noise", "left", "right"), [(0.005, 0.25242, 0.25239), (0.002, 0.25096, 0.25079)]
)
def test_the_papers_drift_lemma_is_broken_with_its_own_factor(
    noise: float, left: float, right: float
) -> None:
    found = compare_sides(noise, draws=100_000)
    assert found["left"] == pytest.approx(left, abs=2e-5)
    assert found["right"] == pytest.approx(right, abs=2e-5)
    assert found["left"] > found["right"] + 8 * found["error"]


def test_no_constant_before_the_noise_mends_it() -> None:
    # Ten times the paper's, at a tenth of the noise.
    found = compare_sides(0.0002, draws=40_000, factor=20.0)
    assert found["left"] > found["right"] + 8 * found["error"]


def test_noise_does_not_enter_a_drift_by_its_own_spread_alone() -> None:
    """Mixed terms of gradient and noise do not average out in a top eigenvalue."""
    first, second = draw_drifts(CROSS, [0.0, 0.5], 0.02, 20_000, seed=0)
    alone = draw_drifts(0 * CROSS, [0.0], 0.02, 20_000, seed=0)[0]
    wished = 0.5 * first.mean() + 0.5 * 0.25 + 0.25 * alone.mean()
    assert second.mean() == pytest.approx(0.25983, abs=1e-4)
    assert wished == pytest.approx(0.25720, abs=1e-4)
    assert second.mean() > wished + 20 * second.std() / np.sqrt(20_000)


def test_much_noise_is_no_counterexample_and_fails_the_command() -> None:
    def runs(noise: float) -> Runs[dict[str, dict[str, float]]]:
        return Runs({Case({}): {"metrics": compare_sides(noise, draws=2000)}})

    assert is_not_broken(runs(0.1))
    assert not is_not_broken(runs(0.002))
