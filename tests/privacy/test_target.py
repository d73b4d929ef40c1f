"""A privacy target: each node's own noise, and what no node accepts."""

import math

import pytest

from flwr_safedshb.privacy.accounting.accountant import compute_epsilon
from flwr_safedshb.privacy.plan import PrivacyPlan
from flwr_safedshb.privacy.target import PrivacyTarget

TARGET = PrivacyTarget(epsilon=3.0, delta=1e-5, steps=60)


@pytest.mark.parametrize("num_examples", [40, 500, 20_000])
def test_each_node_meets_the_target_with_its_own_noise(num_examples: int) -> None:
    plan = TARGET.make_plan(num_examples)
    assert (plan.num_examples, plan.batch_size) == (num_examples, num_examples)
    assert 2.97 <= plan.epsilon(60, 1e-5) <= 3.0
    # A full batch is the Gaussian mechanism: the multiplier is the same for all sizes,
    # and so the noise in the mean gradient falls like 1/m.
    assert plan.noise_multiplier == pytest.approx(10.8, rel=0.01)
    assert plan.noise_std == 2 * plan.noise_multiplier / num_examples


def test_what_is_said_of_the_mechanism_is_that_of_the_plan() -> None:
    target = PrivacyTarget(2.0, 1e-6, 100, 0.5, 16, "poisson", "add-remove", "ghost")
    plan = target.make_plan(400)
    assert plan == PrivacyPlan(
        0.5, plan.noise_multiplier, 16, 400, "poisson", "add-remove", "ghost"
    )
    assert 1.98 <= plan.epsilon(100, 1e-6) <= 2.0


def test_other_releases_of_the_same_examples_share_the_target() -> None:
    answers = (PrivacyPlan(1.0, 20.0, 500, 500, sampling="whole"), 10)
    plan = TARGET.make_plan(500, [answers])
    assert plan.noise_multiplier > TARGET.make_plan(500).noise_multiplier
    assert 2.97 <= compute_epsilon([(plan, 60), answers], 1e-5) <= 3.0


@pytest.mark.parametrize(("delta", "m"), [(1e-3, 1000), (0.01, 500), (0.1, 10)])
def test_a_delta_that_protects_no_single_example_is_refused(
    delta: float, m: int
) -> None:
    PrivacyTarget(3.0, delta, 60).make_plan(math.ceil(1 / delta) - 1)
    with pytest.raises(ValueError, match=rf"delta={delta:g} must be below 1/num_exam"):
        PrivacyTarget(3.0, delta, 60).make_plan(m)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"epsilon": 0.0}, "epsilon=0.0 must lie in"),
        ({"epsilon": math.inf}, "epsilon=inf must lie in"),
        ({"epsilon": math.nan}, "epsilon=nan must lie in"),
        ({"epsilon": "3"}, "epsilon='3' must be a number"),
        ({"delta": 0.0}, "delta=0.0 must lie in"),
        ({"delta": 1.0}, "delta=1.0 must lie in"),
        ({"steps": 0}, "steps=0 must be an integer from 1"),
        ({"steps": 60.0}, "steps=60.0 must be an integer"),
        ({"steps": True}, "steps=True must be an integer"),
        ({"evaluations": -1}, "evaluations=-1 must be an integer from 0"),
        ({"clip_norm": 0.0}, "clip_norm=0.0 must lie in"),
        ({"batch_size": 0}, "batch_size=0 must lie in"),
        ({"sampling": "none"}, "sampling='none'"),
    ],
)
def test_settings_that_mean_nothing_are_refused_at_once(
    changed: dict[str, object], text: str
) -> None:
    settings = {"epsilon": 3.0, "delta": 1e-5, "steps": 60, **changed}
    with pytest.raises(ValueError, match=text):
        PrivacyTarget(**settings)  # type: ignore[arg-type]
