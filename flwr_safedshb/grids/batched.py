"""A Grid whose private clients train as one batch: the fastest way to simulate them.

Each client takes the very step of `flwr_safedshb.client.step`, in the same order: it is
charged, its gradient is computed, its momentum is kept. Only the middle is shared:
clients that were sent the same model go through it together.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MessageType
from numpy.typing import NDArray

from flwr_safedshb.client.client import (
    PrivateClientApp,
    SafeDSHBClient,
    content_of,
    refusal,
    reply_with,
)
from flwr_safedshb.client.step import Step, charge, finish, gradients
from flwr_safedshb.exchange.arrays import Arrays, read
from flwr_safedshb.grids.in_process import InProcessGrid


class BatchedGrid(InProcessGrid):
    """An `InProcessGrid` that lets the clients of a round go through the model at once.

    It takes the same arguments. What each node replies is what it would reply alone, up
    to the order in which floating-point sums are rounded: the same bytes for the same
    seed, but not those of other engines. Clients whose
    batches differ in size train one by one; so do all clients of an app that does not
    come from `client_app`.
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
        results = trained(app, [messages[i] for i in asked], list(asked.values()))
        for (i, working), result in zip(asked.items(), results, strict=True):
            replies[i] = self.concluded(messages[i], working, result)
        return [reply for reply in replies if reply is not None]


@dataclass(frozen=True)
class _Asked:
    """A step that one of the clients is to take."""

    place: int
    client: SafeDSHBClient
    step: Step
    record: ArrayRecord
    parameters: Arrays


def trained(
    app: PrivateClientApp, messages: list[Message], contexts: list[Context]
) -> list[Message | Exception]:
    """Answer training messages for several nodes of this process at once.

    The arrays that messages share are decoded once. What one client refuses is no
    matter to the others.

    Returns
    -------
    list of (reply, or what the app would have raised)
    """
    results: dict[int, Message | Exception] = {}
    groups: dict[tuple[int, int, float], list[_Asked]] = {}
    models: dict[tuple[int, ...], Arrays] = {}
    for i, (message, context) in enumerate(zip(messages, contexts, strict=True)):
        try:
            record, config = content_of(message)
            key = tuple(id(array.data) for array in record.values())
            parameters = models.get(key) or models.setdefault(key, read(record))
            client = app.make_client(context)
            if type(client).fit is not SafeDSHBClient.fit:
                fitted = client.fit(parameters, config)
                results[i] = reply_with(message, record, *fitted[:2])
                continue
            step = client.asked(parameters, config)
        except Exception as error:
            results[i] = error
            continue
        try:
            charge(client, step)
        except Exception as error:
            results[i] = refusal(error)
            continue
        asked = _Asked(i, client, step, record, parameters)
        shared = (id(client.gradients), id(parameters), client.weight_decay)
        groups.setdefault(shared, []).append(asked)
    for group in groups.values():
        for one, found in zip(group, _gradients(group), strict=True):
            results[one.place] = _finished(messages[one.place], one, found)
    return [results[i] for i in range(len(messages))]


def _gradients(group: list[_Asked]) -> list[NDArray[np.float32] | Exception]:
    """Return the private gradients of a group; where that fails, of each alone."""
    takers = [(one.client, one.step) for one in group]
    try:
        return [*gradients(takers, group[0].parameters)]
    except Exception as error:
        if len(group) == 1:
            return [error]
    return [found for one in group for found in _gradients([one])]


def _finished(
    message: Message, one: _Asked, found: NDArray[np.float32] | Exception
) -> Message | Exception:
    if isinstance(found, Exception):
        return refusal(found)
    try:
        momentum = finish(one.client, one.step, found)
        count = one.client.plan.num_examples
        return reply_with(message, one.record, momentum, count)
    except Exception as error:
        return refusal(error)


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
