"""Replies are collected one by one, and believed if they answer what was asked."""

import threading
import time
from collections.abc import Iterable
from typing import ClassVar

import httpx
import pytest
from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError
from flwr.supercore.task_identity import TaskIdentity

from flwr_safedshb.flower import grid as grids
from flwr_safedshb.flower.compat import (
    SUPERLINK_NODE_ID,
    Run,
    is_reply_to,
    set_process_run,
)
from flwr_safedshb.flower.grid import FaultTolerantGrid, Patience, WrappedGrid
from flwr_safedshb.strategy import SafeDSHB
from tests.federation import federation, model


class Remote(Grid):
    """Stands for a SuperLink: nothing of it is known to be simulated."""

    def __init__(self, grid: Grid) -> None:
        self.inside = grid

    @property
    def run(self) -> Run:
        return self.inside.run

    def set_run(self, run: Run) -> None:
        self.inside.set_run(run)

    def create_message(self, *_: object, **__: object) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return self.inside.get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return self.inside.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return self.inside.pull_messages(message_ids)

    def send_and_receive(self, *_: object, **__: object) -> Iterable[Message]:
        raise NotImplementedError


def messages(grid: Grid) -> list[Message]:
    content = RecordDict({"config": ConfigRecord({"step": 0})})
    return [
        Message(content, dst_node_id=node, message_type="train")
        for node in sorted(grid.get_node_ids())
    ]


def refused(status: int) -> httpx.HTTPStatusError:
    request = httpx.Request("POST", "https://link")
    return httpx.HTTPStatusError(
        "no", request=request, response=httpx.Response(status, request=request)
    )


def test_a_reply_that_never_completes_costs_the_others_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grids, "_BATCH_SECONDS", 0.05)
    for_ever = threading.Event()

    class Stalled(Remote):
        stalled: str = ""

        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            (name,) = message_ids
            self.stalled = self.stalled or name
            if name == self.stalled:
                for_ever.wait(60)
            return super().pull_messages([name])

    grid = FaultTolerantGrid(Stalled(federation(5)))
    replies = grid.send_and_receive(messages(grid), timeout=0.5)
    for_ever.set()
    assert len(replies) == 4


def test_one_reply_is_asked_for_in_turn_until_some_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)

    class Slow(Remote):
        asked: ClassVar[list[str]] = []

        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            Slow.asked += message_ids
            return super().pull_messages(message_ids) if len(Slow.asked) > 7 else []

    grid = FaultTolerantGrid(Slow(federation(5)))
    assert len(grid.send_and_receive(messages(grid))) == 5
    assert len(pauses) == 7
    assert len({*Slow.asked[:5]}) == 5
    assert Slow.asked[5:7] == Slow.asked[:2]
    assert len(Slow.asked) == 7 + 5


def test_messages_are_of_their_grids_run_whatever_else_the_process_does() -> None:
    class Strict(Remote):
        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            ours = (self.run.run_id, SUPERLINK_NODE_ID)
            found = [(m.metadata.run_id, m.metadata.src_node_id) for m in messages]
            assert found == [ours] * 5
            return super().push_messages(messages)

    grid = FaultTolerantGrid(Strict(federation(5)))
    nodes = sorted(grid.get_node_ids())
    set_process_run(grid.run.run_id + 1)
    TaskIdentity.node_id = nodes[0]
    asked = [Message(RecordDict(), node, "train") for node in nodes]
    assert len(grid.send_and_receive(asked)) == 5


def test_everything_is_asked_for_at_the_end_of_the_time() -> None:
    grid = FaultTolerantGrid(Remote(federation(5)))
    assert len(grid.send_and_receive(messages(grid), timeout=0.0)) == 5


class Clock:
    """A clock that only sleeping moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "sleep", self._sleep)
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def _sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize(
    ("f", "arrivals", "ends"),
    [
        # All but f have answered, more than 2f: the last ones have the grace,
        (2, [1, 1, 1, 1, 5, 999, 999], 65),
        # or as long as the others took.
        (2, [1, 1, 1, 1, 200, 999, 999], 400),
        (2, [1, 1, 1, 1, 5, 60, 999], 65),
        (2, [1, 1, 1, 1, 5, 6, 7], 7),
        # Too few without them: they are waited for until the time-out.
        (3, [1, 1, 1, 1, 1, 1, 999], 700),
        (2, [1, 1, 1, 1, 999], 700),
        (0, [1, 1, 1, 1, 1, 1, 999], 700),
        # An error is no answer.
        (2, [1, 1, 1, 1, -1, 90, 999], 180),
    ],
)
def test_a_round_ends_when_enough_have_answered_and_a_grace_is_over(
    monkeypatch: pytest.MonkeyPatch, f: int, arrivals: list[int], ends: int
) -> None:
    clock = Clock(monkeypatch)

    class Timed(Remote):
        def push_messages(self, sent: Iterable[Message]) -> Iterable[str]:
            sent = list(sent)
            ids = list(super().push_messages(sent))
            self.asked = dict(zip(ids, sent, strict=True))
            self.at = dict(zip(ids, arrivals, strict=True))
            return ids

        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            (one,) = message_ids
            if clock.now - 1000.0 < self.at[one]:
                return []
            if self.at[one] < 0:
                return [Message(Error(2, "no"), reply_to=self.asked[one])]
            return super().pull_messages([one])

    grid = FaultTolerantGrid(Timed(federation(len(arrivals))), Patience(f, 60.0))
    replies = grid.send_and_receive(messages(grid), timeout=700.0)
    assert clock.now - 1000.0 == pytest.approx(ends, abs=2.0 + 0.05 * ends)
    assert len(replies) == sum(at <= ends for at in arrivals)


@pytest.mark.parametrize("kind", ["refused", "deleted"])
def test_what_cannot_be_sent_together_is_tried_one_by_one(kind: str) -> None:
    """A node can make a SuperLink refuse a message, or forget it while it is sent."""
    error = refused(500) if kind == "refused" else ObjectPushError("a", 1, "s")

    class Poisoned(Remote):
        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            asked = list(messages)
            if min(self.get_node_ids()) in {m.metadata.dst_node_id for m in asked}:
                raise error
            return super().push_messages(asked)

    grid = FaultTolerantGrid(Poisoned(federation(3)))
    assert len(grid.send_and_receive(messages(grid), timeout=5.0)) == 2


def test_a_superlink_that_fails_over_one_reply_ends_no_run() -> None:
    class Failing(Remote):
        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            raise refused(500)

    grid = FaultTolerantGrid(Failing(federation(3)))
    assert grid.send_and_receive(messages(grid), timeout=30.0) == []


@pytest.mark.parametrize("field", ["src_node_id", "reply_to_message_id"])
def test_a_reply_in_anothers_name_is_no_answer(field: str) -> None:
    grid = federation(2)
    (one, other) = messages(grid)
    (name,) = grid.push_messages([one])
    (reply,) = grid.pull_messages([name])
    node = one.metadata.dst_node_id
    assert is_reply_to(reply, name, node)
    assert not is_reply_to(reply, name, other.metadata.dst_node_id)
    forged = "x" if field.startswith("reply") else other.metadata.dst_node_id
    reply.metadata.__dict__[f"_{field}"] = forged
    assert not is_reply_to(reply, name, node)


def test_forged_replies_are_handed_on_to_be_counted() -> None:
    class Forging(WrappedGrid):
        def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
            found = list(self.grid.pull_messages(message_ids))
            for reply in found:
                reply.metadata.__dict__["_src_node_id"] = 99
            return found

    grid = FaultTolerantGrid(Forging(federation(3)))
    replies = grid.send_and_receive(messages(grid), timeout=5.0)
    assert {reply.metadata.src_node_id for reply in replies} == {99}


class Leaving(WrappedGrid):
    """Nodes that leave after the first round, and come back for the fourth."""

    asked = 0

    def get_node_ids(self) -> list[int]:
        nodes = sorted(self.grid.get_node_ids())
        self.asked += 1
        return nodes if self.asked not in (2, 3) else nodes[:1]


def test_a_run_outlives_nodes_that_leave() -> None:
    strategy = SafeDSHB(num_malicious_nodes=1, node_timeout=0.0)
    result = strategy.start(Leaving(federation(5)), model(), 4)
    skipped = [m["skipped"] for m in result.train_metrics_clientapp.values()]
    assert skipped == [0, 1, 1, 0]


def test_a_run_does_not_wait_for_ever_for_nodes_that_left() -> None:
    strategy = SafeDSHB(num_malicious_nodes=1, node_timeout=0.0, give_up_after=0.0)
    with pytest.raises(TimeoutError, match="give_up_after=0"):
        strategy.start(Leaving(federation(5)), model(), 4)
    with pytest.raises(ValueError, match="give_up_after=-1"):
        SafeDSHB(give_up_after=-1.0)


def test_no_two_rounds_send_the_same_config() -> None:
    strategy, grid = SafeDSHB(), federation(3)
    sent = [
        strategy.configure_train(1, model(), ConfigRecord(), grid)[0].content["config"]
        for _ in range(2)
    ]
    first, second = sent
    assert first["nonce"] != second["nonce"]


def test_no_two_evaluations_send_the_same_config() -> None:
    strategy, grid = SafeDSHB(fraction_evaluate=1.0), federation(3)
    first, second = (
        strategy.configure_evaluate(1, model(), ConfigRecord(), grid)[0]
        for _ in range(2)
    )
    assert first.content["config"].object_id != second.content["config"].object_id
