"""Private evaluation: what a client answers, what it costs, and what is refused."""

import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from torch import nn
from torch.utils.data import Dataset

from flwr_safedshb.algorithm import split as split_module
from flwr_safedshb.algorithm.answer_evaluation import PrivateEvaluation
from flwr_safedshb.algorithm.refusal import RefusedError
from flwr_safedshb.algorithm.split import split_examples
from flwr_safedshb.algorithm.wire import (
    MAX_LOSS,
    PER_CLASS,
    PRIVATE_EVALUATION,
    RUN_EVALUATIONS,
    RUN_STEPS,
)
from flwr_safedshb.app import client_app
from flwr_safedshb.client import SafeDSHBClient
from flwr_safedshb.privacy.accounting.accountant import compute_epsilon
from flwr_safedshb.privacy.accounting.renyi_filter import RenyiFilter
from flwr_safedshb.privacy.datasets import ArrayExamples
from flwr_safedshb.privacy.plan import PrivacyPlan
from flwr_safedshb.simulation.in_process import InProcessGrid
from tests.clients import Layers, Scalar, ledger, node

M, HELD_OUT = 60, 20
LABELS = torch.arange(M) % 3
INPUTS = torch.eye(3)[LABELS]
# The model that is always right, and the one that never is.
RIGHT: Layers = [np.eye(3, dtype=np.float32) * 9, np.zeros(3, np.float32)]
WRONG: Layers = [np.eye(3, dtype=np.float32) * -9, np.zeros(3, np.float32)]
ASKED: dict[str, Scalar] = {PRIVATE_EVALUATION: 4, MAX_LOSS: 4.0, "session": "run"}
TRAIN: dict[str, Scalar] = {"step": 0, "momentum": 0.5, "session": "run"}


def make(context: Context, held_out: int = 0, **settings: Any) -> SafeDSHBClient:
    noise = settings.pop("noise", 1e-6)
    classes = settings.pop("classes", 3)
    arguments: dict[str, Any] = {
        "model": nn.Linear(3, 3),
        "loss": nn.CrossEntropyLoss(reduction="none"),
        "dataset": (INPUTS, LABELS),
        "plan": PrivacyPlan(1.0, 1.0, 4, max(M - held_out, 4)),
        "evaluation": PrivateEvaluation(noise, held_out, classes),
        **settings,
    }
    return SafeDSHBClient(context=context, **arguments)


def seeded(held_out: int = 0, **settings: Any) -> SafeDSHBClient:
    from flwr_safedshb.privacy.randomness.noise import SeededRandomness

    return make(node(), held_out, randomness=SeededRandomness(3), **settings)


@pytest.mark.parametrize(("theta", "right", "loss"), [(RIGHT, M, 0.0), (WRONG, 0, M)])
def test_right_answers_and_clipped_losses_are_counted(
    theta: Layers, right: int, loss: float
) -> None:
    told = seeded().evaluate_privately(theta, {**ASKED, PER_CLASS: True})
    assert told["num-examples"] == M
    assert told["correct"] == pytest.approx(right, abs=1e-3)
    # Wrong ones lose 9, of which 4 count.
    assert told["loss"] == pytest.approx(loss, abs=0.02)
    assert told["class-count"] == pytest.approx([M / 3] * 3, abs=1e-3)
    assert told["class-correct"] == pytest.approx([right / 3] * 3, abs=1e-3)
    assert told["noise-std"] == pytest.approx(1e-6 * math.sqrt(5))


def test_the_noise_is_that_of_the_sensitivity() -> None:
    found = []
    # It is that of few examples as of many, and of one client as of many.
    few, plan = (INPUTS[:4], LABELS[:4]), PrivacyPlan(1.0, 1.0, 4, 4)
    client = seeded(noise=3.0, dataset=few, plan=plan)
    for number in range(400):
        told = client.evaluate_privately(RIGHT, {**ASKED, PRIVATE_EVALUATION: number})
        assert told["noise-std"] == pytest.approx(3.0 * math.sqrt(2))
        found.append([told["correct"], told["loss"]])
    spread = np.std(found, axis=0) / (3.0 * math.sqrt(2))
    assert np.all((spread > 0.88) & (spread < 1.12))
    assert abs(np.corrcoef(np.transpose(found))[0, 1]) < 0.2


def test_held_out_examples_alone_are_counted_and_do_not_train() -> None:
    client = seeded(HELD_OUT)
    assert client.evaluate_privately(RIGHT, ASKED)["num-examples"] == HELD_OUT
    assert client.plan.num_examples == M - HELD_OUT
    kept, aside = split_examples(ArrayExamples(INPUTS, torch.arange(M)), HELD_OUT)
    assert isinstance(kept, ArrayExamples)
    assert isinstance(aside, ArrayExamples)
    both = [*kept.tensors[1].tolist(), *aside.tensors[1].tolist()]
    assert sorted(both) == [*range(M)]


def test_every_answer_is_charged_and_composed_with_training(tmp_path: Path) -> None:
    context = node(tmp_path)
    client = make(context, noise=5.0, randomness=None)
    told = {RUN_STEPS: 1, RUN_EVALUATIONS: 3}
    for _ in range(3):  # whatever is asked again is charged again
        client.evaluate_privately(RIGHT, {**ASKED, **told})
    client.fit(RIGHT, TRAIN)
    plans = [(c.plan.sampling, c.plan.num_examples) for c in ledger(tmp_path).charges()]
    assert plans == [("whole", M)] * 3 + [("fixed", M)]
    second = PrivateEvaluation(5.0).plan(M)
    together = compute_epsilon([(client.plan, 1), (second, 3)], 1e-5)
    assert ledger(tmp_path).epsilon() == together > client.plan.epsilon(1, 1e-5)


def test_held_out_examples_cost_the_larger_over_runs(tmp_path: Path) -> None:
    life = {"commit_steps": 2, "commit_evaluations": 2}
    for run in ("one", "two"):
        client = make(node(tmp_path, **life), HELD_OUT, noise=5.0, randomness=None)
        client.evaluate_privately(RIGHT, {**ASKED, "session": run})
        client.fit(RIGHT, {**TRAIN, "session": run})
    plain = PrivacyPlan(1.0, 1.0, 4, M - HELD_OUT)
    second = PrivateEvaluation(5.0).plan(HELD_OUT)
    larger = max(plain.epsilon(2, 1e-5), second.epsilon(2, 1e-5))
    assert ledger(tmp_path).epsilon() == larger


@pytest.mark.parametrize("change", ["data", "order", "share", "key", "which", "none"])
def test_with_other_data_or_another_split_the_sum_is_due(
    tmp_path: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make(node(tmp_path), HELD_OUT, noise=5.0, randomness=None)
    first.fit(RIGHT, TRAIN)
    inputs, labels, held_out = INPUTS.clone(), LABELS, HELD_OUT
    if change == "data":
        inputs[7, 0] += 1e-6
    elif change == "order":
        inputs, labels = inputs.flip(0), labels.flip(0)
    elif change == "share":
        held_out += 1
    elif change == "which":  # as another version of numpy may shuffle them
        others = np.arange(HELD_OUT)
        monkeypatch.setattr(split_module, "_draw_held_out", lambda size, count: others)
    elif change == "key":
        (tmp_path / "state" / "safedshb.key").unlink()
    context = node(tmp_path)
    data = (inputs, labels)
    second = make(context, held_out, dataset=data, noise=5.0, randomness=None)
    second.evaluate_privately(RIGHT, ASKED)
    plain = PrivacyPlan(1.0, 1.0, 4, M - HELD_OUT)
    plans = [plain, PrivateEvaluation(5.0).plan(held_out)]
    cost = RenyiFilter(((plain, 1),), 1e-5, 50.0, "replace-one").epsilon
    costs = [cost([(plan, 1)]) for plan in plans]
    together = cost([(plan, 1) for plan in plans])
    expected = max(costs) if change == "none" else together
    assert ledger(tmp_path).epsilon() == expected


def test_the_ledger_shows_no_digest_that_others_can_compute(tmp_path: Path) -> None:
    parts = []
    for folder in ("a", "b"):
        client = make(node(tmp_path / folder), HELD_OUT, randomness=None, noise=5.0)
        parts.append(client.plan.part)
        key = tmp_path / folder / "state" / "safedshb.key"
        assert key.stat().st_mode & 0o77 == 0
    assert parts[0] != parts[1]


class OneByOne(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self, broken: int = -1) -> None:
        self.broken = broken

    def __len__(self) -> int:
        return M

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index == self.broken:
            raise OSError("unreadable")
        return INPUTS[index], LABELS[index]


def test_data_that_are_read_one_by_one_pay_for_both(tmp_path: Path) -> None:
    data = OneByOne()
    settings = {"randomness": None, "noise": 5, "like": (INPUTS[0], LABELS[0])}
    client = make(node(tmp_path), HELD_OUT, dataset=data, **settings)
    assert client.plan.part == "all"
    assert client.evaluate_privately(RIGHT, ASKED)["num-examples"] == HELD_OUT
    told = seeded(dataset=OneByOne()).evaluate_privately(RIGHT, ASKED)
    assert told["correct"] == pytest.approx(M)


def odd(**changes: float) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, labels = INPUTS.clone(), LABELS.clone()
    for name, value in changes.items():
        if name == "label":
            labels[5] = int(value)
        else:
            inputs[5] = value
    return inputs, labels


@pytest.mark.parametrize(
    "dataset",
    [
        odd(label=-1), odd(label=3), odd(label=2**40), odd(inputs=math.nan),
        odd(inputs=math.inf), odd(inputs=1e38), OneByOne(broken=5),
    ],
)  # fmt: skip
@pytest.mark.parametrize("per_class", [False, True])
def test_an_odd_example_counts_as_one_and_is_answered(
    dataset: object, per_class: bool
) -> None:
    """One example, whatever it is, moves the sums by no more than the sensitivity."""
    with warnings.catch_warnings():
        told, usual = (
            seeded(dataset=data).evaluate_privately(
                RIGHT, {**ASKED, PER_CLASS: per_class}
            )
            for data in (dataset, (INPUTS, LABELS))
        )
    names = ["correct", "loss"]
    moved = [float(told[n]) - float(usual[n]) for n in names]  # type: ignore[arg-type]
    assert max(map(abs, moved)) <= 1 + 1e-6
    if per_class:
        for name in ("class-count", "class-correct", "class-loss"):
            columns = np.array([told[name], usual[name]])
            moved += list(columns[0] - columns[1])
    assert np.isfinite(moved).all()
    assert float(np.linalg.norm(moved)) <= math.sqrt(6)


@pytest.mark.parametrize(
    "asked",
    [
        {PRIVATE_EVALUATION: -1}, {PRIVATE_EVALUATION: True},
        {PRIVATE_EVALUATION: "1"}, {PRIVATE_EVALUATION: 2**60},
        {MAX_LOSS: 0.0}, {MAX_LOSS: math.nan}, {MAX_LOSS: math.inf}, {MAX_LOSS: 1e-160},
        {MAX_LOSS: "4"}, {"session": "a b"}, {"session": 3},
    ],
)  # fmt: skip
def test_odd_messages_are_refused_and_cost_nothing(
    tmp_path: Path, asked: dict[str, Scalar]
) -> None:
    client = make(node(tmp_path), noise=5.0, randomness=None)
    with pytest.raises(RefusedError, match="the message"):
        client.evaluate_privately(RIGHT, {**ASKED, **asked})
    with pytest.raises(RefusedError, match="arrays of shapes"):
        client.evaluate_privately(RIGHT[:1], ASKED)
    assert ledger(tmp_path).charges() == []


def ask_on(client: SafeDSHBClient) -> None:
    for _ in range(1000):
        client.evaluate_privately(RIGHT, ASKED)


def test_a_budget_that_is_spent_ends_evaluations_and_training(tmp_path: Path) -> None:
    context = node(tmp_path, max_epsilon=1.0)
    client = make(context, noise=10.0, randomness=None)
    with pytest.raises(RefusedError, match="budget of this node is spent"):
        ask_on(client)
    with pytest.raises(RefusedError, match="budget of this node is spent"):
        client.fit(RIGHT, TRAIN)
    assert 0.8 < ledger(tmp_path).epsilon() <= 1.0


def test_a_simulation_without_a_ledger_keeps_to_its_budget() -> None:
    client = seeded(noise=10.0, max_epsilon=1.0, delta=1e-5)
    with pytest.raises(RefusedError, match="would exceed max_epsilon"):
        ask_on(client)
    with pytest.raises(RefusedError, match="would exceed max_epsilon"):
        client.fit(RIGHT, TRAIN)


def test_a_simulation_counts_its_evaluations_beside_its_steps() -> None:
    delta = 1e-5
    budget: dict[str, Any] = {
        "max_epsilon": seeded().plan.epsilon(2, delta),
        "delta": delta,
    }
    second = {**TRAIN, "step": 1}
    seeded(noise=10.0, **budget).fit(RIGHT, second)
    client = seeded(noise=10.0, **budget)
    client.evaluate_privately(RIGHT, ASKED)
    with pytest.raises(RefusedError, match="would exceed max_epsilon"):
        client.fit(RIGHT, second)


@pytest.mark.parametrize(
    "rule",
    [{"sampling": "fixed"}, {"max_sampling_rate": 0.5}, {"min_noise_multiplier": 0.5}],
)
def test_the_nodes_policy_holds_for_evaluations(
    tmp_path: Path, rule: dict[str, Any]
) -> None:
    with pytest.raises(RefusedError, match="evaluation: "):
        make(node(tmp_path, **rule), noise=0.1, randomness=None)
    make(node(tmp_path, max_clip_norm=1.0, sampling="fixed,whole"), noise=0.1)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"noise_multiplier": 0.0}, "noise_multiplier"),
        ({"noise_multiplier": 1e-160}, "noise_multiplier"),
        ({"noise_multiplier": math.nan}, "noise_multiplier"),
        ({"noise_multiplier": 1.0, "held_out": -1}, "held_out=-1"),
        ({"noise_multiplier": 1.0, "held_out": 2.5}, "held_out=2.5"),
        ({"noise_multiplier": 1.0, "num_classes": 1}, "num_classes=1"),
        ({"noise_multiplier": 1.0, "num_classes": 10**9}, "num_classes="),
    ],
)
def test_odd_settings_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        PrivateEvaluation(**settings)


def test_settings_that_do_not_fit_the_data_are_refused() -> None:
    with pytest.raises(ValueError, match="leaves none to train on"):
        seeded(M, plan=PrivacyPlan(1.0, 1.0, 4, M))
    part = "trained:0123456789abcdef"
    with pytest.raises(ValueError, match="for the client to say"):
        seeded(plan=PrivacyPlan(1.0, 1.0, 4, M, part=part))


def test_only_noisy_sums_leave_the_node_and_only_where_it_agreed() -> None:
    def ask(client: SafeDSHBClient, **more: Scalar) -> Message:
        app = client_app(lambda context: client)
        grid = InProcessGrid(app, 1)
        content = RecordDict(
            {
                "arrays": ArrayRecord([*RIGHT]),
                "config": ConfigRecord({**ASKED, **more}),
            }
        )
        (reply,) = grid.send_and_receive(
            [Message(content, n, "evaluate") for n in grid.get_node_ids()]
        )
        return reply

    reply = ask(seeded())
    (record,) = reply.content.values()
    assert set(record) == {"num-examples", "correct", "loss", "noise-std", "safe-dshb"}
    assert "does not evaluate" in str(ask(seeded(evaluation=None)).error.reason)
    assert "by class" in str(ask(seeded(classes=None), **{PER_CLASS: True}).error)
