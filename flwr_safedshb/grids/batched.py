"""A Grid whose private clients train as one batch: the fastest way to simulate them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from flwr.app import Context, Message, MessageType

from flwr_safedshb.client.client import PrivateClientApp
from flwr_safedshb.grids.in_process import InProcessGrid


class BatchedGrid(InProcessGrid):
    """An `InProcessGrid` that lets the clients of a round go through the model at once.

    It takes the same arguments. What each node replies is what it would reply alone, up
    to the order in which floating-point sums are rounded: the same bytes for the same
    seed, but not those of other engines. Clients whose models have no closed-form
    gradients, or whose batches differ in size, train one by one; so do all clients of
    an app that does not come from `client_app`.
    """

    def answer(self, messages: list[Message]) -> list[Message]:
        """Return the replies to messages, in their order."""
        kinds = {message.metadata.message_type for message in messages}
        if kinds != {MessageType.TRAIN} or not isinstance(self._app, PrivateClientApp):
            return super().answer(messages)
        with _uncollected():
            return self._together(self._app, messages)

    def received(self, reply: Message) -> Message:
        """Return a reply, which a private app has just made and holds no longer."""
        if isinstance(self._app, PrivateClientApp):
            return reply
        return super().received(reply)

    def _together(
        self, app: PrivateClientApp, messages: list[Message]
    ) -> list[Message]:
        replies: list[Message | None] = [None] * len(messages)
        asked: dict[int, Context] = {}
        for i, message in enumerate(messages):
            self.number(message)
            working = self.working_context(message)
            if working is None:
                replies[i] = self.unavailable(message)
            else:
                asked[i] = working
        results = app.train_together([messages[i] for i in asked], list(asked.values()))
        for (i, working), result in zip(asked.items(), results, strict=True):
            replies[i] = self.concluded(messages[i], working, result)
        return [reply for reply in replies if reply is not None]


@contextmanager
def _uncollected() -> Iterator[None]:
    """Leave the search for cycles of garbage for later.

    The records of a thousand clients are many objects without a cycle, and to look
    through them again and again takes a third of a round.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
