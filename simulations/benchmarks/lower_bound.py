"""The least that a round of a federation can take: a bare exchange, and the steps.

The server hands out the model and takes one reply from every node, over TLS connections
that stay open, and the nodes' steps share the processors.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import time
from pathlib import Path
from statistics import median

from flwr.app import Context, RecordDict
from torch import nn

from flwr_safedshb.client import SafeDSHBClient
from flwr_safedshb.privacy.randomness.noise import SeededRandomness
from simulations.benchmarks.federated import PLAN, load_task
from simulations.loopback import Credentials

TURNS = 5


def measure_lower_bound(folder: Path, num_nodes: int, hidden: int) -> float:
    """Return the seconds of a round that only sends, steps and answers."""
    model, data = load_task(hidden)
    loss, randomness = nn.BCEWithLogitsLoss(), SeededRandomness(0)
    context = Context(1, 1, {"partition-id": 0}, RecordDict(), {})
    client = SafeDSHBClient(model, loss, data, PLAN, context, randomness=randomness)
    arrays = [parameter.detach().numpy().copy() for parameter in model.parameters()]
    seconds = []
    for step in range(TURNS):
        start = time.perf_counter()
        client.fit(arrays, {"step": step, "momentum": 0.9})
        seconds.append(time.perf_counter() - start)
    steps = median(seconds) * num_nodes / min(num_nodes, os.cpu_count() or 1)
    body = os.urandom(sum(array.nbytes for array in arrays))
    return steps + asyncio.run(_time_exchange(Credentials(folder), num_nodes, body))


async def _time_exchange(
    credentials: Credentials, num_nodes: int, body: bytes
) -> float:
    """Return the seconds in which all nodes get a body and send as much."""
    serving: set[asyncio.Task[None] | None] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.add(asyncio.current_task())
        while await reader.read(1):  # a node asks, by one byte
            writer.write(body)
            await reader.readexactly(len(body))
            writer.write(b"!")
        writer.close()

    own = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    own.load_cert_chain(credentials.certificate, credentials.certificate_key)
    trust = ssl.create_default_context(cafile=str(credentials.ca))
    server = await asyncio.start_server(serve, "127.0.0.1", ssl=own)
    port = server.sockets[0].getsockname()[1]
    async with server:
        links = [
            await asyncio.open_connection("127.0.0.1", port, ssl=trust)
            for _ in range(num_nodes)
        ]

        async def visit(
            reader: asyncio.StreamReader, writer: asyncio.StreamWriter
        ) -> None:
            writer.write(b"?")
            await reader.readexactly(len(body))
            writer.write(body)
            await reader.readexactly(1)

        seconds = []
        for _ in range(TURNS):
            start = time.perf_counter()
            await asyncio.gather(*(visit(*link) for link in links))
            seconds.append(time.perf_counter() - start)
        for _, writer in links:
            writer.close()
        await asyncio.gather(*filter(None, serving))
    return median(seconds)
