"""The client alone: what it charges, keeps, sends and says."""

import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from flwr.app import (
    ArrayRecord,
    Context,
    Message,
    RecordDict,
)
from flwr.clientapp import ClientApp
from torch.utils.data import Dataset

from flwr_safedshb import client as clients
from flwr_safedshb import trained_arrays
from flwr_safedshb.algorithm import step as steps
from flwr_safedshb.algorithm.budget import LEDGER_NAME
from flwr_safedshb.algorithm.refusal import RefusedError
from flwr_safedshb.algorithm.wire import MOMENTUM_TAG, Arrays
from flwr_safedshb.app import client_app
from flwr_safedshb.client import SafeDSHBClient, Scalar
from flwr_safedshb.privacy.clipping.gradients import ClippedGradients
from flwr_safedshb.privacy.plan import PrivacyPlan
from flwr_safedshb.privacy.randomness.noise import SeededRandomness
from flwr_safedshb.simulation.in_process import InProcessGrid
from tests.clients import (
    PLAN,
    SECRET,
    THETA,
    Layers,
    ask,
    data,
    ledger,
    ledger_of,
    make,
    node,
    same,
    send,
    squares,
)


def test_first_step_is_the_noisy_gradient_times_one_minus_beta() -> None:
    halved, whole = ask(node(), 0, 0.5), ask(node(), 0, 0.0)
    for half, one in zip(halved, whole, strict=True):
        assert np.allclose(half.astype(float), 0.5 * one.astype(float), rtol=1e-6)
        assert half.dtype == np.float32
    assert [layer.shape for layer in whole] == [(1, 3), (1,)]


@pytest.mark.parametrize("durable", [False, True])
def test_momentum_follows_the_recursion(tmp_path: Path, durable: bool) -> None:
    context = node(tmp_path if durable else None)
    betas = [0.5, 0.9, 0.1, 0.0]
    sent = [ask(context, t, beta) for t, beta in enumerate(betas)]
    gradients = [ask(node(), t, 0.0) for t in range(4)]
    expected = [np.zeros((1, 3)), np.zeros(1)]
    for t, beta in enumerate(betas):
        for layer in range(2):
            noisy = np.asarray(gradients[t][layer], np.float64)
            expected[layer] = beta * expected[layer] + (1 - beta) * noisy
            assert np.allclose(sent[t][layer].astype(float), expected[layer], atol=1e-6)


def test_durable_momentum_outlives_the_context(tmp_path: Path) -> None:
    alive, restarted = node(tmp_path / "a"), node(tmp_path / "b")
    for t in range(3):
        assert same(ask(alive, t, session="s"), ask(restarted, t, session="s"))
    restarted = node(tmp_path / "b")
    assert not restarted.state
    assert same(ask(alive, 3, session="s"), ask(restarted, 3, session="s"))


def test_a_new_run_starts_from_zero_with_the_old_budget(tmp_path: Path) -> None:
    context = node(tmp_path)
    first = ask(context, 0, session="one")
    ask(context, 1, session="one")
    assert same(ask(context, 0, session="two"), first)
    assert [c.run for c in ledger(tmp_path).charges()] == ["one", "one", "two"]


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("every", [1, 3])
def test_steps_are_taken_up_again_from_an_anchor(
    tmp_path: Path, durable: bool, every: int
) -> None:
    """A server that checkpoints every k steps may come back to the last one."""
    context = node(tmp_path if durable else None)
    sent = [ask(context, t, anchor=t % every == 0) for t in range(6)]
    newest = 3 if every == 3 else 5
    again = [ask(context, t, anchor=t % every == 0) for t in range(newest, 8)]
    straight = node()
    expected = [ask(straight, t) for t in range(8)]
    assert all(same(a, b) for a, b in zip(sent, expected[:6], strict=True))
    assert all(same(a, b) for a, b in zip(again, expected[newest:], strict=True))


def test_a_step_that_goes_back_too_far_starts_from_zero() -> None:
    context = node()
    for t in range(5):
        ask(context, t)
    assert same(ask(context, 2), ask(node(), 2))


def test_a_request_that_comes_again_is_answered_again_and_charged_once(
    tmp_path: Path,
) -> None:
    """A server that was restarted asks for its last step again."""
    told = {"momentum": 0.5, "session": "run"}

    def fit(step: int, theta: float = 0.0, **more: object) -> tuple[Arrays, int]:
        config = cast(dict[str, Scalar], {**told, "step": step, **more})
        client = make(node(tmp_path), seed=None)  # noise that nobody can repeat
        sent, *_ = client.fit([layer + np.float32(theta) for layer in THETA], config)
        return sent, len(ledger(tmp_path).charges())

    first, _ = fit(0)
    second, charged = fit(1)
    assert charged == 2
    again, charged = fit(1, anchor=False)
    assert charged == 2
    assert same(again, second)
    again, charged = fit(0)  # the anchor: the step before may be asked for as well
    assert charged == 2
    assert same(again, first)
    for number, other in enumerate(
        [
            fit(1, theta=1e-3),
            fit(1, momentum=0.25),
            fit(1, session="other"),
            fit(1, **{"local-steps": 2, "learning-rate": 0.1}),
        ],
        charged,
    ):
        assert other[1] > number
        assert not same(other[0], second)
    # The mean of local steps is not stored.
    charged = fit(9, **{"local-steps": 2, "learning-rate": 0.1})[1]
    assert fit(9, **{"local-steps": 2, "learning-rate": 0.1})[1] > charged


def test_the_charge_comes_before_the_data(tmp_path: Path) -> None:
    class Watching(Dataset[tuple[torch.Tensor, torch.Tensor]]):
        charged: list[int]

        def __init__(self) -> None:
            self.charged = []

        def __len__(self) -> int:
            return 20

        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            self.charged.append(len(ledger(tmp_path).charges()))
            if index < 3:
                return torch.ones(3), torch.ones(())
            raise KeyError(SECRET)

    make(node(tmp_path))  # which opens the ledger
    examples = Watching()
    client = make(node(tmp_path), dataset=examples, like=(torch.ones(3), 1.0))
    momentum, _, _ = client.fit([*THETA], {"step": 0, "momentum": 0.5})
    assert examples.charged == [1] * PLAN.batch_size
    assert any(layer.any() for layer in momentum)
    assert len(ledger(tmp_path).charges()) == 1


def test_an_exhausted_budget_ends_in_a_refusal(tmp_path: Path) -> None:
    limit = PLAN.epsilon(2, 1e-5) * 1.01
    context = node(tmp_path, max_epsilon=limit, commit_steps=2)
    ask(context, 0)
    ask(context, 1)
    with pytest.raises(RefusedError, match="budget of this node is spent"):
        ask(context, 2)
    assert len(ledger(tmp_path).charges()) == 2


def test_no_budget_is_charged_for_a_message_that_is_refused(tmp_path: Path) -> None:
    good: Mapping[str, object] = {"step": 0, "momentum": 0.5}
    bad: list[tuple[Layers, Mapping[str, object]]] = [
        ([*THETA], {"momentum": 0.5}),
        ([*THETA], {"step": 0}),
        ([*THETA], {**good, "step": -1}),
        ([*THETA], {**good, "step": True}),
        ([*THETA], {**good, "step": "0"}),
        ([*THETA], {**good, "momentum": 1.0}),
        ([*THETA], {**good, "momentum": float("nan")}),
        ([*THETA], {**good, "session": "x" * 65}),
        ([*THETA], {**good, "session": 5}),
        ([*THETA], {**good, "session": ""}),
        ([*THETA], {**good, "session": "=1+1"}),
        ([*THETA], {**good, "session": "red \x1b[31m"}),
        ([*THETA], {**good, "session": "two\nlines"}),
        ([THETA[0]], good),
        ([*THETA, THETA[0]], good),
        ([THETA[0].T, THETA[1]], good),
    ]
    client = make(node(tmp_path))
    for parameters, config in bad:
        with pytest.raises(RefusedError, match="message"):
            client.fit(parameters, config)  # type: ignore[arg-type]
    assert ledger(tmp_path).charges() == []


@pytest.mark.parametrize(
    ("rule", "bound"),
    [
        ("min-noise-multiplier", 1.5),
        ("max-clip-norm", 0.5),
        ("max-sampling-rate", 0.1),
        ("sampling", "poisson"),
        ("require-secure-noise", True),
    ],
)
def test_the_nodes_policy_refuses_a_weaker_plan(
    tmp_path: Path, rule: str, bound: bool | float | str
) -> None:
    context = node(tmp_path)
    context.node_config[rule] = bound
    with pytest.raises(RefusedError, match=f"policy {rule}={str(bound).lower()}"):
        make(context)
    assert not (tmp_path / "state").exists()


def test_a_policy_that_changes_during_a_run_is_in_force_at_once(
    tmp_path: Path,
) -> None:
    """What a node admitted it remembers, under all that it was asked with."""
    context = node(tmp_path)
    assert ledger_of(make(context)) is ledger_of(make(context))
    context.node_config["min-noise-multiplier"] = 2.0
    with pytest.raises(RefusedError, match="policy min-noise-multiplier=2"):
        make(context)
    context.node_config["min-noise-multiplier"] = 1.0
    make(context)
    with pytest.raises(RefusedError, match="policy min-noise-multiplier=1"):
        make(context, plan=PrivacyPlan(1.0, 0.5, 4, 20))
    context.node_config["partition-id"] = 5  # which decides nothing
    context.node_config["max-epsilon"] = 10.0
    held = ledger_of(make(context))
    assert held is not None
    assert held.max_epsilon == 10.0


def test_a_run_may_ask_for_less_budget_and_not_for_more(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="policy max-epsilon"):
        make(node(tmp_path), max_epsilon=51.0)
    with pytest.raises(RefusedError, match="policy delta"):
        make(node(tmp_path), delta=1e-4)
    client = make(node(tmp_path), max_epsilon=1.0)
    assert ledger_of(client).max_epsilon == 1.0
    assert ledger(tmp_path).max_epsilon == 50.0


def test_a_node_with_a_ledger_wants_noise_that_nobody_can_repeat(
    tmp_path: Path,
) -> None:
    context = node(tmp_path)
    del context.node_config["require-secure-noise"]
    with pytest.raises(RefusedError, match="require-secure-noise=true"):
        make(context)
    assert not (tmp_path / "state").exists()
    assert ledger_of(make(context, seed=None))
    context.node_config["require-secure-noise"] = False
    assert ledger_of(make(context))


def test_a_node_with_a_ledger_refuses_a_plan_without_noise(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="noise_multiplier=0"):
        make(node(tmp_path), plan=replace(PLAN, noise_multiplier=0.0))
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("budget", [math.inf, math.nan, -1.0, True])
def test_a_budget_without_sense_is_refused(tmp_path: Path, budget: float) -> None:
    for context in (node(tmp_path), node()):
        with pytest.raises(RefusedError, match=r"max.epsilon="):
            make(context, max_epsilon=budget, delta=1e-5)
    assert not (tmp_path / "state").exists()


def test_a_simulation_without_a_ledger_keeps_to_its_budget() -> None:
    client = make(node(), max_epsilon=PLAN.epsilon(2, 1e-5), delta=1e-5)
    for step in (0, 1, 0, 1):
        client.fit([*THETA], {"step": step, "momentum": 0.5})
    with pytest.raises(RefusedError, match="step 2 would exceed max_epsilon"):
        client.fit([*THETA], {"step": 2, "momentum": 0.5})
    unbounded = make(node(), delta=1e-5)
    unbounded.fit([*THETA], {"step": 10**6, "momentum": 0.5})
    with pytest.raises(RefusedError, match="without delta"):
        make(node(), max_epsilon=1.0).fit([*THETA], {"step": 0, "momentum": 0.5})


def test_unpredictable_noise_needs_a_ledger() -> None:
    with pytest.raises(RefusedError, match="no state-dir"):
        make(node(), seed=None)


def test_unpredictable_noise_is_the_default_and_never_repeats(tmp_path: Path) -> None:
    client = make(node(tmp_path), seed=None)
    sent = [
        client.fit([*THETA], {"step": 0, "momentum": 0.0, "session": name})[0]
        for name in ("a", "b")
    ]
    assert client.randomness.private
    assert not same(sent[0], sent[1])


def test_a_misspelt_rule_is_an_error_and_own_keys_can_be_named() -> None:
    with pytest.raises(ValueError, match="did you mean 'max-clip-norm'"):
        make(node(max_clipnorm=1.0))
    make(node(data_path="x"), node_keys=("data-path",))


def test_a_plan_for_another_dataset_is_an_error() -> None:
    with pytest.raises(ValueError, match="num_examples=21"):
        make(node(), plan=PrivacyPlan(1.0, 1.0, 4, 21))


class Partly(torch.nn.Module):
    """A model of which the last layer is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = torch.nn.Linear(3, 3)
        self.frozen.requires_grad_(False)
        self.last = torch.nn.Linear(3, 1)
        self.register_buffer("count", torch.tensor(5))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.frozen(inputs)
        outputs: torch.Tensor = self.last(hidden)
        return outputs


def test_what_is_not_trained_is_neither_taken_nor_sent() -> None:
    model = Partly()
    before = model.frozen.weight.clone()
    sent = trained_arrays(model)
    parameters = [array.numpy() + 1 for array in sent.values()]
    momentum, _, _ = make(node(), model=model).fit(
        parameters, {"step": 0, "momentum": 0.5}
    )
    assert [part.shape for part in momentum] == [(1, 3), (1,)]
    assert np.array_equal(model.last.weight.detach().numpy(), parameters[0])
    assert torch.equal(model.frozen.weight, before)
    everything = [value.numpy() for value in model.state_dict().values()]
    with pytest.raises(RefusedError, match=r"trained_arrays\(model\)"):
        make(node(), model=model).fit([*everything], {"step": 0, "momentum": 0.5})


def test_arrays_are_told_by_their_names(tmp_path: Path) -> None:
    """The order of a message's arrays is no matter; other names are refused."""
    model = Partly()
    arrays = trained_arrays(model)
    turned = ArrayRecord({name: arrays[name] for name in reversed(list(arrays))})
    other = ArrayRecord(model.state_dict())
    replies = [
        send(client_app(lambda c: make(c, model=model)), arrays=sent)[0]
        for sent in (arrays, turned, other)
    ]
    first, second = (r.content.array_records["arrays"] for r in replies[:2])
    assert list(first) == list(second) == ["last.weight", "last.bias"]
    assert all(np.array_equal(first[n].numpy(), second[n].numpy()) for n in first)
    reason = str(replies[2].error.reason)
    assert "has count, frozen.weight" in reason
    assert "start the run from trained_arrays(model)" in reason


class Explodes(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        raise ValueError(f"example {index} holds {SECRET}")


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("seed", [3, None])
def test_what_reaches_the_server_says_nothing_about_the_data(
    tmp_path: Path, legacy: bool, seed: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    """The node's own log does where the noise comes from a seed and protects nobody."""

    def exploding(context: Context) -> SafeDSHBClient:
        context.node_config.update(node(tmp_path).node_config)
        like = torch.ones(3), 1.0
        return make(context, seed, dataset=Explodes(), like=like)

    app = client_app(exploding)
    if legacy:
        app = ClientApp(client_fn=lambda context: exploding(context).to_client())
    (reply,) = send(app, legacy)
    # An answer like any other: that there is none would say something, too.
    assert not reply.has_error()
    assert str(SECRET) not in str(reply.content)
    assert (str(SECRET) in caplog.text) == (seed is not None)


def test_a_failing_client_fn_or_ledger_says_nothing_about_the_node(
    tmp_path: Path,
) -> None:
    def failing(context: Context) -> SafeDSHBClient:
        raise FileNotFoundError(f"/private/{SECRET}")

    (reply,) = send(client_app(failing))
    assert str(SECRET) not in str(reply.error.reason)
    assert "could not be made" in str(reply.error.reason)

    (tmp_path / "state").mkdir()
    (tmp_path / "state" / LEDGER_NAME).write_bytes(b"not a ledger")
    (reply,) = send(client_app(lambda _: make(node(tmp_path))))
    assert "the privacy ledger of this node cannot be used" in str(reply.error.reason)
    assert str(tmp_path) not in str(reply.error.reason)


def test_replies_hold_the_momentum_and_the_number_of_examples_only() -> None:
    (reply,) = send(client_app(make))
    assert reply.content.keys() == {"arrays", "metrics"}
    told = dict(reply.content.metric_records["metrics"])
    assert told.pop(MOMENTUM_TAG) is not None
    assert told == {"num-examples": 20}
    legacy = ClientApp(client_fn=lambda context: make(context).to_client())
    (reply,) = send(legacy, legacy=True)
    assert reply.content.config_records["fitres.metrics"].keys() == {MOMENTUM_TAG}


def test_nobody_can_guess_what_a_reply_is_made_of() -> None:
    """Records travel under the hash of their bytes; the noise of these is seeded."""
    (one,) = send(client_app(make))
    (two,) = send(client_app(make))
    assert one.content["arrays"].object_id == two.content["arrays"].object_id
    assert one.content["metrics"].object_id != two.content["metrics"].object_id


def test_evaluation_is_refused_unless_the_client_has_its_own() -> None:
    (reply,) = send(client_app(make), kind="evaluate")
    assert "does not evaluate" in str(reply.error.reason)

    class Evaluates(SafeDSHBClient):
        def evaluate(
            self, parameters: Layers, config: Mapping[str, object]
        ) -> tuple[float, int, dict[str, bool | bytes | float | int | str]]:
            return 0.5, 20, {"accuracy": 0.75, "note": "text"}

    def opted_in(context: Context) -> SafeDSHBClient:
        return Evaluates(
            torch.nn.Linear(3, 1),
            squares,
            data(),
            PLAN,
            context,
            randomness=SeededRandomness(0),
        )

    (reply,) = send(client_app(opted_in), kind="evaluate")
    assert dict(reply.content.metric_records["metrics"]) == {
        "accuracy": 0.75,
        "loss": 0.5,
        "num-examples": 20,
    }


def test_messages_with_other_records_are_refused() -> None:
    grid = InProcessGrid(client_app(make), 1)
    (target,) = grid.get_node_ids()
    message = Message(RecordDict(), dst_node_id=target, message_type="train")
    (reply,) = grid.send_and_receive([message])
    assert "one ArrayRecord and one ConfigRecord" in str(reply.error.reason)


def test_a_model_is_prepared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(3, 1)
    made = []
    real = ClippedGradients

    def counted(*arguments: object) -> object:
        made.append(arguments)
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(clients, "ClippedGradients", counted)
    for _ in range(3):
        make(node(), model=model)
    assert len(made) == 1
    make(node(), model=model, plan=PrivacyPlan(2.0, 1.0, 4, 20))
    assert len(made) == 2


def test_a_model_is_prepared_once_for_equal_losses_of_torch_and_for_no_others() -> None:
    model = torch.nn.Linear(3, 2)

    def prepared(loss: torch.nn.Module) -> ClippedGradients:
        return make(node(), model=model, loss=loss).source.gradients

    one = prepared(torch.nn.CrossEntropyLoss())
    assert prepared(torch.nn.CrossEntropyLoss()) is one
    hooked = torch.nn.CrossEntropyLoss()
    hooked.register_forward_hook(lambda *_: torch.zeros(3))
    others = [
        torch.nn.CrossEntropyLoss(label_smoothing=0.1),
        torch.nn.CrossEntropyLoss(reduction="none"),
        torch.nn.NLLLoss(),
        hooked,
    ]
    assert one not in map(prepared, others)
    own = torch.nn.NLLLoss(reduction="none")
    kept = prepared(own)
    batch = torch.ones(4, 3), torch.ones(4, dtype=torch.long)
    before = kept.flat_sum(*batch)
    own.reduction = "mean"  # the app's own, which it may change
    assert torch.equal(kept.flat_sum(*batch), before)


def test_an_unexpected_failure_is_logged_here_and_not_sent(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug of ours")

    monkeypatch.setattr(steps, "private_vector", broken)
    with caplog.at_level(logging.ERROR), pytest.raises(RefusedError) as caught:
        ask(node(), 0)
    assert "a bug of ours" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None
