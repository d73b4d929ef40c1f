"""One run, one file that says everything its figures depend on."""

import json
from pathlib import Path

import pytest
from hydra.utils import instantiate

from simulations.config import compose_config, resolve_config
from simulations.engines import run
from simulations.results import record
from simulations.results.schema import RunRecord

pytestmark = pytest.mark.federation

SMALL = ["steps=4", "evaluate_every=2", "data.num_examples=800", "seed=3"]


def recorded(*overrides: str) -> RunRecord:
    everything = [*SMALL, *overrides]
    return record.record(everything, run(everything), 1.5)


@pytest.fixture(scope="module")
def attacked() -> RunRecord:
    return recorded("attack=non-finite")


def test_a_record_survives_the_disk(attacked: RunRecord, tmp_path: Path) -> None:
    path = tmp_path / "some" / "run.json"
    record.write(path, attacked)
    assert record.read(path) == attacked
    assert [p.name for p in path.parent.iterdir()] == ["run.json"]


def test_evaluations_by_step(attacked: RunRecord) -> None:
    found = attacked["evaluations"]
    assert found["step"] == [0, 2, 4]
    assert {len(values) for values in found.values()} == {3}  # type: ignore[arg-type]
    assert all(0 <= accuracy <= 1 for accuracy in found["accuracy"])
    # From zero, any model has this loss, and no regularisation.
    assert found["training_loss"][0] == pytest.approx(0.6931471805599453)
    assert found["training_loss"][-1] != found["test_loss"][-1]


def test_excluded_replies_are_counted_by_reason(attacked: RunRecord) -> None:
    assert attacked["rounds"]["excluded"] == {"not-finite": [3] * 4}
    assert attacked["rounds"]["replies"] == [4] * 4
    assert attacked["adversaries"] == [4, 5, 6]


def test_who_was_left_out_is_told_by_number() -> None:
    # Far away and alone, the adversaries are never in the best subset.
    found = recorded("attack=huge-norm")
    assert found["rounds"]["left_out"] == [[4, 5, 6]] * 4
    assert found["rounds"]["metrics"]["kappa"] == [12.0] * 4
    assert None not in found["rounds"]["metrics"]["lambda-max"]


def test_a_rule_that_weighs_nobody_leaves_nobody_out() -> None:
    found = recorded("aggregation=median", "attack=sign-flip")
    assert found["rounds"]["left_out"] == [None] * 4
    assert "lambda-max" not in found["rounds"]["metrics"]


def test_privacy_is_that_of_the_plan_and_the_data(attacked: RunRecord) -> None:
    said = attacked["privacy"]
    cfg = compose_config(" ".join(SMALL))
    # A fifth tests, four honest nodes share the rest.
    plan = instantiate(cfg.privacy.plan, num_examples=160)
    assert said["num_examples"] == 160
    assert said["epsilon"] == plan.epsilon(4, cfg.privacy.delta)
    assert said["sampler"] == "fixed-size sampling without replacement"
    assert said["adjacency"] == "replace-one"
    assert "PLD" in said["accountant"]


def test_seeded_noise_is_said_to_protect_nobody(attacked: RunRecord) -> None:
    assert attacked["privacy"]["seeded_noise"] is True
    assert "protects nobody" in attacked["privacy"]["note"]
    found = record.record([*SMALL, "engine=deployment"], run(SMALL), 1.5)
    assert found["privacy"]["seeded_noise"] is False
    assert "operating system" in found["privacy"]["note"]
    assert "nobody" not in found["privacy"]["note"]


def test_no_noise_is_no_epsilon(tmp_path: Path) -> None:
    found = recorded("privacy.plan.noise_multiplier=0")
    assert found["privacy"]["epsilon"] is None
    record.write(tmp_path / "run.json", found)  # JSON has no infinity


def test_the_smallest_node_states_the_epsilon() -> None:
    found = recorded("split=dirichlet", "split.alpha=0.5")
    sizes = found["data"]["examples_per_node"]
    assert isinstance(sizes, list)
    assert found["privacy"]["num_examples"] == min(sizes) < max(sizes)


def test_configurations_are_compared_without_places() -> None:
    here = resolve_config("data=phishing data.path=/here")
    there = resolve_config("data=phishing data.path=/there checkpoint=/x")
    assert here == there
    assert here != resolve_config("data=phishing data.test_fraction=0.5")
    assert here != resolve_config("data=phishing seed=2")


def test_what_is_no_record_is_not_read(tmp_path: Path, attacked: RunRecord) -> None:
    path = tmp_path / "run.json"
    assert record.read(path) is None
    path.write_text(json.dumps(attacked)[:-20])
    assert record.read(path) is None
    path.write_text(json.dumps({**attacked, "format": 0}))
    assert record.read(path) is None


def test_a_failed_write_leaves_nothing(tmp_path: Path, attacked: RunRecord) -> None:
    path = tmp_path / "run.json"
    record.write(path, attacked)
    with pytest.raises(ValueError, match="JSON"):
        record.write(path, {**attacked, "seconds": float("nan")})
    assert record.read(path) == attacked
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]
