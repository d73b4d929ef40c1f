"""The audit leaves correct code alone and catches planted bugs."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from flwr_safedshb.audit import epsilon_bound
from flwr_safedshb.audit.epsilon_bound import (
    PLANS,
    epsilon_lower_bound,
    measure_epsilon,
)
from flwr_safedshb.cli import main
from flwr_safedshb.privacy.batches import Example
from flwr_safedshb.privacy.clipping.gradients import ClippedGradients
from flwr_safedshb.privacy.plan import PrivacyPlan
from flwr_safedshb.privacy.randomness.noise import SeededRandomness

pytestmark = pytest.mark.federation

DELTA, CONFIDENCE = 0.05, 0.999
# With so many releases and so little confidence, the bound on half the noise is over
# the accounted epsilon (for the plans of the audit).
TRIALS, LITTLE = 500, 0.9
FIXED = PLANS[0]


def holds(
    plan: PrivacyPlan, trials: int, confidence: float, randomness: SeededRandomness
) -> bool:
    measured = measure_epsilon(plan, DELTA, trials, confidence, randomness)
    return measured <= plan.epsilon(1, DELTA)


@pytest.mark.parametrize("plan", PLANS)
def test_no_false_alarm(plan: PrivacyPlan) -> None:
    measured = measure_epsilon(plan, DELTA, 1000, CONFIDENCE, SeededRandomness(1))
    # The attack works: a bound of 0 would hold for any code.
    assert 0.15 < measured / plan.epsilon(1, DELTA) <= 1.0


class HalfTheNoise(SeededRandomness):
    def gaussian(self, size: int, std: float) -> npt.NDArray[np.float64]:
        return super().gaussian(size, std / 2)


@pytest.mark.parametrize("plan", [PLANS[0], PLANS[2], PLANS[3]])
def test_catches_half_the_noise(plan: PrivacyPlan) -> None:
    assert not holds(plan, TRIALS, LITTLE, HalfTheNoise(1))


def test_catches_the_sensitivity_of_a_removed_example(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # C/b is right for a Poisson batch with and without an example; a replaced one in a
    # batch of fixed size moves the mean by 2C/b.
    def noise_std(plan: PrivacyPlan) -> float:
        return plan.clip_norm * plan.noise_multiplier / plan.batch_size

    monkeypatch.setattr(PrivacyPlan, "noise_std", property(noise_std))
    assert not holds(FIXED, TRIALS, LITTLE, SeededRandomness(1))


class Unclipped(ClippedGradients):
    def consume_batch(
        self, batch: Example, groups: int = 1, usable: torch.Tensor | None = None
    ) -> torch.Tensor:
        clip_norm, self.clip_norm = self.clip_norm, 1e9
        total = super().consume_batch(batch, groups, usable)
        self.clip_norm = clip_norm
        return total


@pytest.mark.parametrize("plan", PLANS)
def test_catches_a_skipped_clip(
    plan: PrivacyPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(epsilon_bound, "ClippedGradients", Unclipped)
    assert not holds(plan, 200, CONFIDENCE, SeededRandomness(1))


class SameBatch(SeededRandomness):
    def subset(self, population: int, size: int) -> npt.NDArray[np.int64]:
        return np.arange(size)


def test_catches_a_batch_that_is_never_drawn_afresh() -> None:
    plan = PrivacyPlan(1.0, 1.0, 2, 8)
    assert holds(plan, TRIALS, LITTLE, SeededRandomness(1))
    assert not holds(plan, TRIALS, LITTLE, SameBatch(1))


def test_bound_has_its_confidence() -> None:
    # Two Gaussians whose epsilon is known; at 80% confidence the bound may be over it
    # in 20% of the audits (fewer, as the intervals are conservative).
    plan = PrivacyPlan(1.0, 1.0, 5, 5)
    exact = plan.epsilon(1, DELTA)
    rng = np.random.default_rng(1)
    bounds = np.array(
        [
            epsilon_lower_bound(
                rng.normal(0, 1, 400), rng.normal(1, 1, 400), DELTA, confidence=0.8
            )
            for _ in range(100)
        ]
    )
    assert (bounds > exact).mean() <= 0.2
    # And is no vacuous one.
    assert bounds.mean() > 0.5 * exact


def test_bound_of_samples_that_do_not_differ() -> None:
    rng = np.random.default_rng(1)
    one, other = rng.normal(size=1000), rng.normal(size=1000)
    assert epsilon_lower_bound(one, other, 1e-3, CONFIDENCE) == 0.0


def test_bound_sees_either_dataset_stand_out() -> None:
    rng = np.random.default_rng(1)
    plain, marked = rng.normal(size=1000), rng.normal(size=1000)
    far = rng.random(1000) < 0.3
    with_outliers = np.where(far, marked + 50, marked)
    without_outliers = np.where(far, marked - 50, marked)
    # At best 225 hits in 750 against none: log(0.24 / 0.0101) = 3.2 at this confidence.
    assert 2.4 < epsilon_lower_bound(plain, with_outliers, 1e-3, CONFIDENCE) < 3.4
    assert 2.4 < epsilon_lower_bound(without_outliers, plain, 1e-3, CONFIDENCE) < 3.4


def run(path: Path, *options: str) -> list[dict[str, Any]]:
    """Run the suite by its command, and return the rows of its report."""
    asked = ["audit", "--suite", "epsilon", "--output", str(path), *options]
    code = main(asked)
    report = json.loads(path.read_text())
    assert code == (0 if report["holds"] else 1)
    rows: list[dict[str, Any]] = report["rows"]
    return rows


def test_the_report_has_every_mechanism(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "outputs" / "audit.json"
    rows = run(path, "--trials", "100", "--seed", "3")
    assert len(rows) == len(PLANS)
    for row, plan in zip(rows, PLANS, strict=True):
        assert row["config"]["seed"] == 3
        assert (row["broken"], row["trials"]) == ("", 100)
        figures = row["figures"]
        assert row["subject"].endswith(plan.clipping)
        assert figures["accounted"] == plan.epsilon(1, DELTA)
        assert figures["measured"] <= figures["accounted"]
    text = capsys.readouterr().out
    for word in ("poisson", "ghost", "holds", "<= 1.199", "all promises hold"):
        assert word in text
    lines = path.with_suffix(".csv").read_text().splitlines()
    assert len(lines) == 1 + len(PLANS)
    assert {"suite", "version", "seed", "trials", "accounted"} <= {*lines[0].split(",")}


def test_a_violation_is_an_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(epsilon_bound, "ClippedGradients", Unclipped)
    monkeypatch.setattr(epsilon_bound, "PLANS", PLANS[:1])
    (row,) = run(tmp_path / "audit.json", "--trials", "200")
    assert row["broken"]
    assert "BROKEN: " in capsys.readouterr().out


def test_secure_randomness_has_no_seed_to_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(epsilon_bound, "PLANS", PLANS[:1])
    (row,) = run(tmp_path / "audit.json", "--trials", "100", "--secure")
    assert row["config"]["seed"] is None
