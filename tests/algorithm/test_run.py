"""How a run ends: by a condition, with more rounds, and with what it cost."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord
from flwr.serverapp import Grid

from flwr_safedshb import load_checkpoint
from flwr_safedshb.app import client_app
from flwr_safedshb.client import SafeDSHBClient
from flwr_safedshb.privacy.plan import PrivacyPlan
from flwr_safedshb.simulation.batched import BatchedGrid
from flwr_safedshb.simulation.in_process import InProcessGrid
from flwr_safedshb.strategy import SafeDSHB
from tests.clients import THETA, Scalar, make, node
from tests.federation import federation, model


def flat(arrays: ArrayRecord) -> bytes:
    return b"".join(array.numpy().tobytes() for array in arrays.values())


def run(path: Path | None, rounds: int, **settings: object) -> ArrayRecord:
    arguments: dict[str, object] = {"seed": 5, "checkpoint": path, **settings}
    strategy = SafeDSHB(**arguments)  # type: ignore[arg-type]
    return strategy.start(federation(3), model(), rounds).arrays


@pytest.mark.parametrize("rate", [0.5, lambda step: 1.0 / (1 + step)])
def test_a_finished_run_can_be_extended(tmp_path: Path, rate: object) -> None:
    """To the byte what one run of that length is."""
    path = tmp_path / "run.npz"
    run(path, 3, server_learning_rate=rate)
    longer = run(path, 7, server_learning_rate=rate)
    assert flat(longer) == flat(run(None, 7, server_learning_rate=rate))
    assert load_checkpoint(path).num_rounds == 7
    assert flat(run(path, 7, server_learning_rate=rate)) == flat(longer)


def test_integers_of_numpy_are_settings_like_any_other(tmp_path: Path) -> None:
    path, three = tmp_path / "run.npz", np.int64(3)
    one, two = np.int64(1), np.int64(2)
    found = run(
        path,
        three,  # type: ignore[arg-type]
        local_steps=two,
        num_malicious_nodes=one,
        checkpoint_every=two,
        seed=np.int64(5),
    )
    settings = {"local_steps": 2, "num_malicious_nodes": 1, "seed": 5}
    assert flat(found) == flat(run(None, 3, **settings))
    # The checkpoint is that of the same run in Python's own integers.
    assert flat(run(path, 3, **settings)) == flat(found)


@pytest.mark.parametrize("rounds", [True, 2.0, "3", -1, None])
def test_a_number_of_rounds_that_is_none_is_refused(rounds: object) -> None:
    with pytest.raises(ValueError, match="num_rounds="):
        run(None, rounds)  # type: ignore[arg-type]


def test_a_strategy_shows_the_least_nodes_that_it_uses() -> None:
    strategy = SafeDSHB(num_malicious_nodes=2)
    assert strategy.min_train_nodes == strategy.min_available_nodes == 5
    assert strategy.min_evaluate_nodes == 5


def test_schedules_or_outputs_that_know_the_end_forbid_it(tmp_path: Path) -> None:
    path = tmp_path / "run.npz"
    run(path, 3, server_learning_rate=lambda step: 1.0 / (4 - step))
    with pytest.raises(ValueError, match="server_learning_rate"):
        run(path, 4, server_learning_rate=lambda step: 1.0 / (5 - step))
    other = tmp_path / "other.npz"
    run(other, 3, output="average")
    with pytest.raises(ValueError, match="num_rounds was 3 and is 4"):
        run(other, 4, output="average")


def test_arrays_of_a_checkpoint_have_their_names(tmp_path: Path) -> None:
    path = tmp_path / "run.npz"
    arrays = run(path, 2)
    with np.load(path) as file:
        for name, array in arrays.items():
            assert np.array_equal(file[f"model/{name}"], array.numpy())
    found = load_checkpoint(str(path))
    assert found.step == 2
    assert flat(found.arrays) == flat(arrays)
    with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
        load_checkpoint(tmp_path / "none.npz")


def test_a_run_stops_when_its_user_says(tmp_path: Path) -> None:
    path = tmp_path / "run.npz"

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        return MetricRecord({"accuracy": 0.1 * server_round})

    def enough(server_round: int, metrics: Mapping[str, object]) -> bool:
        assert metrics["replies"] == 3
        accuracy = metrics["accuracy"]
        assert isinstance(accuracy, float)
        return accuracy > 0.25

    for _ in range(2):  # a run that has done its work does no more
        strategy = SafeDSHB(seed=5, checkpoint=path, stop_when=enough)
        result = strategy.start(federation(3), model(), 9, evaluate_fn=evaluate)
        assert list(result.train_metrics_clientapp) == [1, 2, 3]
        assert load_checkpoint(path).step == 3
    assert flat(result.arrays) == flat(run(None, 3))
    with pytest.raises(ValueError, match="use output='last'"):
        SafeDSHB(stop_when=enough, output="average")


LOUD = PrivacyPlan(1.0, 0.3, 4, 20)
DELTA = 1e-5


@pytest.mark.parametrize("kind", [InProcessGrid, BatchedGrid])
def test_the_run_says_what_it_cost_and_who_stands_out(
    kind: type[InProcessGrid], caplog: pytest.LogCaptureFixture
) -> None:
    def client_fn(context: Context) -> SafeDSHBClient:
        partition = context.node_config["partition-id"]
        if partition == 0:
            return make(context)  # which has no delta, and states nothing
        if partition == 1:
            return make(context, delta=DELTA, plan=LOUD)
        return make(context, delta=DELTA)

    grid = kind(client_app(client_fn), 4)
    result = SafeDSHB().start(grid, ArrayRecord([*THETA]), 3)
    last = result.train_metrics_clientapp[3]
    usual = make(node()).plan.epsilon(3, DELTA)
    loud = LOUD.epsilon(3, DELTA)
    found = last["stated-epsilon"]
    assert isinstance(found, list)
    assert sorted(found) == pytest.approx(sorted([usual, usual, loud]))
    assert last["stated-delta"] == [DELTA] * 3
    assert "stated-epsilon" not in result.train_metrics_clientapp[2]
    assert "as 3 nodes report it" in caplog.text
    assert f"epsilon from {usual:.4g} to {loud:.4g}" in caplog.text
    outliers = [r.getMessage() for r in caplog.records if "far from" in r.msg]
    assert len(outliers) == 1
    assert f"reports epsilon {loud:.4g}" in outliers[0]


def test_a_node_with_a_ledger_states_what_it_was_charged_for(tmp_path: Path) -> None:
    """Also for steps that were lost, and not for those of other runs."""
    context = node(tmp_path)
    asked: dict[str, Scalar] = {"step": 0, "momentum": 0.5, "session": "other"}
    make(context).fit([*THETA], asked)
    asked = {**asked, "session": "this", "run-steps": 2}
    make(context).fit([*THETA], asked)
    _, _, said = make(context).fit([*THETA], {**asked, "state-privacy": True})
    expected = make(context).plan.epsilon(2, 1e-5)
    assert said["epsilon"] == pytest.approx(expected)
    assert said["delta"] == 1e-5


def test_a_round_of_local_steps_counts_them_all() -> None:
    """The first step of a round is K t, and the model goes K gamma R_t."""
    steps: list[object] = []

    class Recording(SafeDSHB):
        def configure_train(
            self,
            server_round: int,
            arrays: ArrayRecord,
            config: ConfigRecord,
            grid: Grid,
        ) -> list[Message]:
            self.before = arrays
            messages = super().configure_train(server_round, arrays, config, grid)
            steps.append(messages[0].content.config_records["config"]["step"])
            return messages

        def aggregate_train(
            self, server_round: int, replies: Iterable[Message]
        ) -> tuple[ArrayRecord | None, MetricRecord | None]:
            (reply,) = replies = [*replies]
            arrays, metrics = super().aggregate_train(server_round, replies)
            assert arrays is not None
            sent = reply.content.array_records["arrays"].values()
            both = zip(self.before.values(), arrays.values(), sent, strict=True)
            for before, after, mean in both:
                moved = before.numpy() - after.numpy()
                assert np.allclose(moved, 3 * 0.1 * mean.numpy(), atol=1e-6)
            return arrays, metrics

    strategy = Recording(local_steps=3, server_learning_rate=0.1, seed=1)
    strategy.start(federation(1), model(), 2)
    assert steps == [0, 3]
