"""The strategy alone, against clients whose replies are known."""

import itertools
import math
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from numpy.typing import NDArray

from flwr_safedshb.aggregation import SMEA, Average, Filter, Krum, Median, Rule
from flwr_safedshb.aggregation.rule import Clients
from flwr_safedshb.algorithm.participation import bound_adversaries
from flwr_safedshb.algorithm.progress import NothingTrainedError
from flwr_safedshb.attacks import SignFlip
from flwr_safedshb.flower.grid import FaultTolerantGrid, WrappedGrid
from flwr_safedshb.simulation.adversarial import AdversarialGrid
from flwr_safedshb.simulation.in_process import InProcessGrid
from flwr_safedshb.strategy import SafeDSHB
from tests.federation import (
    Spoil,
    Tampered,
    federation,
    flat,
    layers,
    model,
    vectors,
)
from tests.replies import Layers, record, with_arrays


def close(found: NDArray[np.float64], expected: NDArray[np.float64]) -> bool:
    return bool(np.allclose(found, expected, rtol=1e-6, atol=1e-6))


@pytest.mark.parametrize("rule", [SMEA(), Average(), Median(), Krum()])
def test_steps_against_the_rule_itself(rule: Rule) -> None:
    def rate(step: int) -> float:
        return 1.0 / (1 + step)

    result = SafeDSHB(rule, 2, server_learning_rate=rate).start(
        federation(7), model(), num_rounds=4
    )
    theta = np.zeros(13)
    for step in range(4):
        theta -= rate(step) * np.asarray(rule(vectors(range(7), step), 2))
    assert close(flat(result.arrays), theta)
    assert list(result.arrays) == ["weight", "bias"]
    assert result.arrays["weight"].numpy().dtype == np.float32
    metrics = result.train_metrics_clientapp
    assert [metrics[i]["learning-rate"] for i in range(1, 5)] == [
        1,
        1 / 2,
        1 / 3,
        1 / 4,
    ]
    assert metrics[1]["replies"] == 7
    assert metrics[1]["skipped"] == 0


def test_messages_carry_model_step_and_momentum_of_the_step_before() -> None:
    seen: list[ConfigRecord] = []
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        seen.append(message.content.config_records["config"])
        assert message.metadata.group_id == str(len(seen))  # what nodes' logs show
        assert list(message.content.array_records) == ["arrays"]
        return Message(record(list(layers(0, 0))), reply_to=message)

    strategy = SafeDSHB(momentum=lambda step: 0.1 * step, checkpoint_every=2)
    start = ConfigRecord({"mine": "kept"})
    strategy.start(InProcessGrid(app, 1), model(), 4, train_config=start)
    assert [config["step"] for config in seen] == [0, 1, 2, 3]
    assert [config["server-round"] for config in seen] == [1, 2, 3, 4]
    assert [config["momentum"] for config in seen] == [0.0, 0.0, 0.1, 0.2]
    assert [config["anchor"] for config in seen] == [True, False, True, False]
    assert len({config["session"] for config in seen}) == 1
    assert seen[0]["mine"] == "kept"


def test_metrics_name_the_nodes_left_out_and_the_certificate() -> None:
    def spoil(partition: int, step: int, layers: Layers) -> RecordDict:
        far = 1e6 if partition in (1, 4) else 0.0
        return record([layer + np.float32(far) for layer in layers])

    grid = federation(7, spoil)
    result = SafeDSHB(SMEA(), 2).start(grid, model(), 1)
    metrics = result.train_metrics_clientapp[1]
    nodes = grid.get_node_ids()
    assert metrics["left-out"] == sorted([nodes[1], nodes[4]])
    assert metrics["kappa"] == pytest.approx(4 * 2 / 3)
    assert metrics["kappa-paper"] == pytest.approx(4 * 2 * 5 / 9)
    assert "kappa-spectral" not in metrics
    # In units of the variance, so n - f - 1 = 4 times as much of the eigenvalue.
    metrics = SafeDSHB(Krum(), 2).start(grid, model(), 1).train_metrics_clientapp[1]
    assert metrics["kappa"] == pytest.approx(10.0)
    assert metrics["kappa-spectral"] == pytest.approx(40.0)
    assert "kappa-paper" not in metrics
    # Run to its end, Filter leaves all weight to one node, and nothing is proven.
    rule = Filter(min_mass=0.0)
    metrics = SafeDSHB(rule, 2).start(grid, model(), 1).train_metrics_clientapp[1]
    assert "kappa" not in metrics
    metrics = SafeDSHB(SMEA(), 2).start(grid, model(), 1).train_metrics_clientapp[1]
    honest = vectors([0, 2, 3, 5, 6], 0)
    covariance = np.cov(honest.T, bias=True)
    top = float(np.linalg.eigvalsh(covariance)[-1])
    assert metrics["lambda-max"] == pytest.approx(top, rel=1e-5)
    assert close(flat(result.arrays), -honest.mean(axis=0))


def spoiled(bad: Mapping[int, Callable[[Layers], RecordDict]]) -> Spoil:
    def spoil(partition: int, step: int, layers: Layers) -> RecordDict:
        if partition in bad:
            return bad[partition](layers)
        return record(list(layers))

    return spoil


def not_finite(layers: Layers) -> RecordDict:
    return record([layer * np.nan for layer in layers])


def raises(layers: Layers) -> RecordDict:
    raise RuntimeError("broken")


class Careless(Rule):
    """A rule that would take any number of vectors."""

    def aggregate(
        self, clients: Clients, f: int
    ) -> tuple[list[NDArray[np.floating]], None]:
        return [np.asarray(sum(parts)) for parts in zip(*clients, strict=True)], None


def test_content_lowers_f_and_failure_does_not() -> None:
    # 7 nodes, f = 3: two proven and one failed leave n' = 4 and f' = 1.
    bad = {0: not_finite, 3: not_finite, 5: raises}
    result = SafeDSHB(Average(), 3).start(federation(7, spoiled(bad)), model(), 1)
    metrics = result.train_metrics_clientapp[1]
    assert metrics["replies"] == 4
    assert metrics["num-malicious-nodes"] == 1
    assert metrics["excluded"] == 3
    assert metrics["excluded-not-finite"] == 2
    assert metrics["excluded-error"] == 1
    assert metrics["skipped"] == 0
    assert close(flat(result.arrays), -vectors([1, 2, 4, 6], 0).mean(axis=0))


@pytest.mark.parametrize(("failed", "skipped"), [(2, 0), (3, 1), (6, 1)])
@pytest.mark.parametrize("rule", [SMEA(), Careless()])
def test_too_few_replies_skip_the_round(rule: Rule, failed: int, skipped: int) -> None:
    # 7 nodes, f = 2: n' must stay above 4.
    bad = dict.fromkeys(range(failed), raises)
    strategy = SafeDSHB(rule, 2)
    if skipped:
        with pytest.raises(NothingTrainedError) as raised:
            strategy.start(federation(7, spoiled(bad)), model(), 2)
        metrics = raised.value.metrics
    else:
        result = strategy.start(federation(7, spoiled(bad)), model(), 2)
        metrics = result.train_metrics_clientapp
        assert (flat(result.arrays) != 0).any()
    assert metrics[1]["skipped"] == metrics[2]["skipped"] == skipped
    assert metrics[2]["num-malicious-nodes"] == 2


def test_more_proofs_than_f_do_not_raise() -> None:
    bad = dict.fromkeys(range(6), not_finite)
    result = SafeDSHB(SMEA(), 2).start(federation(7, spoiled(bad)), model(), 1)
    assert result.train_metrics_clientapp[1]["num-malicious-nodes"] == 0
    assert close(flat(result.arrays), -vectors([6], 0)[0])


def test_a_rule_that_refuses_or_a_step_out_of_range_skips_the_round() -> None:
    class Refuses(Average):
        def aggregate(self, *_: object) -> tuple[list[NDArray[np.floating]], None]:
            raise ValueError("needs n > 2f + 2")

    with pytest.raises(NothingTrainedError):
        SafeDSHB(Refuses(), 1).start(federation(3), model(), 1)

    def huge(partition: int, step: int, layers: Layers) -> RecordDict:
        size = 1.0 if step == 0 else 3e38
        return record([np.full_like(layer, size) for layer in layers])

    result = SafeDSHB(server_learning_rate=10.0).start(federation(2, huge), model(), 2)
    assert result.skipped_rounds == [2]
    assert (flat(result.arrays) == -10).all()


def test_the_order_and_the_names_of_nodes_change_no_bit() -> None:
    def renamed(partition: int, step: int, layers: Layers) -> RecordDict:
        names = ("weight", "bias") if partition % 2 else ("0", "1")
        # The sum of these depends on its order: huge ones hide small ones, and cancel.
        scale = {0: 1e30, 1: -1e30}.get(partition, 1.0)
        scaled = [np.full_like(layer, scale) for layer in layers]
        named = dict(zip(names, map(Array, scaled), strict=True))
        return with_arrays(ArrayRecord(dict(reversed(named.items()))))

    models = []
    for seed in range(4):
        rng = np.random.default_rng(seed)

        def shuffle(
            replies: list[Message], rng: np.random.Generator = rng
        ) -> list[Message]:
            return [replies[i] for i in rng.permutation(len(replies))]

        class Shuffled(Tampered):
            def push_messages(self, messages: Iterable[Message]) -> list[str]:
                return list(self.grid.push_messages(self.tamper(list(messages))))

        grid = Shuffled(federation(7, renamed), shuffle)
        models.append(SafeDSHB(Average(), 2).start(grid, model(), 5).arrays)
    for other in models[1:]:
        assert [a.data for a in other.values()] == [a.data for a in models[0].values()]


def test_lost_duplicate_and_unasked_replies() -> None:
    strays: list[Message] = []

    def tamper(replies: list[Message]) -> list[Message]:
        """Lose the first reply of all, then repeat the second with every other one."""
        strays.extend(replies)
        return [] if replies[0] is strays[0] else [*replies, strays[1]]

    grid = Tampered(federation(5), tamper)
    result = SafeDSHB(SMEA(), 1).start(grid, model(), 1, timeout=0.0)
    metrics = result.train_metrics_clientapp[1]
    assert (metrics["replies"], metrics["excluded-missing"]) == (4, 1)
    assert metrics["num-malicious-nodes"] == 1


def test_an_unreadable_reply_costs_no_other() -> None:
    class Unreadable(WrappedGrid):
        count = 0

        def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
            replies = list(self.grid.pull_messages(message_ids))
            self.count += 1
            if self.count == 2:
                raise KeyError("dtype")
            return replies

    grid = Unreadable(federation(5))
    result = SafeDSHB(SMEA(), 1).start(grid, model(), 1)
    assert result.train_metrics_clientapp[1]["replies"] == 4
    assert result.train_metrics_clientapp[1]["excluded-missing"] == 1

    class Broken(WrappedGrid):
        def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
            raise ConnectionError("the network is down")

    with pytest.raises(ConnectionError):
        SafeDSHB(SMEA(), 1).start(Broken(federation(5)), model(), 1)


def test_waiting_for_replies_ends_at_the_timeout() -> None:
    class Slow(WrappedGrid):
        asked = 0

        def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
            self.asked += 1
            return [] if self.asked < 3 else list(self.grid.pull_messages(message_ids))

    grid = FaultTolerantGrid(Slow(federation(1)))
    content = RecordDict({"config": ConfigRecord({"step": 0})})

    def ask(timeout: float | None) -> int:
        (node,) = grid.get_node_ids()
        message = Message(content, dst_node_id=node, message_type="train")
        return len(grid.send_and_receive([message], timeout=timeout))

    assert ask(0.0) == 0
    assert ask(None) == 1


@pytest.mark.parametrize("seed", range(6))
def test_uniform_output_is_one_iterate_drawn_up_front(seed: int) -> None:
    def run(output: str, rounds: int) -> NDArray[np.float64]:
        strategy = SafeDSHB(output=output, seed=seed)  # type: ignore[arg-type]
        return flat(strategy.start(federation(3), model(), rounds).arrays)

    iterates = [run("last", t) for t in range(4)]
    chosen = run("uniform", 4)
    assert any(np.array_equal(chosen, iterate) for iterate in iterates)


def test_uniform_output_reaches_every_iterate() -> None:
    found = set()
    for seed in range(40):
        strategy = SafeDSHB(output="uniform", seed=seed)
        result = strategy.start(federation(1), model(), 3)
        found.add(flat(result.arrays).tobytes())
    assert len(found) == 3


def test_server_side_evaluation_sees_every_iterate() -> None:
    seen: list[tuple[int, bytes]] = []

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        seen.append((server_round, flat(arrays).tobytes()))
        return MetricRecord({"round": server_round})

    result = SafeDSHB().start(federation(3), model(), 3, evaluate_fn=evaluate)
    assert [number for number, _ in seen] == [0, 1, 2, 3]
    assert len({content for _, content in seen}) == 4
    assert result.evaluate_metrics_serverapp[3]["round"] == 3


def test_federated_evaluation_is_off_and_never_trusts_a_node() -> None:
    losses = {0: 0.5, 1: math.nan, 2: 1e30, 3: 0.4, 4: 0.6}
    app = federation(5)._app

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        partition = int(context.node_config["partition-id"])
        metrics = MetricRecord({"loss": losses[partition], "num-examples": 10**9})
        if partition == 4:
            metrics["other"] = [1, 2]
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    result = SafeDSHB(SMEA(), 1).start(InProcessGrid(app, 5), model(), 1)
    assert result.evaluate_metrics_clientapp == {}
    strategy = SafeDSHB(SMEA(), 1, fraction_evaluate=1.0)
    result = strategy.start(InProcessGrid(app, 5), model(), 1)
    assert result.evaluate_metrics_clientapp[1]["loss"] == 0.55


def test_messages_expire_with_their_round() -> None:
    """A node that oversleeps several rounds is not to pay for each of them."""

    lives: list[float] = []

    class Watching(WrappedGrid):
        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            messages = list(messages)
            lives.extend(message.metadata.ttl for message in messages)
            return self.grid.push_messages(messages)

    SafeDSHB(SMEA(), 1).start(Watching(federation(3)), model(), 2, timeout=30.0)
    assert lives == [40.0] * 6


def test_nodes_that_do_not_come_end_in_a_clear_error() -> None:
    class Connected(WrappedGrid):
        """A network, whose nodes may join later."""

        def get_node_ids(self) -> list[int]:
            return list(self.grid.get_node_ids())

    strategy = SafeDSHB(SMEA(), 3, node_timeout=0.05)
    text = r"=3 needs more than 2f = 6 nodes, and 5 .*=0.05 seconds; lower it to 2 or"
    with pytest.raises(TimeoutError, match=f"num_malicious_nodes{text}"):
        strategy.start(Connected(federation(5)), model(), 1)
    strategy = SafeDSHB(SMEA(), 1, min_available_nodes=6, node_timeout=0.05)
    with pytest.raises(TimeoutError, match=r"and min_available_nodes=6 are needed"):
        strategy.start(Connected(federation(5)), model(), 1)


def test_a_simulation_does_not_wait_for_nodes_that_cannot_come() -> None:
    attacked = AdversarialGrid(federation(5), SignFlip(), 1)
    for grid in (federation(5), attacked):
        with pytest.raises(TimeoutError, match="lower it to 2 or less, or simulate"):
            SafeDSHB(SMEA(), 3, node_timeout=1e9).start(grid, model(), 1)


def test_a_setting_that_is_assigned_too_late_is_refused() -> None:
    strategy = SafeDSHB(SMEA(), 1)
    for name in ("stop_when", "num_malicious_nodes", "fraction_train", "checkpoint"):
        with pytest.raises(AttributeError, match=rf"make it with SafeDSHB\({name}="):
            setattr(strategy, name, None)
    strategy.note = "attributes of one's own are free"


def test_nodes_that_come_late_are_waited_for(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Growing(WrappedGrid):
        asked = 0

        def get_node_ids(self) -> list[int]:
            self.asked += 1
            return list(self.grid.get_node_ids())[: self.asked // 3]

    monkeypatch.setattr("flwr_safedshb.algorithm.participation._POLL_SECONDS", 0.0)
    caplog.set_level("INFO", "flwr")
    grid = Growing(federation(2))
    result = SafeDSHB(min_available_nodes=2).start(grid, model(), 1)
    assert result.train_metrics_clientapp[1]["replies"] == 2
    # One line for each change, however long it takes.
    waits = [m for m in caplog.messages if m.startswith("Waiting for nodes")]
    assert waits == [f"Waiting for nodes: {n} connected, 2 needed" for n in (0, 1)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_malicious_nodes": -1}, "num_malicious_nodes=-1"),
        ({"output": "best"}, "output='best'"),
        ({"server_learning_rate": 0.0}, "server_learning_rate=0.0"),
        ({"server_learning_rate": math.inf}, "server_learning_rate=inf"),
        ({"momentum": 1.0}, "momentum=1.0"),
        ({"momentum": -0.1}, "momentum=-0.1"),
        ({"fraction_train": 0.0}, "fraction_train=0.0"),
        ({"fraction_train": 1.5}, "fraction_train=1.5"),
        ({"fraction_evaluate": 2.0}, "fraction_evaluate=2.0"),
        (
            {"num_malicious_nodes": 2, "min_available_nodes": 4},
            "min_available_nodes=4 must exceed 2f",
        ),
        ({"participation_confidence": 1.0}, "confidence=1.0"),
        ({"node_timeout": -1.0}, "node_timeout=-1.0"),
        ({"straggler_grace": -1.0}, "straggler_grace=-1.0"),
        ({"checkpoint_every": 0}, "checkpoint_every=0"),
    ],
)
def test_bad_settings_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SafeDSHB(**arguments)  # type: ignore[arg-type]


def test_schedules_are_checked_before_the_first_round() -> None:
    asked: list[int] = []

    def spoil(partition: int, step: int, layers: Layers) -> RecordDict:
        asked.append(step)
        return record(list(layers))

    strategy = SafeDSHB(server_learning_rate=lambda step: 1.0 - step / 5)
    with pytest.raises(ValueError, match="at step 5"):
        strategy.start(federation(3, spoil), model(), 6)
    assert asked == []


def brute_bound(total: int, malicious: int, chosen: int, confidence: float) -> int:
    draws = list(itertools.combinations(range(total), chosen))
    counts = [sum(i < malicious for i in draw) for draw in draws]
    for k in range(chosen + 1):
        if sum(count <= k for count in counts) >= confidence * len(draws):
            return k
    raise AssertionError


@pytest.mark.parametrize("confidence", [0.51, 0.91, 0.991, 0.999999])
def test_bound_on_adversaries_among_chosen_nodes(confidence: float) -> None:
    for total, malicious, chosen in itertools.product((7, 10), (0, 1, 3), (1, 4, 6)):
        found = bound_adversaries(total, malicious, chosen, confidence)
        assert found == brute_bound(total, malicious, chosen, confidence)
    assert (
        100 <= bound_adversaries(5000, 500, 1000, confidence) < 200
    )  # comb is > 1e308


def test_partial_participation_states_and_uses_the_bound() -> None:
    asked: dict[int, set[int]] = {}

    def spoil(partition: int, step: int, layers: Layers) -> RecordDict:
        asked.setdefault(step, set()).add(partition)
        return record(list(layers))

    strategy = SafeDSHB(
        SMEA(), 2, fraction_train=0.5, participation_confidence=0.9, seed=1
    )
    result = strategy.start(federation(20, spoil), model(), 5)
    assert [len(nodes) for nodes in asked.values()] == [10] * 5
    assert len({frozenset(nodes) for nodes in asked.values()}) > 1
    expected = bound_adversaries(20, 2, 10, 0.9)
    assert result.train_metrics_clientapp[1]["num-malicious-nodes"] == expected
    again: dict[int, set[int]] = dict(asked)
    asked.clear()
    SafeDSHB(SMEA(), 2, fraction_train=0.5, participation_confidence=0.9, seed=1).start(
        federation(20, spoil), model(), 5
    )
    assert asked == again


def test_partial_participation_without_a_majority_is_refused() -> None:
    asked: list[int] = []

    def spoil(partition: int, step: int, layers: Layers) -> RecordDict:
        asked.append(partition)
        return record(list(layers))

    strategy = SafeDSHB(SMEA(), 4, fraction_train=0.3, min_train_nodes=1)
    with pytest.raises(ValueError, match=r"fraction_train=0\.3 chooses 3 of 10 nodes"):
        strategy.start(federation(10, spoil), model(), 1)
    assert asked == []


def test_nodes_that_leave_skip_rounds_and_do_not_end_the_run() -> None:
    class Leaving(WrappedGrid):
        asked = 0

        def get_node_ids(self) -> list[int]:
            self.asked += 1
            nodes = list(self.grid.get_node_ids())
            return nodes[:7] if self.asked == 2 else nodes

    strategy = SafeDSHB(
        SMEA(), 3, fraction_train=0.5, min_train_nodes=1, participation_confidence=0.9
    )
    result = strategy.start(Leaving(federation(20)), model(), 3)
    skipped = [result.train_metrics_clientapp[i]["skipped"] for i in (1, 2, 3)]
    assert skipped == [0, 1, 0]


class Emptying(WrappedGrid):
    """A federation of five, of which two are left in some rounds."""

    def __init__(self, empty: range) -> None:
        super().__init__(federation(5))
        self.empty, self.asked = empty, 0

    def get_node_ids(self) -> list[int]:
        self.asked += 1
        nodes = list(self.grid.get_node_ids())
        return nodes[:2] if self.asked in self.empty else nodes


def test_below_the_least_number_rounds_are_skipped_until_nodes_are_back() -> None:
    strategy = SafeDSHB(SMEA(), 1, node_timeout=0.0)
    result = strategy.start(Emptying(range(2, 4)), model(), 5)
    skipped = [result.train_metrics_clientapp[i]["skipped"] for i in range(1, 6)]
    assert skipped == [0, 1, 1, 0, 0]


def test_a_run_is_given_up_once_nodes_have_been_away_for_too_long() -> None:
    strategy = SafeDSHB(SMEA(), 1, node_timeout=0.0, give_up_after=0.0)
    with pytest.raises(TimeoutError, match="give_up_after=0 seconds"):
        strategy.start(Emptying(range(2, 99)), model(), 5)


def test_a_run_that_never_had_its_nodes_does_not_begin() -> None:
    strategy = SafeDSHB(SMEA(), 1, node_timeout=0.0)
    with pytest.raises(TimeoutError, match="num_malicious_nodes=1 needs more than"):
        strategy.start(Emptying(range(1, 99)), model(), 5)


def test_numpy_clients_keys() -> None:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        assert message.content.keys() == {"fitins.parameters", "fitins.config"}
        return Message(record(list(layers(0, 0))), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        assert message.content.keys() == {
            "evaluateins.parameters",
            "evaluateins.config",
        }
        metrics = RecordDict({"metrics": MetricRecord({"loss": 1.0})})
        return Message(metrics, reply_to=message)

    strategy = SafeDSHB(
        arrayrecord_key="fitins.parameters",
        configrecord_key="fitins.config",
        fraction_evaluate=1.0,
    )
    result = strategy.start(InProcessGrid(app, 2), model(), 1)
    assert result.train_metrics_clientapp[1]["replies"] == 2
    assert result.evaluate_metrics_clientapp[1]["loss"] == 1.0


def test_configure_and_aggregate_without_start() -> None:
    grid = federation(3)
    strategy = SafeDSHB()
    messages = strategy.configure_train(1, model(), ConfigRecord(), grid)
    assert isinstance(messages, list)
    arrays, metrics = strategy.aggregate_train(1, grid.send_and_receive(messages))
    assert arrays is not None
    assert metrics is not None
    assert close(flat(arrays), -vectors(range(3), 0).mean(axis=0))


def test_summary_names_the_settings(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "flwr")
    SafeDSHB(SMEA(), 3).summary()
    assert "SMEA" in caplog.text
    assert "Number of malicious nodes: 3" in caplog.text
    assert "Weighted" not in caplog.text


@pytest.mark.process
def test_the_server_side_needs_neither_torch_nor_ray_nor_hydra() -> None:
    code = (
        "import sys, flwr_safedshb.strategy, flwr_safedshb.simulation.in_process;"
        "print({'torch', 'ray', 'hydra', 'dp_accounting'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"


def test_ctrl_c_is_said_in_one_line_with_a_short_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Interrupted(WrappedGrid):
        rounds = 0

        def get_node_ids(self) -> list[int]:
            self.rounds += 1
            if self.rounds == 3:
                interrupt_deep_inside(20)
            return list(self.grid.get_node_ids())

    def interrupt_deep_inside(depth: int) -> None:
        if depth:
            interrupt_deep_inside(depth - 1)
        raise KeyboardInterrupt

    choices: tuple[tuple[dict[str, Any], str], ...] = (
        ({}, "give the strategy a checkpoint="),
        ({"checkpoint": tmp_path / "run.npz"}, "to resume"),
    )
    for settings, kept in choices:
        strategy = SafeDSHB(SMEA(), 1, **settings)
        with pytest.raises(KeyboardInterrupt) as caught:
            strategy.start(Interrupted(federation(3)), model(), 5)
        assert len("".join(traceback.format_exception(caught.value)).splitlines()) < 20
        (said,) = [m for m in caplog.messages if m.startswith("Interrupted after 2 of")]
        assert kept in said
        caplog.clear()
    assert SafeDSHB(SMEA(), 1, checkpoint=tmp_path / "run.npz").start(
        federation(3), model(), 5
    )
