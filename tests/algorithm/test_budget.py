"""What a node admits: commitments, rules, evaluations, and what it says of errors."""

import signal
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.supercore.exit import ExitCode, flwr_exit, register_signal_handlers
from flwr.supercore.telemetry import EventType

from flwr_safedshb.algorithm.answer_evaluation import PrivateEvaluation
from flwr_safedshb.algorithm.refusal import RefusedError, to_refusal
from flwr_safedshb.algorithm.wire import RUN_EVALUATIONS, RUN_STEPS
from flwr_safedshb.app import client_app
from flwr_safedshb.client import SafeDSHBClient
from flwr_safedshb.privacy.accounting import accountant
from flwr_safedshb.privacy.ledger.ledger import Ledger, LedgerError
from flwr_safedshb.privacy.plan import PrivacyPlan
from flwr_safedshb.privacy.randomness.noise import SeededRandomness
from flwr_safedshb.simulation.batched import BatchedGrid
from flwr_safedshb.simulation.in_process import InProcessGrid
from tests.clients import PLAN, SECRET, THETA, Scalar, data, ledger, make, node

RUN: dict[str, Scalar] = {"step": 0, "momentum": 0.5, "session": "run"}
TOLD: dict[str, Scalar] = {RUN_STEPS: 5, RUN_EVALUATIONS: 2}


# Commitments


def test_a_run_that_says_its_length_pays_its_privacy_loss(tmp_path: Path) -> None:
    evaluation = PrivateEvaluation(20.0)
    for step in range(3):
        client = make(node(tmp_path), evaluation=evaluation)
        client.fit([*THETA], {**RUN, **TOLD, "step": step})
    committed = [(c.plan, c.steps) for c in ledger(tmp_path).commitments()]
    assert committed == [(PLAN, 5), (evaluation.plan(20), 2)]
    assert len(ledger(tmp_path).charges()) == 3
    assert ledger(tmp_path).epsilon() == accountant.compute_epsilon(committed, 1e-5)


def test_a_run_states_what_it_was_committed_to(tmp_path: Path) -> None:
    asked = {**RUN, RUN_STEPS: 5, "state-privacy": True}
    _, _, told = make(node(tmp_path)).fit([*THETA], asked)
    assert told["epsilon"] == PLAN.epsilon(5, 1e-5)


def test_a_step_that_is_paid_for_is_sent_without_a_report_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise LedgerError(SECRET)

    monkeypatch.setattr(Ledger, "epsilon", fail)
    sent, _, told = make(node(tmp_path)).fit([*THETA], {**RUN, "state-privacy": True})
    assert len(sent) == len(THETA)
    assert "epsilon" not in told


@pytest.mark.parametrize("odd", [-1, True, 2.0, "5", 10**10, None])
@pytest.mark.parametrize("key", [RUN_STEPS, RUN_EVALUATIONS])
def test_odd_lengths_of_a_run_are_refused(
    tmp_path: Path, key: str, odd: Scalar
) -> None:
    client = make(node(tmp_path))
    with pytest.raises(RefusedError, match=key):
        client.fit([*THETA], {**RUN, key: odd})
    assert ledger(tmp_path).charges() == ledger(tmp_path).commitments() == []


def test_a_hostile_length_does_not_raise_the_limit(tmp_path: Path) -> None:
    context = node(tmp_path, max_epsilon=6.0)
    make(context).fit([*THETA], {**RUN, RUN_STEPS: 10**9, RUN_EVALUATIONS: 10**9})
    assert 5.8 < ledger(tmp_path).epsilon() <= 6.0


def test_an_owner_commits_a_plan_for_life(tmp_path: Path) -> None:
    for run in range(3):
        client = make(node(tmp_path, commit_steps=30))
        client.fit([*THETA], {**RUN, RUN_STEPS: 10, "session": f"run{run}"})
    book = ledger(tmp_path)
    assert book.epsilon() == PLAN.epsilon(30, 1e-5)
    assert book.epsilon("run0") == PLAN.epsilon(10, 1e-5)
    with pytest.raises(RefusedError, match="commit-steps must be an integer"):
        make(node(tmp_path, commit_steps=1.5))


# BatchedGrid


def test_nodes_of_a_batched_grid_are_committed_and_charged(tmp_path: Path) -> None:
    """Each has a ledger of its own, and a charge in it for every step."""

    def client_fn(context: Context) -> SafeDSHBClient:
        folder = tmp_path / str(context.node_config["partition-id"])
        own = node(folder, max_epsilon=20.0)
        context.node_config.update(own.node_config)
        return make(context)

    grid = BatchedGrid(client_app(client_fn), 3)

    def ask(step: int) -> list[Message]:
        arrays = ArrayRecord([*THETA])
        config = ConfigRecord({**RUN, **TOLD, "step": step})
        content = RecordDict({"arrays": arrays, "config": config})
        return [Message(content, n, "train") for n in grid.get_node_ids()]

    for step in range(2):
        messages = ask(step)
        replies = list(grid.send_and_receive(messages))
        assert not any(reply.has_error() for reply in replies)
    for number in range(3):
        book = ledger(tmp_path / str(number))
        assert [(c.run, c.steps) for c in book.charges()] == [("run", 1)] * 2
        assert [(c.run, c.steps) for c in book.commitments()] == [("run", 5)]
    # And the budget ends a node's part, not the round.
    messages = ask(2)
    with Ledger(tmp_path / "0" / "state" / "safedshb.sqlite") as book:
        book.charge(PLAN, book.steps_left(PLAN))
    replies = list(grid.send_and_receive(messages))
    assert [reply.has_error() for reply in replies] == [True, False, False]
    assert "budget of this node is spent" in str(replies[0].error.reason)


# Rules without a ledger


@pytest.mark.parametrize(
    "rule",
    [
        {"max_epsilon": 1.0}, {"delta": 1e-5}, {"min_noise_multiplier": 0.5},
        {"sampling": "fixed"}, {"unit": "replace-one"}, {"commit_steps": 5},
        {"require_secure_noise": False},
    ],
)  # fmt: skip
def test_a_rule_without_a_ledger_is_refused(rule: dict[str, float | str]) -> None:
    with pytest.raises(RefusedError, match=r"has the rule .* and no state-dir"):
        make(node(None, **rule))
    silent = PrivacyPlan(1.0, 0.0, 4, 20)
    with pytest.raises(RefusedError):
        make(node(None, **rule), plan=silent)


def test_a_simulation_without_rules_needs_no_ledger() -> None:
    assert not make(node(partition_id=1, num_partitions=2)).budget.protects_data
    assert not make(node(data="x"), node_keys=("data",)).budget.protects_data


def test_the_unit_of_a_node_is_that_of_its_ledger(tmp_path: Path) -> None:
    added = PrivacyPlan(1.0, 1.0, 4, 20, "poisson", "add-remove")
    make(node(tmp_path, unit="add-remove"), plan=added).fit([*THETA], RUN)
    assert ledger(tmp_path).unit == "add-remove"
    with pytest.raises(RefusedError, match="unit"):
        make(node(tmp_path, unit="add-remove"))
    with pytest.raises(RefusedError, match="ledger of this node cannot be used"):
        make(node(tmp_path, unit="replace-one"), plan=added)
    with pytest.raises(RefusedError, match="unit"):
        make(node(tmp_path), plan=added, evaluation=PrivateEvaluation(20.0))
    # Without the key it is the ledger's own.
    with pytest.raises(RefusedError, match="unit of this node is add-remove"):
        make(node(tmp_path))


@pytest.mark.parametrize("rule", ["max-clip-norm", "state-dir", "commit-steps"])
def test_no_app_claims_a_key_of_the_owner(tmp_path: Path, rule: str) -> None:
    context = node(tmp_path, **{rule.replace("-", "_"): 0.5})
    with pytest.raises(RefusedError, match=f"node_keys has {rule}"):
        make(context, node_keys=[rule])


# What is raised after the charge


class RustPanic(BaseException):
    """As ``pyo3_runtime.PanicException``: no `Exception`."""


@pytest.mark.parametrize(
    "error", [SystemExit(SECRET), RustPanic(SECRET), GeneratorExit(SECRET)]
)
def test_whatever_ends_a_step_is_a_refusal_without_its_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(*arguments: object) -> None:
        raise error

    for name in ("step.private_vector", "answer_evaluation.private_counts"):
        monkeypatch.setattr(f"flwr_safedshb.algorithm.{name}", fail)
    client = make(node(tmp_path), evaluation=PrivateEvaluation(20.0))
    with pytest.raises(RefusedError) as caught:
        client.fit([*THETA], RUN)
    assert str(SECRET) not in str(caught.value)
    assert caught.value.__cause__ is caught.value.__context__ is None
    asked: dict[str, Scalar] = {
        "private-evaluation": 1,
        "max-loss": 4.0,
        "session": "run",
    }
    app = client_app(lambda context: client)
    (reply,) = sent(app, "evaluate", asked)
    assert str(SECRET) not in str(reply.error.reason)
    assert "the step failed" in str(reply.error.reason)


@pytest.mark.parametrize("kind", [InProcessGrid, BatchedGrid])
def test_a_client_whose_making_ends_the_process_is_a_refusal(
    kind: type[InProcessGrid],
) -> None:
    def client_fn(context: Context) -> SafeDSHBClient:
        raise RustPanic(SECRET)

    (reply,) = sent(client_app(client_fn), "train", RUN, kind)
    assert "could not be made" in str(reply.error.reason)
    assert str(SECRET) not in str(reply.error.reason)


def test_a_batched_step_that_ends_the_process_is_a_refusal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*arguments: object) -> None:
        raise RustPanic(SECRET)

    monkeypatch.setattr("flwr_safedshb.simulation.batched.private_vectors", fail)
    (reply,) = sent(client_app(make), "train", RUN, BatchedGrid)
    assert "the step failed" in str(reply.error.reason)
    assert str(SECRET) not in str(reply.error.reason)


def test_the_owners_own_stop_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    # Flower ends the process by a thread, if nothing else does.
    module = import_module("flwr.supercore.exit.exit")
    monkeypatch.setattr(module.threading, "Thread", MagicMock())
    with pytest.raises(KeyboardInterrupt) as interrupted:
        signal.default_int_handler(signal.SIGINT, None)
    with pytest.raises(KeyboardInterrupt):
        to_refusal(interrupted.value)
    assert isinstance(to_refusal(KeyboardInterrupt()), RefusedError)
    quiet = partial(flwr_exit, emit_telemetry=False)
    handlers = import_module("flwr.supercore.exit.signal_handler")
    monkeypatch.setattr(handlers, "flwr_exit", quiet)
    monkeypatch.setattr(handlers, "add_exit_handler", MagicMock())
    before = {n: signal.getsignal(n) for n in handlers.SIGNAL_TO_EXIT_CODE}
    try:
        register_signal_handlers(EventType.PING)
        with pytest.raises(SystemExit) as stopped:
            signal.raise_signal(signal.SIGTERM)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    with pytest.raises(SystemExit):
        to_refusal(stopped.value)
    with pytest.raises(SystemExit) as own:  # as data might make an app do
        quiet(ExitCode.GRACEFUL_EXIT_SIGTERM)
    assert isinstance(to_refusal(own.value), RefusedError)
    with pytest.raises(SystemExit) as other:
        raise SystemExit(1)
    assert isinstance(to_refusal(other.value), RefusedError)


# Messages that cannot be used


@pytest.mark.parametrize("dtype", ["c8", "c16", "U3", "O", "M8[s]", ">f4"])
def test_weights_that_are_no_floats_cost_nothing(tmp_path: Path, dtype: str) -> None:
    theta = [THETA[0].astype(dtype), THETA[1]]
    client = make(node(tmp_path), evaluation=PrivateEvaluation(20.0))
    with pytest.raises(RefusedError, match="has an array of dtype"):
        client.fit(theta, RUN)
    assert ledger(tmp_path).charges() == []


@pytest.mark.parametrize("step", [2**63, 2**70, 10**400])
def test_a_step_beyond_all_runs_costs_nothing(tmp_path: Path, step: int) -> None:
    with pytest.raises(RefusedError, match="must have step"):
        make(node(tmp_path)).fit([*THETA], {**RUN, "step": step})
    assert ledger(tmp_path).charges() == []


# Plain evaluation


class Telling(SafeDSHBClient):
    def evaluate(self, parameters, config):  # type: ignore[no-untyped-def]
        return 0.5, 20, {"accuracy": 0.75}


def telling(context: Context) -> SafeDSHBClient:
    return Telling(
        torch.nn.Linear(3, 1), lambda o, t: (o.squeeze(1) - t) ** 2, data(), PLAN,
        context, randomness=SeededRandomness(3),
    )  # fmt: skip


def on(context: Context) -> Callable[[Context], SafeDSHBClient]:
    def client_fn(given: Context) -> SafeDSHBClient:
        given.node_config.update(context.node_config)
        return telling(given)

    return client_fn


def sent(
    app: object,
    kind: str,
    config: dict[str, Scalar],
    grid: type[InProcessGrid] = InProcessGrid,
) -> list[Message]:
    made = grid(app, 1)  # type: ignore[arg-type]
    content = RecordDict(
        {"arrays": ArrayRecord([*THETA]), "config": ConfigRecord({**config})}
    )
    return list(
        made.send_and_receive([Message(content, n, kind) for n in made.get_node_ids()])
    )


def test_a_node_with_a_ledger_refuses_to_evaluate_without_noise(
    tmp_path: Path,
) -> None:
    app = client_app(on(node(tmp_path)))
    (reply,) = sent(app, "evaluate", {})
    assert "outside of it" in str(reply.error.reason)
    with pytest.raises(RefusedError, match="allow-plain-evaluation=true"):
        telling(node(tmp_path)).to_client().numpy_client.evaluate([], {})  # type: ignore[attr-defined]


@pytest.mark.parametrize("context", [node(), None])
def test_it_is_done_where_its_owner_allows_it(
    tmp_path: Path, context: Context | None
) -> None:
    allowed = context or node(tmp_path, allow_plain_evaluation=True)
    (reply,) = sent(client_app(on(allowed)), "evaluate", {})
    assert reply.content["metrics"]["accuracy"] == 0.75


def test_an_evaluation_of_the_app_is_refused_as_well(tmp_path: Path) -> None:
    app = client_app(telling)

    @app.evaluate()
    def tell(message: Message, context: Context) -> Message:
        return Message(RecordDict(), reply_to=message)

    def asked(context: Context) -> Message:
        content = RecordDict({"config": ConfigRecord({})})
        return app(Message(content, 11, "evaluate"), context)

    with pytest.raises(RefusedError, match="outside of it"):
        asked(node(tmp_path))
    # Rules that nothing enforces here, and one that is misspelt, are no permission.
    for rules in (
        {"max_epsilon": 1.0},
        {"state_dri": "x"},
        {"min_noise_multiplier": 1},
    ):
        with pytest.raises(RefusedError, match="outside of it"):
            asked(node(None, **rules))
    assert not asked(node()).has_error()
    assert not asked(node(tmp_path, allow_plain_evaluation=True)).has_error()
