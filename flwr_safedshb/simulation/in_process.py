"""A Grid whose nodes run in this process.

A `flwr.serverapp.Grid` is what a ServerApp sees of the network. `InProcessGrid` answers
its messages by calling the ClientApp at once: no processes, no serialisation, the same
bytes for the same seed. Every Flower strategy runs on it unchanged.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from logging import ERROR

import numpy as np
from flwr.app import Context, Error, Message, RecordDict, UserConfig
from flwr.clientapp import ClientApp
from flwr.common import log

from flwr_safedshb.algorithm.refusal import RefusedError
from flwr_safedshb.flower.compat import (
    SUPERLINK_NODE_ID,
    ErrorCode,
    Run,
    copy_for_delivery,
    set_message_id,
    set_process_run,
)
from flwr_safedshb.flower.grid import SimulatedGrid

NodeConfig = Callable[[int], UserConfig]


class InProcessGrid(SimulatedGrid):
    """Run a ClientApp on nodes that live in this process.

    Each node has one Context, which lasts as long as the grid. As in Flower's other
    engines a node gets its own copy of a message, and an exception in the ClientApp
    becomes an error reply and leaves the node's Context as it was.

    Parameters
    ----------
    client_app : ClientApp
    num_nodes : int
        n. Node i has ``partition-id`` i and ``num-partitions`` n in its config; node
        ids increase with i.
    run_config : mapping, optional
        ``context.run_config`` of every node.
    seed : int
        Determines the ids of the run and of the nodes.
    node_config : callable of the partition id, optional
        Further entries of a node's config.
    """

    def __init__(
        self,
        client_app: ClientApp,
        num_nodes: int,
        run_config: UserConfig | None = None,
        seed: int = 0,
        node_config: NodeConfig | None = None,
    ) -> None:
        if num_nodes < 1:
            raise ValueError(f"num_nodes={num_nodes} must be at least 1")
        self._app = client_app
        run_id, *node_ids = _draw_ids(num_nodes + 1, seed)
        self._run = Run.create_empty(run_id)
        self._run.override_config = dict(run_config or {})
        self._contexts = {
            node_id: Context(
                run_id=run_id,
                node_id=node_id,
                node_config={
                    "partition-id": partition,
                    "num-partitions": num_nodes,
                    **(node_config(partition) if node_config else {}),
                },
                state=RecordDict(),
                run_config=dict(run_config or {}),
            )
            for partition, node_id in enumerate(sorted(node_ids))
        }
        self._replies: dict[str, Message] = {}
        self._sent = 0
        set_process_run(run_id)

    def server_context(self) -> Context:
        """Return a Context to call a ServerApp with: ``app(grid, context)``."""
        return Context(
            run_id=self._run.run_id,
            node_id=SUPERLINK_NODE_ID,
            node_config={},
            state=RecordDict(),
            run_config=dict(self._run.override_config),
        )

    def set_run(self, run: Run) -> None:
        """Set the run; messages and nodes take its id."""
        self._run = run
        for context in self._contexts.values():
            context.run_id = run.run_id
        set_process_run(run.run_id)

    @property
    def run(self) -> Run:
        """Run information."""
        return Run(**vars(self._run))

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Create a message; the same as the constructor of `flwr.app.Message`."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> list[int]:
        """Return the ids of all nodes, by partition."""
        # Several grids may alternate in one process, and messages are made after this
        # call. Daemon threads are ignored: if a run fails, Flower's legacy server
        # leaves one that calls this forever and makes no messages.
        if not threading.current_thread().daemon:
            set_process_run(self._run.run_id)
        return list(self._contexts)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Answer messages at once and keep the replies."""
        replies = self.answer(list(messages))
        by_id = {reply.metadata.reply_to_message_id: reply for reply in replies}
        self._replies.update(by_id)
        return list(by_id)

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Hand out the replies to these messages, each once."""
        found = (self._replies.pop(message_id, None) for message_id in message_ids)
        return [reply for reply in found if reply is not None]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Answer messages in their order; `timeout` is ignored."""
        return self.answer(list(messages))

    def answer(self, messages: list[Message]) -> list[Message]:
        """Return the replies to messages, in their order."""
        return [self._answer_message(message) for message in messages]

    def _answer_message(self, message: Message) -> Message:
        message_id, context = self.make_message_id(), self.find_context(message)
        if context is None:
            return self.reply_unavailable(message, message_id)
        arrived, working = copy_for_delivery(message, message_id, context)
        try:
            reply: object = self._app(arrived, working)
        except Exception as error:
            reply = error
        return self.finish_message(message, working, reply)

    def make_message_id(self) -> str:
        """Return an id for a message, as another engine's SuperLink would give it."""
        self._sent += 1
        return f"{self._run.run_id}-{self._sent}"

    def find_context(self, message: Message) -> Context | None:
        """Return the Context of a message's node, or None if there is no such node."""
        return self._contexts.get(message.metadata.dst_node_id)

    @staticmethod
    def reply_unavailable(message: Message, message_id: str) -> Message:
        """Return an error reply to a message for an unknown node."""
        set_message_id(message, message_id)
        reason = f"there is no node {message.metadata.dst_node_id}"
        return Message(Error(ErrorCode.NODE_UNAVAILABLE, reason), reply_to=message)

    def deliver_reply(
        self, reply: Message, message_id: str, working: Context
    ) -> tuple[Message, Context]:
        """Return copies of a reply and a Context, which the app cannot change later."""
        return copy_for_delivery(reply, message_id, working)

    def finish_message(
        self, message: Message, working: Context, result: object
    ) -> Message:
        """Turn an app's result into a reply, and keep the node's state if it succeeded.

        Parameters
        ----------
        message : Message
        working : Context
            The app's copy of the node's Context.
        result : object
            What the app returned, or the Exception that it raised.
        """
        node_id, reply_id = working.node_id, f"{message.metadata.message_id}-reply"
        try:
            if isinstance(result, Exception):
                raise result
            answered = _check_reply(message, result)
            # Raises for anything but records, like serialisation in other engines.
            reply, kept = self.deliver_reply(answered, reply_id, working)
        except Exception as error:
            # A refusal needs no traceback.
            trace = None if isinstance(error, RefusedError) else error
            about = node_id, type(error).__name__, error
            log(ERROR, "node %d: the ClientApp raised %s: %s", *about, exc_info=trace)
            reason = f"{type(error)}:<'{error}'>"
            code = ErrorCode.CLIENT_APP_RAISED_EXCEPTION
            reply = Message(Error(code, reason), reply_to=message)
            set_message_id(reply, reply_id)
        else:
            self._contexts[node_id].state = kept.state
        return reply


def _check_reply(message: Message, reply: object) -> Message:
    if not isinstance(reply, Message):
        raise TypeError(f"a ClientApp returns a Message, got {type(reply).__name__}")
    # Flower's own links drop a message that does not reply to this one.
    if (
        reply.metadata.reply_to_message_id != message.metadata.message_id
        or reply.metadata.src_node_id != message.metadata.dst_node_id
    ):
        raise ValueError("the ClientApp returned a Message that is not its reply")
    return reply


def _draw_ids(count: int, seed: int) -> list[int]:
    rng = np.random.default_rng(seed)
    ids: dict[int, None] = {}
    while len(ids) < count:
        # Above Flower's reserved ids, within a signed 64-bit integer.
        ids[int(rng.integers(1 << 32, 1 << 62))] = None
    return list(ids)
