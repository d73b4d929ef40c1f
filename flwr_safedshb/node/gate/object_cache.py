"""A cache of the objects that nodes pull: a round's model is the same for all of them.

An object's id is the hash of its bytes, so a cached object is never stale, and one that
a gate before this one has cached is as good.
"""

from __future__ import annotations

import asyncio
import os
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from weakref import WeakValueDictionary

from flwr_safedshb.flower.object_tree import is_object_id, message_pb2
from flwr_safedshb.node.gate.message_size import ObjectPart, measure_servers_object
from flwr_safedshb.node.gate.request import Response

# Objects whose children and size are remembered.
_MAX_PARTS = 50_000
_HEADERS = (("content-type", "application/protobuf"),)


class ObjectCache:
    """The latest responses that brought objects: files, up to `max_bytes`."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder, self._max_bytes, self._bytes = folder, max_bytes, 0
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._parts: OrderedDict[str, ObjectPart] = OrderedDict()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        for path in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime):
            if is_object_id(path.name):
                self._add(path.name, path.stat().st_size)
            else:
                path.unlink()

    async def get(
        self, name: str, resources: ExitStack, fetch: Callable[[], Awaitable[Response]]
    ) -> Response:
        """Return the response with an object; fetch it once, whoever else waits.

        Its file is closed with `resources`.
        """
        lock = self._locks.setdefault(name, asyncio.Lock())
        async with lock:
            if name not in self._sizes:
                response = await fetch()
                found = parse_object(response)
                if found is None or not found.object_available:
                    return response
                self._keep(name, response)
                self._note(name, found.object_content)
            self._sizes.move_to_end(name)
            file = resources.enter_context((self._folder / name).open("rb"))
            return Response(200, file, _HEADERS)

    def find_part(self, name: str) -> ObjectPart | None:
        """Return the size and the children of an object that has been there."""
        if name not in self._parts and name in self._sizes:
            with (self._folder / name).open("rb") as file:
                found = parse_object(Response(200, file))
            self._note(name, found.object_content if found else b"")
        return self._parts.get(name)

    def _note(self, name: str, content: bytes) -> None:
        self._parts[name] = measure_servers_object(content)
        if len(self._parts) > _MAX_PARTS:
            self._parts.popitem(last=False)

    def _keep(self, name: str, response: Response) -> None:
        unfinished = self._folder / f".{name}"
        with unfinished.open("wb") as file:
            file.writelines(response.chunks())
        os.replace(unfinished, self._folder / name)
        self._add(name, response.size)

    def _add(self, name: str, size: int) -> None:
        self._sizes[name] = size
        self._bytes += size
        while self._bytes > self._max_bytes and len(self._sizes) > 1:
            dropped, size = self._sizes.popitem(last=False)
            self._bytes -= size
            with suppress(FileNotFoundError):
                (self._folder / dropped).unlink()


def parse_object(response: Response) -> message_pb2.PullObjectResponse | None:
    """Parse the response to a call for an object; None if the call failed."""
    if response.status >= 400:
        return None
    found = message_pb2.PullObjectResponse()
    found.ParseFromString(response.read_body())
    return found
