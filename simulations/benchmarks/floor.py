"""The least that a round of a federation can take: bare HTTPS, and the steps.

The server hands out the model and takes one reply from every node, over connections
that stay open, and the nodes' steps share the processors.
"""

from __future__ import annotations

import os
import ssl
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPSConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median

from flwr.app import Context, RecordDict
from torch import nn

from flwr_safedshb.client import SafeDSHBClient
from flwr_safedshb.privacy.plan import PrivacyPlan
from flwr_safedshb.privacy.randomness.noise import SeededRandomness
from simulations.benchmarks.federated import BATCH, EXAMPLES, loaded
from simulations.loopback import Credentials

TURNS = 5


def floor(folder: Path, num_nodes: int, hidden: int) -> float:
    """Return the seconds of a round that only sends, steps and answers."""
    model, _ = loaded(hidden)
    size = 4 * sum(parameter.numel() for parameter in model.parameters())
    return _exchange(folder, num_nodes, size) + _steps(num_nodes, hidden)


def _steps(num_nodes: int, hidden: int) -> float:
    """Return the seconds of all nodes' steps, spread over the processors."""
    model, data = loaded(hidden)
    client = SafeDSHBClient(
        model,
        nn.BCEWithLogitsLoss(),
        data,
        PrivacyPlan(1.0, 1.0, BATCH, EXAMPLES),
        Context(1, 1, {"partition-id": 0}, RecordDict(), {}),
        randomness=SeededRandomness(0),
    )
    arrays = [parameter.detach().numpy().copy() for parameter in model.parameters()]
    seconds = []
    for step in range(TURNS):
        start = time.perf_counter()
        client.fit(arrays, {"step": step, "momentum": 0.9})
        seconds.append(time.perf_counter() - start)
    return median(seconds) * num_nodes / min(num_nodes, os.cpu_count() or 1)


def _exchange(folder: Path, num_nodes: int, size: int) -> float:
    """Return the seconds in which all nodes get the model and send as much."""
    credentials = Credentials(folder)
    body = os.urandom(size)

    with _server(credentials, body) as port, ThreadPoolExecutor(num_nodes) as pool:
        trust = ssl.create_default_context(cafile=str(credentials.ca))
        links = [
            HTTPSConnection("127.0.0.1", port, context=trust) for _ in range(num_nodes)
        ]

        def visit(link: HTTPSConnection) -> None:
            for method, sent in (("GET", None), ("POST", body)):
                link.request(method, "/", sent)
                link.getresponse().read()

        seconds = []
        for _ in range(1 + TURNS):
            start = time.perf_counter()
            list(pool.map(visit, links))
            seconds.append(time.perf_counter() - start)
        for link in links:
            link.close()
    return median(seconds[1:])  # in the first they connect


@contextmanager
def _server(credentials: Credentials, body: bytes) -> Iterator[int]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(body)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self._answer(b"")

        def _answer(self, content: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(credentials.certificate, credentials.certificate_key)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()
