"""Objects that nodes pull: the model of a round is the same for all of them.

An object's id is the hash of its bytes, so an object is never out of date. The first
node that pulls one makes the SuperLink read it; the others wait for that, and get the
same bytes.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from weakref import WeakValueDictionary

from flwr_safedshb.flower.fleet import message_pb2
from flwr_safedshb.node.gate.wire import Answer


class Objects:
    """The answers that brought objects, the latest of them.

    Parameters
    ----------
    max_bytes : int
        Of all that are kept.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._bytes = max_bytes, 0
        self._kept: OrderedDict[str, Answer] = OrderedDict()
        self._coming: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def get(self, name: str, ask: Callable[[], Awaitable[Answer]]) -> Answer:
        """Return the answer with an object; ask for it if nobody has."""
        alone = self._coming.setdefault(name, asyncio.Lock())
        async with alone:
            if name not in self._kept:
                answer = await ask()
                content = answer.content()
                if not _brought(answer.status, content):
                    return answer
                # The bytes themselves: those of a call are let go of with it.
                self._keep(name, Answer(answer.status, content, answer.headers))
            self._kept.move_to_end(name)
            return self._kept[name]

    def _keep(self, name: str, answer: Answer) -> None:
        self._kept[name] = answer
        self._bytes += answer.size
        while self._bytes > self._max_bytes and len(self._kept) > 1:
            _, dropped = self._kept.popitem(last=False)
            self._bytes -= dropped.size


def is_coming(answer: Answer) -> bool:
    """Whether an object is known to the SuperLink, and not there yet."""
    if answer.status >= 400:
        return False
    found = message_pb2.PullObjectResponse.FromString(answer.content())
    return bool(found.object_found and not found.object_available)


def _brought(status: int, content: bytes) -> bool:
    """Whether an answer has an object in it; the next may."""
    if status >= 400:
        return False
    found = message_pb2.PullObjectResponse.FromString(content)
    return bool(found.object_available)
