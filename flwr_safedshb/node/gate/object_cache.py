"""A cache of the objects that nodes pull: a round's model is the same for all of them.

An object's id is the hash of its bytes, so a cached object is never stale.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from weakref import WeakValueDictionary

from flwr_safedshb.flower.object_tree import message_pb2
from flwr_safedshb.node.gate.http import Response


class ObjectCache:
    """The latest responses that brought objects, up to `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._bytes = max_bytes, 0
        self._cached: OrderedDict[str, Response] = OrderedDict()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def get(
        self, name: str, fetch: Callable[[], Awaitable[Response]]
    ) -> Response:
        """Return the response with an object; fetch it once, whoever else waits."""
        lock = self._locks.setdefault(name, asyncio.Lock())
        async with lock:
            if name not in self._cached:
                response = await fetch()
                found = parse_object(response)
                if found is None or not found.object_available:
                    return response
                # The bytes themselves: the body of a call is freed with it.
                content = response.read_body()
                self._add(name, Response(response.status, content, response.headers))
            self._cached.move_to_end(name)
            return self._cached[name]

    def _add(self, name: str, response: Response) -> None:
        self._cached[name] = response
        self._bytes += response.size
        while self._bytes > self._max_bytes and len(self._cached) > 1:
            _, dropped = self._cached.popitem(last=False)
            self._bytes -= dropped.size


def parse_object(response: Response) -> message_pb2.PullObjectResponse | None:
    """Parse the response to a call for an object; None if the call failed."""
    if response.status >= 400:
        return None
    found = message_pb2.PullObjectResponse()
    found.ParseFromString(response.read_body())
    return found
