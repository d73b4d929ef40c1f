"""An attacker's true positives: against the exact curve, and against an attack."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import norm

from flwr_safedshb import PrivacyPlan, PrivacyTarget
from flwr_safedshb.cli import main
from flwr_safedshb.privacy.attack_bound import bound_true_positive_rates

RATES = [1e-3, 0.01, 0.1, 0.3, 0.9]


@pytest.mark.parametrize("epsilon", [0.5, 3.0, 8.0])
def test_a_full_batch_is_a_gaussian_mechanism(epsilon: float) -> None:
    plan = PrivacyTarget(epsilon, 1e-5, 60).make_plan(500)
    mu = math.sqrt(60) / plan.noise_multiplier
    exact = norm.cdf(norm.ppf(RATES) + mu)
    found = np.array(bound_true_positive_rates(plan, 60, RATES))
    assert (found >= exact).all()
    assert (found <= 1.03 * exact).all()


def test_no_attack_on_random_batches_is_right_more_often() -> None:
    plan = PrivacyPlan(1.0, 1.0, 5, 20)  # one example is in a quarter of the batches
    rng = np.random.default_rng(0)
    trials, steps = 20_000, 4
    batches = rng.random((2, trials, steps)) < 0.25
    # One coordinate, in units of the noise: the example moves a sum by 2C at most.
    sent = batches * np.array([1.0, 0.0]).reshape(2, 1, 1)
    sent = sent + rng.normal(size=sent.shape)
    ratio = np.log(0.25 * np.exp(sent - 0.5) + 0.75).sum(axis=2)
    for rate in (0.01, 0.1):
        threshold = np.quantile(ratio[1], 1 - rate)
        right = float((ratio[0] > threshold).mean())
        (bound,) = bound_true_positive_rates(plan, steps, [rate])
        assert rate < right < bound + 0.01
    # Half of the noise would be found out.
    strong = PrivacyPlan(1.0, 2.0, 5, 20)
    assert right > bound_true_positive_rates(strong, steps, [0.1])[0]


def test_without_noise_the_attacker_knows() -> None:
    plan = PrivacyPlan(1.0, 0.0, 20, 20)
    assert bound_true_positive_rates(plan, 1, [0.01]) == [1.0]


def test_the_page_shows_what_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "epsilon.md").read_text()
    shown = page.partition("$ safedshb ")[2].partition("```")[0]
    command, _, output = shown.partition("\n")
    picture = tmp_path / "risk.svg"
    assert main([*command.split(), "--plot", str(picture)]) == 0
    printed = capsys.readouterr().out.split()
    assert printed == [*output.split(), str(picture)]
    assert picture.stat().st_size > 10_000
    assert main([*command.split(), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["epsilon"] for row in rows] == [0.5, 1.0, 3.0, 8.0]
    assert rows[2]["true_positive_rates"]["0.01"] == pytest.approx(0.054, abs=0.001)


def test_a_delta_that_protects_nobody_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert (
        main(["risk", "--epsilon", "3", "--delta", "0.01", "-m", "500", "-T", "60"])
        == 2
    )
    assert "must be below 1/num_examples=0.002" in capsys.readouterr().err
