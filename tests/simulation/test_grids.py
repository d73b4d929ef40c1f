"""Any Flower strategy runs on both grids; same seed, same bytes."""

import threading
from collections.abc import Callable
from typing import cast

import numpy as np
import pytest
from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MetricRecord,
    RecordDict,
    UserConfig,
)
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg, FedMedian, Krum
from numpy.typing import NDArray

from flwr_safedshb.aggregation import SMEA
from flwr_safedshb.algorithm.wire import Arrays
from flwr_safedshb.attacks import ALIE, FOE, Attack, LabelFlip, Strongest
from flwr_safedshb.attacks.base import Aggregate, Floats
from flwr_safedshb.simulation.adversarial import AdversarialGrid, AttackFunction
from flwr_safedshb.simulation.in_process import InProcessGrid

Train = Callable[[Message, Context], Message]


def reply(message: Message, layers: list[NDArray[np.floating]]) -> Message:
    arrays = ArrayRecord(cast(list[NDArray[np.generic]], layers))
    metrics = MetricRecord({"num-examples": 1})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


def partition_model(message: Message, context: Context) -> Message:
    """Reply with the model plus the partition id, and count rounds in the state."""
    model = next(iter(message.content.array_records.values())).to_numpy_ndarrays()
    rounds = context.state.config_records.get("rounds", ConfigRecord({"count": 0}))
    count = cast(int, rounds["count"]) + 1
    context.state["rounds"] = ConfigRecord({"count": count})
    return reply(message, [m + int(context.node_config["partition-id"]) for m in model])


def make_app(train: Train) -> ClientApp:
    app = ClientApp()
    app.train()(train)
    return app


def instruct(grid: Grid, node_ids: list[int] | None = None) -> list[Message]:
    content = RecordDict(
        {
            "arrays": ArrayRecord([np.zeros(3, np.float32), np.zeros(1, np.float32)]),
            "config": ConfigRecord({"values": [1, 2]}),
        }
    )
    nodes = list(grid.get_node_ids()) if node_ids is None else node_ids
    return [Message(content, dst_node_id=node, message_type="train") for node in nodes]


def layers_of(message: Message) -> list[NDArray[np.floating]]:
    record = next(iter(message.content.array_records.values()))
    return record.to_numpy_ndarrays()


def test_nodes_have_ids_from_the_seed_and_partitions_in_order() -> None:
    first, again, other = (
        InProcessGrid(make_app(partition_model), 5, seed=seed) for seed in (3, 3, 4)
    )
    assert first.get_node_ids() == again.get_node_ids() != other.get_node_ids()
    assert first.run.run_id == again.run.run_id != other.run.run_id
    assert first.get_node_ids() == sorted(set(first.get_node_ids()))
    replies = first.send_and_receive(instruct(first))
    assert [layers_of(r)[0][0] for r in replies] == [0, 1, 2, 3, 4]
    assert [r.metadata.src_node_id for r in replies] == first.get_node_ids()


def test_configs_reach_the_nodes_and_the_server_app() -> None:
    seen: list[tuple[UserConfig, UserConfig]] = []

    def look(message: Message, context: Context) -> Message:
        seen.append((context.node_config, context.run_config))
        return reply(message, [])

    grid = InProcessGrid(
        make_app(look), 2, {"lr": 0.5}, node_config=lambda i: {"state-dir": f"node{i}"}
    )
    grid.send_and_receive(instruct(grid))
    assert seen == [
        (
            {"partition-id": i, "num-partitions": 2, "state-dir": f"node{i}"},
            {"lr": 0.5},
        )
        for i in range(2)
    ]
    server = ServerApp()
    called: list[Context] = []

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        called.append(context)

    server(grid, grid.server_context())
    assert called[0].run_config == {"lr": 0.5}
    assert called[0].run_id == grid.run.run_id


def test_state_lasts_and_is_rolled_back_when_the_app_raises() -> None:
    counts: list[int] = []

    def fail_in_second(message: Message, context: Context) -> Message:
        answer = partition_model(message, context)
        counts.append(cast(int, context.state.config_records["rounds"]["count"]))
        if len(counts) == 2:
            raise ZeroDivisionError("secret")
        return answer

    grid = InProcessGrid(make_app(fail_in_second), 1)
    replies = [grid.send_and_receive(instruct(grid))[0] for _ in range(3)]
    assert counts == [1, 2, 2]
    assert [r.has_error() for r in replies] == [False, True, False]
    assert replies[1].error.code == 2
    assert "ZeroDivisionError" in str(replies[1].error.reason)
    assert replies[1].metadata.src_node_id == grid.get_node_ids()[0]


def test_what_a_node_changes_in_a_message_stays_with_it() -> None:
    kept: list[ArrayRecord] = []

    def vandal(message: Message, context: Context) -> Message:
        arrays = message.content.array_records["arrays"]
        values = cast(list[int], message.content.config_records["config"]["values"])
        answer = reply(message, [np.array([len(arrays), sum(values)])])
        arrays["0"].data = b""
        del arrays["1"]
        values.append(100)
        kept.append(answer.content.array_records["arrays"])
        return answer

    grid = InProcessGrid(make_app(vandal), 3)
    messages = instruct(grid)
    replies = grid.send_and_receive(messages)
    assert [list(layers_of(r)[0]) for r in replies] == [[2, 3]] * 3
    assert np.array_equal(messages[0].content.array_records["arrays"]["1"].numpy(), [0])
    kept[0].clear()
    assert len(layers_of(replies[0])) == 1


def test_what_is_no_reply_becomes_an_error_reply() -> None:
    messages: list[Message] = []

    def confused(message: Message, context: Context) -> Message:
        messages.append(message)
        if context.node_config["partition-id"] == 0:
            return cast(Message, "done")
        return reply(messages[0], [])

    grid = InProcessGrid(make_app(confused), 2)
    assert all(r.has_error() for r in grid.send_and_receive(instruct(grid)))
    (missing,) = grid.send_and_receive(instruct(grid, [17]))
    assert missing.error.code == 5


def test_push_then_pull_hands_out_each_reply_once() -> None:
    grid = InProcessGrid(make_app(partition_model), 3)
    ids = grid.push_messages(instruct(grid))
    assert len(set(ids)) == 3
    pulled = grid.pull_messages([ids[2], ids[0]])
    assert [layers_of(r)[0][0] for r in pulled] == [2, 0]
    assert [r.metadata.reply_to_message_id for r in pulled] == [ids[2], ids[0]]
    assert len(grid.pull_messages(ids)) == 1
    assert grid.pull_messages(ids) == []


def test_two_grids_take_turns() -> None:
    grids = [InProcessGrid(make_app(partition_model), 2, seed=seed) for seed in (0, 1)]
    for grid in grids:
        (first, _) = grid.send_and_receive(instruct(grid))
        assert first.metadata.run_id == grid.run.run_id


def test_a_daemon_that_a_failed_run_left_takes_no_message_of_the_next() -> None:
    """Flower's older server leaves one that asks for nodes again and again."""
    first, second = (InProcessGrid(ClientApp(), 1, seed=seed) for seed in (1, 2))
    (node,) = second.get_node_ids()
    asking = threading.Thread(target=first.get_node_ids, daemon=True)
    asking.start()
    asking.join()
    message = Message(RecordDict(), node, "train")
    assert message.metadata.run_id == second.run.run_id


def test_refuses_no_nodes() -> None:
    with pytest.raises(ValueError, match="num_nodes=0"):
        InProcessGrid(make_app(partition_model), 0)


def negated_mean(
    honest: Floats,
    f: int,
    rng: np.random.Generator,
    aggregate: Aggregate,
) -> NDArray[np.floating]:
    return np.tile(-100 * aggregate(honest, 0), (f, 1))


def test_adversaries_answer_after_the_honest_nodes_and_look_like_them() -> None:
    called: list[int] = []

    def count(message: Message, context: Context) -> Message:
        called.append(int(context.node_config["partition-id"]))
        return partition_model(message, context)

    inner = InProcessGrid(make_app(count), 5)
    grid = AdversarialGrid(inner, negated_mean, 2)
    assert grid.malicious_node_ids == inner.get_node_ids()[3:]
    replies = grid.send_and_receive(reversed(instruct(grid)))
    assert sorted(called) == [0, 1, 2]
    by_node = {r.metadata.src_node_id: r for r in replies}
    values = [[v[0] for v in layers_of(by_node[i])] for i in inner.get_node_ids()]
    assert values == [[0, 0], [1, 1], [2, 2], [-100, -100], [-100, -100]]
    hostile = by_node[grid.malicious_node_ids[0]]
    assert hostile.content.metric_records["metrics"]["num-examples"] == 1
    assert [layer.dtype for layer in layers_of(hostile)] == [np.float32, np.float32]


def test_adversaries_answer_pulls_when_all_honest_replies_are_there() -> None:
    grid = AdversarialGrid(InProcessGrid(make_app(partition_model), 3), negated_mean, 1)
    ids = grid.push_messages(instruct(grid))
    honest = [i for i in ids if not i.startswith("intercepted")]
    assert len(honest) == 2
    assert len(grid.pull_messages([*ids[2:], honest[0]])) == 1
    rest = grid.pull_messages(ids)
    assert {r.metadata.reply_to_message_id for r in rest} == {ids[2], honest[1]}
    assert grid.pull_messages(ids) == []


def test_ids_come_in_the_order_of_their_messages() -> None:
    inner = InProcessGrid(make_app(partition_model), 5)
    grid = AdversarialGrid(inner, negated_mean, 2)
    messages = instruct(grid)[::-1]
    ids = grid.push_messages(messages)
    assert [m.metadata.message_id for m in messages] == ids


def test_adversaries_do_not_wait_for_a_reply_that_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inner = InProcessGrid(make_app(partition_model), 3)
    grid = AdversarialGrid(inner, negated_mean, 1)
    first, second, hostile = grid.push_messages(instruct(grid))
    with monkeypatch.context() as patch:
        patch.setattr(inner, "pull_messages", lambda ids: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            grid.pull_messages([first])
    assert len(grid.pull_messages([second])) == 1
    assert len(grid.pull_messages([hostile])) == 1


@pytest.mark.parametrize("attack", [negated_mean, LabelFlip()])
def test_adversaries_answer_pulls_one_by_one(attack: AttackFunction) -> None:
    grid = AdversarialGrid(InProcessGrid(make_app(partition_model), 5), attack, 2)
    for message_id in grid.push_messages(instruct(grid)):
        (reply,) = grid.pull_messages([message_id])
        assert reply.metadata.reply_to_message_id == message_id


def test_other_messages_pass_and_adversaries_fail_where_all_others_do() -> None:
    """An adversary that stayed silent would let the round wait for its timeout."""

    def silent(message: Message, context: Context) -> Message:
        raise RuntimeError

    app = make_app(silent)
    app.evaluate()(lambda message, context: reply(message, []))
    grid = AdversarialGrid(InProcessGrid(app, 3), negated_mean, 1)
    assert [r.has_error() for r in grid.send_and_receive(instruct(grid))] == [True] * 3
    ids = grid.push_messages(instruct(grid))
    pulled = [reply for name in ids for reply in grid.pull_messages([name])]
    assert [r.metadata.reply_to_message_id for r in pulled] == list(ids)
    questions = instruct(grid)
    for question in questions:
        question.metadata.message_type = "evaluate"
    assert len(grid.send_and_receive(questions)) == 3


def test_vectors_that_overflow_or_are_no_numbers_are_sent_as_they_are() -> None:
    def wild(
        honest: Floats,
        f: int,
        rng: np.random.Generator,
        aggregate: Aggregate,
    ) -> NDArray[np.floating]:
        return np.full((f, honest.shape[1]), [np.nan, np.inf, 1e300, -1.0])

    grid = AdversarialGrid(InProcessGrid(make_app(partition_model), 3), wild, 1)
    hostile = grid.send_and_receive(instruct(grid))[-1]
    expected = np.array([np.nan, np.inf, np.inf], np.float32)
    assert np.array_equal(layers_of(hostile)[0], expected, equal_nan=True)


@pytest.mark.parametrize("strategy", [FedAvg, FedMedian, Krum])
def test_flower_strategies_run_on_both_grids(strategy: type[FedAvg]) -> None:
    """FedAvg is ruined by the attack; the others are not."""

    def train(grid: Grid) -> float:
        flower = strategy(fraction_evaluate=0.0, min_train_nodes=7)
        if isinstance(flower, Krum):
            flower.num_malicious_nodes = 2
        start = ArrayRecord([np.zeros(3, np.float32)])
        result = flower.start(grid, start, num_rounds=2)
        return float(result.arrays.to_numpy_ndarrays()[0][0])

    honest = train(InProcessGrid(make_app(partition_model), 7))
    inner = InProcessGrid(make_app(partition_model), 7)
    attacked = train(AdversarialGrid(inner, negated_mean, 2))
    if strategy is FedAvg:
        assert honest == pytest.approx(6.0)
        assert abs(attacked) > 100
    else:
        assert 0 <= honest <= 12
        assert 0 <= attacked <= 8


def test_an_error_reply_of_the_app_is_delivered() -> None:
    app = make_app(lambda message, _: Message(Error(7, "no"), reply_to=message))
    grid = InProcessGrid(app, 1)
    (answer,) = grid.send_and_receive(instruct(grid))
    assert answer.error.reason == "no"


def test_attacks_on_data_let_every_message_pass() -> None:
    inner = InProcessGrid(make_app(partition_model), 3)
    grid = AdversarialGrid(inner, LabelFlip(), 1)
    replies = grid.send_and_receive(instruct(grid))
    assert [layers_of(r)[0][0] for r in replies] == [0, 1, 2]


def test_an_attack_of_the_package_and_a_rule_for_it() -> None:
    grid = AdversarialGrid(
        InProcessGrid(make_app(partition_model), 7), ALIE(), 2, SMEA()
    )
    replies = grid.send_and_receive(instruct(grid))
    vectors = np.array([layers_of(r)[0] for r in replies])
    assert np.array_equal(vectors[5], vectors[6])
    assert not np.array_equal(vectors[5], vectors[:5].mean(axis=0))


def test_adversaries_learn_the_gradient_at_the_model_that_was_sent() -> None:
    asked: list[list[float]] = []

    def gradient(model: Arrays) -> NDArray[np.float64]:
        asked.append([float(layer.flat[0]) for layer in model])
        return np.concatenate([layer.reshape(-1) for layer in model], dtype=np.float64)

    def replies(attack: Attack) -> list[Message]:
        inner = InProcessGrid(make_app(partition_model), 7)
        grid = AdversarialGrid(inner, attack, 2, SMEA(), gradient=gradient)
        return grid.send_and_receive(instruct(grid))

    replies(ALIE())
    assert asked == []  # it has no use for one
    replies(Strongest())
    assert asked == [[0.0, 0.0]]


def test_adversaries_who_are_not_told_the_rule_say_that_they_assume_the_mean(
    caplog: pytest.LogCaptureFixture,
) -> None:
    inner = InProcessGrid(make_app(partition_model), 5)
    for settings, warnings in (((), 1), ((SMEA(),), 0)):
        caplog.clear()
        grid = AdversarialGrid(inner, FOE(), 2, *settings)
        for _ in range(2):
            grid.send_and_receive(instruct(grid))
        said = [m for m in caplog.messages if "has no aggregate=" in m]
        assert len(said) == warnings
        assert all("aggregate=SMEA()" in m for m in said)
