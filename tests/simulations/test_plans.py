"""The plan of each node: one for all, or each its own noise; and who is warned of."""

from pathlib import Path

import numpy as np
import pytest

from flwr_safedshb.algorithm.norm_bound import NormBound
from flwr_safedshb.attacks import Zero
from flwr_safedshb.privacy.accounting.accountant import compute_epsilon
from flwr_safedshb.privacy.ledger.ledger import Ledger
from simulations.attacks import Sleeper
from simulations.config import compose_config
from simulations.engines import run
from simulations.experiment import make_norm_bound, make_share
from simulations.plans import compute_spent, make_plans, warn_of_small_nodes

SIZES = (50, 500, 5000)


@pytest.mark.parametrize("local_steps", [1, 10])
def test_every_node_finds_its_own_noise(local_steps: int) -> None:
    cfg = compose_config(f"privacy.target_epsilon=2 local_steps={local_steps}")
    plans = [make_plans(cfg, size).training for size in SIZES]
    assert all(1.9 < plan.epsilon(400, 1e-4) <= 2.0 for plan in plans)
    noise = [plan.noise_multiplier for plan in plans]
    assert noise == sorted(noise, reverse=True)
    assert {plan.num_examples for plan in plans} == {*SIZES}


@pytest.mark.federation
@pytest.mark.parametrize("size", SIZES)
def test_every_ledger_ends_at_the_target(tmp_path: Path, size: int) -> None:
    cfg = compose_config("privacy.target_epsilon=2")
    plan = make_plans(cfg, size).training
    with Ledger(tmp_path / "ledger", 2.0, 1e-4) as ledger:
        ledger.commit([(plan, 400)], "run")
        for _ in range(40):
            ledger.charge(plan, 10, "run")
        assert 1.9 < ledger.epsilon() <= 2.0


def test_without_a_target_all_nodes_have_the_same_noise() -> None:
    cfg = compose_config("privacy=moderate")
    assert {make_plans(cfg, size).training.noise_multiplier for size in SIZES} == {2.0}


def test_clients_are_made_with_their_own_plan() -> None:
    text = (
        "privacy.target_epsilon=3 steps=20 split=unequal split.sizes=[40,400] "
        "num_nodes=2 num_malicious_nodes=0"
    )
    cfg = compose_config(text)
    expected = [make_plans(cfg, m).training for m in (40, 400)]
    assert [make_share(text, i).plan for i in (0, 1)] == expected


@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
def test_the_norm_bound_is_that_of_the_largest_figures(sampling: str) -> None:
    text = "privacy.target_epsilon=3 steps=20 norm_confidence=0.99 weight_decay=0.25"
    cfg = compose_config(f"{text} privacy.plan.sampling={sampling}")
    found = make_norm_bound(cfg, (40, 400))
    smallest = make_plans(cfg, 40).training
    b = smallest.batch_size if sampling == "poisson" else None
    assert found == NormBound(smallest.clip_norm, smallest.noise_std, 0.25, b, 0.99)
    assert make_norm_bound(compose_config("privacy=moderate"), (40, 400)) is None


@pytest.mark.federation
def test_a_simulation_excludes_what_no_honest_node_sends() -> None:
    small = "steps=4 data.num_examples=800 aggregation=average norm_confidence=0.999"
    progress = run([*f"{small} attack=huge-norm engine=batched".split()])
    for metrics in progress.train.values():
        assert metrics["excluded-too-long"] == 3
        assert (metrics["replies"], metrics["num-malicious-nodes"]) == (4, 0)


@pytest.mark.parametrize("held_out", [0.0, 0.2])
def test_answers_about_models_are_within_the_target(held_out: float) -> None:
    noise = "null" if held_out else "60"
    cfg = compose_config(
        "privacy.target_epsilon=2 private_evaluation.every=10 "
        f"private_evaluation.held_out={held_out} "
        f"private_evaluation.noise_multiplier={noise}"
    )
    for size in (200, 2000):
        plans = make_plans(cfg, size)
        assert 1.9 < compute_spent(cfg, size) <= 2.0
        (_, steps), (second, answers) = plans.charges
        assert (steps, answers) == (400, 40)
        assert plans.evaluation is not None
        assert plans.evaluation.held_out == held_out * size
        apart = [compute_epsilon([charge], 1e-4) for charge in plans.charges]
        # Held-out examples: each part has all of it; otherwise they share.
        assert (min(apart) > 1.9) == (held_out > 0)
        assert second.num_examples == (plans.evaluation.held_out or size)


def test_a_node_far_above_the_others_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cfg = compose_config("")
    (words,) = warn_of_small_nodes(cfg, (50, 2000, 2000, 2000))
    assert f"50 examples spends epsilon={compute_spent(cfg, 50):.3g}" in words
    assert words in caplog.text
    assert warn_of_small_nodes(cfg, (1500, 2000, 2000)) == []
    # Where most are small, none of them is alone.
    assert warn_of_small_nodes(cfg, (50, 50, 50, 5000)) == []
    assert warn_of_small_nodes(compose_config("privacy.target_epsilon=2"), SIZES) == []


def test_sleepers_behave_and_then_attack() -> None:
    attack, honest = Sleeper(2, Zero()), np.arange(6.0).reshape(3, 2)
    rng = np.random.default_rng(0)
    sent = [attack(honest, 2, rng, lambda v, f: v.mean(axis=0)) for _ in range(4)]
    assert np.array_equal(sent[0], honest[:2])
    assert np.array_equal(sent[1], honest[:2])
    assert not np.array_equal(sent[2], honest[:2])
    assert np.array_equal(sent[2], sent[3])
