"""Nodes that fail are spared for, and cost the others little, whatever they choose."""

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.server import ServerAppComponents, ServerConfig
from flwr.serverapp import ServerApp

from flwr_safedshb import ClassicStrategy, SafeDSHB, load_checkpoint
from flwr_safedshb.aggregation import SMEA
from flwr_safedshb.algorithm.attendance import Attendance
from flwr_safedshb.algorithm.budget import LEDGER_NAME
from flwr_safedshb.algorithm.progress import NothingTrainedError
from flwr_safedshb.algorithm.refusal import RefusedError
from flwr_safedshb.app import client_app
from flwr_safedshb.client import SafeDSHBClient
from flwr_safedshb.privacy.ledger.ledger import Ledger
from flwr_safedshb.simulation.in_process import InProcessGrid
from tests.clients import THETA, make
from tests.federation import federation, flat, model
from tests.replies import Layers, record

ROUNDS = 12


def refused(context: Context) -> SafeDSHBClient:
    """Make a client with a ledger; node 0 refuses every step."""
    if context.node_config["partition-id"] == 0:
        raise RefusedError("this node's policy refuses")
    return make(context)


def with_ledgers(path: Path, num_nodes: int, app: ClientApp) -> InProcessGrid:
    """Return nodes that keep real ledgers, each in a folder of its own."""
    return InProcessGrid(
        app,
        num_nodes,
        node_config=lambda i: {
            "state-dir": str(path / f"node{i}"),
            "max-epsilon": 500.0,
            "delta": 1e-5,
            "require-secure-noise": False,
        },
    )


def charges(path: Path, num_nodes: int) -> list[int]:
    """Return how many steps each honest node was charged for."""
    ledgers = [Ledger(path / f"node{i}" / LEDGER_NAME) for i in range(1, num_nodes)]
    return [sum(charge.steps for charge in ledger.charges()) for ledger in ledgers]


def test_a_node_that_always_refuses_costs_the_others_one_step_at_n_3(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    grid = with_ledgers(tmp_path, 3, client_app(refused))
    checkpoint = tmp_path / "run.npz"
    strategy = SafeDSHB(SMEA(), 1, checkpoint=checkpoint)
    caplog.set_level(logging.WARNING, "flwr")
    with pytest.raises(
        NothingTrainedError, match="all 12 rounds were skipped"
    ) as raised:
        strategy.start(grid, ArrayRecord([*THETA]), ROUNDS)
    assert charges(tmp_path, 3) == [1, 1]
    assert "12 of 12 rounds were skipped" in caplog.messages[-1]
    metrics = raised.value.metrics
    assert [m["skipped-rounds"] for m in metrics.values()] == [*range(1, ROUNDS + 1)]
    # It alone is asked, in rounds 2, 4 and 8.
    asked = [r for r, m in metrics.items() if m["excluded"]]
    assert asked == [1, 2, 4, 8]
    assert metrics[ROUNDS]["failing-nodes"] == [next(iter(grid.get_node_ids()))]
    assert load_checkpoint(checkpoint).step == ROUNDS


def test_a_node_that_always_refuses_does_not_stop_four(tmp_path: Path) -> None:
    grid = with_ledgers(tmp_path, 4, client_app(refused))
    result = SafeDSHB(SMEA(), 1).start(grid, ArrayRecord([*THETA]), ROUNDS)
    assert result.skipped_rounds == []
    assert charges(tmp_path, 4) == [ROUNDS] * 3
    metrics = result.train_metrics_clientapp
    assert [r for r, m in metrics.items() if m["excluded"]] == [1, 2, 4, 8]


@pytest.mark.parametrize(("num_nodes", "trained"), [(3, False), (4, True)])
def test_an_app_of_the_older_kind_is_spared_alike(
    tmp_path: Path, num_nodes: int, trained: bool
) -> None:
    def client_fn(context: Context) -> NumPyClient:
        return refused(context)

    app = ClientApp(client_fn=lambda context: client_fn(context).to_client())
    grid = with_ledgers(tmp_path, num_nodes, app)
    strategy = SafeDSHB(SMEA(), 1, min_available_nodes=num_nodes)
    classic = ClassicStrategy(strategy, ArrayRecord([*THETA]), num_rounds=ROUNDS)
    server = ServerApp(
        server_fn=lambda context: ServerAppComponents(
            strategy=classic, config=ServerConfig(num_rounds=ROUNDS)
        )
    )
    if trained:
        server(grid, Context(1, 1, {}, RecordDict(), {}))
    else:
        with pytest.raises(NothingTrainedError):
            server(grid, Context(1, 1, {}, RecordDict(), {}))
    assert charges(tmp_path, num_nodes) == [ROUNDS if trained else 1] * (num_nodes - 1)


def asked_steps(
    fails: Callable[[int, int, int], bool], num_nodes: int, f: int, rounds: int
) -> tuple[dict[int, set[int]], list[int]]:
    """Train beside nodes that fail; return who was asked in each step, and skips.

    `fails` takes the node, the step and how many others were asked with it.
    """
    asked: dict[int, set[int]] = {}

    def spoil(partition: int, step: int, layers: Layers) -> RecordDict:
        asked.setdefault(step, set()).add(partition)
        if fails(partition, step, len(asked[step]) - 1):
            raise RuntimeError("fails")
        return record(list(layers))

    result = SafeDSHB(SMEA(), f).start(federation(num_nodes, spoil), model(), rounds)
    return asked, result.skipped_rounds


def test_a_node_that_recovers_is_counted_on_again() -> None:
    asked, skipped = asked_steps(lambda node, step, _: node == 2 and step < 3, 3, 1, 12)
    # It failed in rounds 1 and 2, was left out of round 3, and answered in round 4.
    everybody = {step: {0, 1, 2} for step in (0, *range(4, 12))}
    assert asked == everybody | {1: {2}, 3: {2}}
    assert skipped == [1, 2, 3, 4]


def test_one_that_fails_and_answers_in_turn_wastes_few_steps_of_the_others() -> None:
    """It answers when it is asked alone, and fails in the round of all."""
    rounds = 200
    asked, skipped = asked_steps(
        # Asked last, so it knows whether others were asked.
        lambda node, step, others: node == 2 and others > 0 and step > 0,
        3,
        1,
        rounds,
    )
    wasted = [
        s for s, nodes in asked.items() if nodes == {0, 1, 2} and s + 1 in skipped
    ]
    assert 3 <= len(wasted) <= 9
    assert asked[0] == {0, 1, 2}
    assert 1 not in skipped


def test_one_that_behaves_to_be_forgiven_spoils_at_most_one_round_in_nine() -> None:
    rounds, state = 300, {"answers": 0}

    def fails(node: int, step: int, others: int) -> bool:
        if node != 2:
            return False
        fails = others > 0 and state["answers"] >= 8
        state["answers"] = 0 if fails else state["answers"] + 1
        return fails

    asked, skipped = asked_steps(fails, 3, 1, rounds)
    wasted = [s for s, nodes in asked.items() if len(nodes) == 3 and s + 1 in skipped]
    assert rounds / 12 < len(wasted) <= rounds / 9 + 1


def test_failures_give_no_place_that_chance_would_not() -> None:
    """With partial participation a returning node is drawn like any other."""
    participation = SafeDSHB(SMEA(), 2, fraction_train=0.5).settings.participation
    rng = np.random.default_rng(0)
    usable, returning = [*range(36)], [*range(36, 40)]
    drawn = [
        participation._draw_nodes(usable, returning, 40, lambda: rng, 1, 400).nodes
        for _ in range(400)
    ]
    assert {len(nodes) for nodes in drawn} == {20}
    # Half of the draws, with a deviation of 10.
    for node in (0, *returning):
        assert 150 < sum(node in nodes for nodes in drawn) < 250


def test_drawn_nodes_that_answer_are_spared_where_too_few_of_them_are_drawn() -> None:
    participation = SafeDSHB(SMEA(), 2, fraction_train=0.5).settings.participation
    rng = np.random.default_rng(0)
    usable, returning = [*range(7)], [*range(7, 20)]
    spared = 0
    for _ in range(50):
        cohort = participation._draw_nodes(usable, returning, 20, lambda: rng, 1, None)
        answering = sum(node in usable for node in cohort.nodes)
        if cohort.complete:
            assert len(cohort.nodes) == 10
            assert answering > 2 * cohort.num_malicious
        else:
            assert answering == 0
            assert 0 < len(cohort.nodes) < 10
            spared += 1
    assert 0 < spared < 50


def test_who_keeps_failing_is_seldom_drawn() -> None:
    def spoil(partition: int, step: int, layers: Layers) -> RecordDict:
        if partition >= 36:
            raise RuntimeError("fails")
        return record(list(layers))

    strategy = SafeDSHB(SMEA(), 2, fraction_train=0.5, seed=1)
    result = strategy.start(federation(40, spoil), model(), 30)
    assert result.skipped_rounds == []
    metrics = result.train_metrics_clientapp.values()
    assert {m["replies"] + m["excluded"] for m in metrics} == {20}  # type: ignore[operator]
    # Without that it would be sixty of their places in thirty rounds.
    assert 4 <= sum(m["excluded"] for m in metrics) <= 20  # type: ignore[misc]


def test_a_resumed_run_asks_who_failed_first_and_spares_the_others(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run.npz"
    asked: dict[int, set[int]] = {}
    broken = True

    def spoil(partition: int, step: int, layers: Layers) -> RecordDict:
        asked.setdefault(step, set()).add(partition)
        if partition == 2 and step and broken:
            raise RuntimeError("fails")
        return record(list(layers))

    def run(rounds: int) -> list[int]:
        strategy = SafeDSHB(SMEA(), 1, seed=2, checkpoint=path)
        result = strategy.start(federation(3, spoil), model(), rounds)
        return result.skipped_rounds

    assert run(7) == [2, 3, 4, 5, 6, 7]
    broken = False
    assert run(9) == [2, 3, 4, 5, 6, 7, 8]
    # Round 10 would have been the next for it without the new start.
    assert (asked[7], asked[8]) == ({2}, {0, 1, 2})


def test_all_who_were_away_come_back_together() -> None:
    """Where all failed, all are asked in the next round, and none is charged twice."""
    asked, skipped = asked_steps(lambda node, step, _: step == 1, 5, 2, 4)
    assert skipped == [2]
    assert all(nodes == set(range(5)) for nodes in asked.values())


def test_an_evaluation_that_too_few_can_answer_asks_nobody() -> None:
    evaluated: list[int] = []
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        if context.node_config["partition-id"] == 0:
            config = next(iter(message.content.config_records.values()))
            if config["step"]:
                raise RuntimeError("fails")
        return Message(record([a.numpy() for a in model().values()]), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        evaluated.append(int(context.node_config["partition-id"]))
        raise RuntimeError("not asked for anything here")

    strategy = SafeDSHB(SMEA(), 1, evaluate_every=2, foreign_clients=True)
    strategy.start(InProcessGrid(app, 3), model(), 4)
    assert evaluated == []


def test_what_metrics_say_is_read_back() -> None:
    attendance = Attendance().after_round(1, [5, 7, 9], {5, 9})
    attendance = attendance.after_round(2, [5, 7, 9], {9})
    assert Attendance.from_metrics(attendance.to_metrics()) == attendance
    assert Attendance().to_metrics() == {}
    assert Attendance.from_metrics({}) == Attendance()
    assert attendance.split([5, 7, 9], 3) == ([5, 7], [])
    assert attendance.split([5, 7, 9], 4) == ([5, 7], [9])


def test_the_result_says_how_many_rounds_were_skipped() -> None:
    def spoil(partition: int, step: int, layers: Layers) -> RecordDict:
        if step == 1:
            raise RuntimeError("fails")
        return record(list(layers))

    result = SafeDSHB(SMEA(), 1).start(federation(3, spoil), model(), 3)
    assert result.skipped_rounds == [2]
    assert "1 of 3 rounds skipped" in repr(result)
    assert result.train_metrics_clientapp[3]["skipped-rounds"] == 1
    assert flat(result.arrays).any()
