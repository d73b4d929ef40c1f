"""A plan refuses what has no accountant, and survives being written down."""

import subprocess
import sys
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_safedshb.privacy.plan import PrivacyPlan

VALID: dict[str, object] = {
    "clip_norm": 1.0,
    "noise_multiplier": 1.0,
    "batch_size": 25,
    "num_examples": 2763,
}


def make(**changes: object) -> PrivacyPlan:
    return PrivacyPlan(**{**VALID, **changes})  # type: ignore[arg-type]


def test_noise_and_rate_follow_from_the_numbers() -> None:
    plan = make(clip_norm=3.0, noise_multiplier=0.5, batch_size=10, num_examples=40)
    assert plan.noise_std == pytest.approx(2 * 3.0 * 0.5 / 10)
    assert plan.sampling_rate == 0.25


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clip_norm": 0.0}, "clip_norm=0.0"),
        ({"clip_norm": -1.0}, "clip_norm=-1.0"),
        ({"clip_norm": float("nan")}, "clip_norm=nan"),
        ({"clip_norm": float("inf")}, "clip_norm=inf"),
        ({"clip_norm": "1"}, "clip_norm='1'"),
        ({"clip_norm": 1e308}, "clip_norm=1e\\+308"),
        ({"clip_norm": 1e-10}, "clip_norm=1e-10"),
        ({"clip_norm": True}, "clip_norm=True"),
        ({"clip_norm": 10**400}, "clip_norm=1000"),
        ({"noise_multiplier": -0.1}, "noise_multiplier=-0.1"),
        ({"noise_multiplier": float("inf")}, "noise_multiplier=inf"),
        ({"noise_multiplier": float("nan")}, "noise_multiplier=nan"),
        ({"noise_multiplier": True}, "noise_multiplier=True"),
        ({"noise_multiplier": False}, "noise_multiplier=False"),
        ({"noise_multiplier": None}, "noise_multiplier=None"),
        ({"noise_multiplier": 1e-160}, "noise_multiplier=1e-160"),
        ({"noise_multiplier": 9e-7}, "noise_multiplier=9e-07 .* use 0"),
        ({"noise_multiplier": 1.1e6}, "noise_multiplier=1100000"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": -3}, "batch_size=-3"),
        ({"batch_size": 2.0}, "batch_size=2.0"),
        ({"num_examples": 0}, "num_examples=0"),
        ({"num_examples": 10**13}, "num_examples=10000000000000"),
        ({"num_examples": 24}, "batch_size=25 .* num_examples=24"),
        ({"sampling": "uniform"}, "sampling='uniform'"),
        ({"adjacency": "add"}, "adjacency='add'"),
        ({"clipping": "flat"}, "clipping='flat'"),
        ({"adjacency": "add-remove"}, "no accountant for sampling='fixed'"),
    ],
)
def test_a_plan_that_cannot_be_accounted_for_is_refused(
    changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make(**changes)


def test_whole_dataset_and_no_noise_are_plans() -> None:
    assert make(batch_size=2763).sampling_rate == 1.0
    assert make(noise_multiplier=0).noise_std == 0.0


def test_a_plan_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        make().noise_multiplier = 0.0  # type: ignore[misc]


positive = st.floats(1e-6, 1e6)


@settings(derandomize=True)
@given(positive, st.just(0.0) | positive, st.integers(1, 500), st.integers(500, 10**9))
def test_json_rebuilds_the_identical_plan(c: float, s: float, b: int, m: int) -> None:
    for words in (
        {"sampling": "fixed", "clipping": "ghost"},
        {"sampling": "poisson", "adjacency": "add-remove"},
    ):
        plan = make(
            clip_norm=c, noise_multiplier=s, batch_size=b, num_examples=m, **words
        )
        again = PrivacyPlan.from_json(plan.to_json())
        assert again == plan
        assert again.to_json() == plan.to_json()


def test_numpy_numbers_make_the_same_plan_and_text() -> None:
    plan = make(
        clip_norm=np.float64(1), batch_size=np.int64(25), num_examples=np.int32(2763)
    )
    assert plan == make()
    assert plan.to_json() == make().to_json()


@pytest.mark.parametrize("text", ['{"clip_norm": 1.0}', "[]", "3"])
def test_json_of_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a plan"):
        PrivacyPlan.from_json(text)


def test_a_field_that_no_plan_has_is_refused() -> None:
    with pytest.raises(ValueError, match="epsilon"):
        PrivacyPlan.from_dict({**make().to_dict(), "epsilon": 1.0})


def test_statement_names_sampler_adjacency_and_accountant() -> None:
    plan = make(sampling="poisson", adjacency="add-remove")
    statement = plan.statement(steps=10, delta=1e-4)
    assert statement.epsilon == plan.epsilon(10, 1e-4)
    for word in ("Poisson", "add-remove", "PLD", "delta = 0.0001", "10 steps"):
        assert word in str(statement)
    assert "fixed-size" in str(make().statement(1, 1e-4))
    assert "replace-one" in str(make().statement(1, 1e-4))


@pytest.mark.process
@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("plan", ("torch", "opacus", "flwr", "dp_accounting", "scipy")),
        ("accounting.baselines", ("torch", "opacus", "flwr")),
    ],
)
def test_the_import_stays_light(module: str, absent: tuple[str, ...]) -> None:
    code = (
        f"import sys, flwr_safedshb.privacy.{module}\n"
        f"print([m for m in {absent} if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout.strip() == "[]", run.stdout + run.stderr
