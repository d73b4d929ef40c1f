"""A client that is given a target instead of a plan."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flwr_safedshb.algorithm.answer_evaluation import PrivateEvaluation
from flwr_safedshb.algorithm.refusal import RefusedError
from flwr_safedshb.algorithm.run_target import calibrate_plans
from flwr_safedshb.client import SafeDSHBClient
from flwr_safedshb.privacy.accounting.accountant import compute_epsilon
from flwr_safedshb.privacy.target import PrivacyTarget
from tests.clients import THETA, data, ledger, make, node

TARGET = PrivacyTarget(epsilon=3.0, delta=1e-5, steps=5)


def train(client: SafeDSHBClient, step: int, **config: int) -> None:
    more = {key.replace("_", "-"): value for key, value in config.items()}
    client.fit([*THETA], {"step": step, "momentum": 0.5, "session": "s", **more})


def test_a_client_finds_the_noise_for_its_own_examples() -> None:
    client = make(node(), plan=TARGET)
    assert client.plan == TARGET.make_plan(20)
    inputs, targets = data()
    smaller = make(node(), plan=TARGET, dataset=(inputs[:10], targets[:10]))
    assert smaller.plan == TARGET.make_plan(10)
    assert smaller.plan.noise_std > client.plan.noise_std


def test_a_whole_run_costs_the_target_and_no_more(tmp_path: Path) -> None:
    context = node(tmp_path, max_epsilon=50.0)
    for step in range(5):
        train(make(context, plan=TARGET), step, run_steps=5, run_evaluations=0)
    assert 2.97 <= ledger(tmp_path).epsilon("s") <= 3.0


def test_a_node_without_a_budget_of_its_own_keeps_the_target(tmp_path: Path) -> None:
    context = node(tmp_path)
    for key in ("max-epsilon", "delta"):
        del context.node_config[key]
    client = make(context, plan=TARGET)
    assert (ledger(tmp_path).max_epsilon, ledger(tmp_path).delta) == (3.0, 1e-5)
    for step in range(5):
        train(client, step, run_steps=5, run_evaluations=0)
    with pytest.raises(RefusedError, match="budget of this node is spent"):
        client.fit([*THETA], {"step": 0, "momentum": 0.5, "session": "another"})


def test_the_owners_rules_bind_the_plan_of_a_target(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="min-noise-multiplier=100"):
        make(node(tmp_path, min_noise_multiplier=100.0), plan=TARGET)
    with pytest.raises(RefusedError, match=r"delta=1e-06 refuses.* asks for 1e-05"):
        make(node(tmp_path, delta=1e-6), plan=TARGET)


@pytest.mark.parametrize("durable", [False, True])
def test_a_longer_run_is_refused_before_it_is_charged(
    tmp_path: Path, durable: bool
) -> None:
    client = make(node(tmp_path if durable else None), plan=TARGET)
    with pytest.raises(RefusedError, match=r"run takes 6 steps, .*steps=5 of its Priv"):
        train(client, 0, run_steps=6, run_evaluations=0)
    with pytest.raises(RefusedError, match="asks for 2 private evaluations"):
        train(client, 0, run_steps=5, run_evaluations=2)
    with pytest.raises(RefusedError, match="run takes 6 steps"):
        train(client, 5)  # whose length is unknown
    with pytest.raises(RefusedError, match="run takes 6 steps"):
        train(client, 3, local_steps=3, learning_rate=1)
    if durable:
        assert ledger(tmp_path).charges() == []
    train(client, 0, run_steps=5, run_evaluations=0)


@pytest.mark.parametrize("held_out", [0, 8])
def test_private_evaluations_are_within_the_target(held_out: int) -> None:
    target = replace(TARGET, evaluations=4)
    evaluation = PrivateEvaluation(None if held_out else 10.0, held_out)
    client = make(node(), plan=target, evaluation=evaluation)
    answers = client.budget.evaluation_plan
    assert answers is not None
    charges = [(client.plan, 5), (answers, 4)]
    assert 2.97 <= compute_epsilon(charges, 1e-5) <= 3.0
    alone = [compute_epsilon([charge], 1e-5) for charge in charges]
    # Held-out examples: each part has all of the target; otherwise they share it.
    assert (min(alone) > 2.97) == (held_out > 0)


def test_examples_read_one_by_one_pay_for_training_and_evaluation() -> None:
    items = [(torch.ones(3), 1.0)] * 20
    target = replace(TARGET, evaluations=4)
    more: dict[str, Any] = {
        "plan": target,
        "dataset": items,
        "like": (torch.ones(3), 1.0),
    }
    with pytest.raises(RefusedError, match="needs noise_multiplier where"):
        make(node(), evaluation=PrivateEvaluation(held_out=8), **more)
    evaluation = PrivateEvaluation(10.0, held_out=8)
    client = make(node(), evaluation=evaluation, **more)
    charges = [(client.plan, 5), (evaluation.plan(8), 4)]
    assert compute_epsilon(charges, 1e-5) <= 3.0


@pytest.mark.parametrize(
    ("evaluation", "evaluations", "text"),
    [
        (PrivateEvaluation(10.0), 0, r"PrivacyTarget\(evaluations=0\) leaves"),
        (PrivateEvaluation(), 4, "needs noise_multiplier where"),
        (PrivateEvaluation(0.1), 4, "spent by the other releases"),
        (PrivateEvaluation(0.1, held_out=8), 4, "costs the held-out examples"),
    ],
)
def test_evaluations_that_do_not_fit_are_refused_with_the_remedy(
    evaluation: PrivateEvaluation, evaluations: int, text: str
) -> None:
    target = replace(TARGET, evaluations=evaluations)
    with pytest.raises(RefusedError, match=text):
        make(node(), plan=target, evaluation=evaluation)


def test_a_plan_finds_no_noise_for_evaluations() -> None:
    with pytest.raises(ValueError, match="needs noise_multiplier beside a PrivacyPlan"):
        make(node(), evaluation=PrivateEvaluation())


def test_a_target_has_one_delta() -> None:
    assert make(node(), plan=TARGET, delta=1e-5).plan == TARGET.make_plan(20)
    with pytest.raises(ValueError, match=r"delta=0.001 of the client and delta=1e-05"):
        make(node(), plan=TARGET, delta=1e-3)


def test_a_delta_that_protects_nobody_is_refused_with_the_remedy() -> None:
    target = replace(TARGET, delta=0.05)
    with pytest.raises(RefusedError, match=r"below 1/num_examples=0.05 .* use 0.005"):
        make(node(), plan=target)


def test_neither_a_target_nor_a_plan_is_refused() -> None:
    with pytest.raises(ValueError, match=r"plan=3.0 must be a PrivacyTarget, such as"):
        make(node(), plan=3.0)


def test_without_evaluations_the_noise_is_for_training_alone() -> None:
    assert calibrate_plans(TARGET, 100) == (TARGET.make_plan(100), None)
