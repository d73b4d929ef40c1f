"""Serve Prometheus metrics, and small pages, on the loopback only.

``pip install 'flwr-safedshb[metrics]'`` brings prometheus-client, which writes the
format. Components describe what they know as `Sample`s and need no library for that.
"""

from __future__ import annotations

import ipaddress
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal

METRICS_PATH = "/metrics"
# Seconds after which a caller that sends nothing is left.
_PATIENCE_SECONDS = 10.0
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}

# What a path answers: the type of the content, and the content.
Page = Callable[[], tuple[str, bytes]]


@dataclass(frozen=True)
class Sample:
    """One number of a metric.

    Attributes
    ----------
    name : str
        Of the metric, such as ``safedshb_node_epsilon_spent``; a counter's without
        ``_total``.
    help : str
    value : float
    labels : mapping of str to str
        Which number of the metric it is.
    kind : {"gauge", "counter"}
    """

    name: str
    help: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)
    kind: Literal["gauge", "counter"] = "gauge"


def render_metrics(samples: Iterable[Sample]) -> bytes:
    """Return samples in Prometheus' text format; those of a metric share its labels.

    Raises
    ------
    ValueError
        If prometheus-client is not installed.
    """
    try:
        from prometheus_client import CollectorRegistry, generate_latest
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    except ImportError as error:
        raise ValueError(
            "metrics need prometheus-client: pip install 'flwr-safedshb[metrics]'"
        ) from error

    families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
    for sample in samples:
        kinds = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}
        family = families.get(sample.name)
        if family is None:
            labels = [*sample.labels]
            family = kinds[sample.kind](sample.name, sample.help, labels=labels)
            families[sample.name] = family
        family.add_metric([*sample.labels.values()], sample.value)

    class Collector:
        def collect(self) -> Iterable[CounterMetricFamily | GaugeMetricFamily]:
            return families.values()

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collector())
    return bytes(generate_latest(registry))


def make_metrics_page(collect: Callable[[], Iterable[Sample]]) -> Page:
    """Return the page of metrics for Prometheus; `collect` is called for each visit."""
    render_metrics(())  # so that a missing library is found at the start
    return lambda: ("text/plain; version=0.0.4", render_metrics(collect()))


class LoopbackServer:
    """Serve pages by HTTP in a thread; leave the context to stop it.

    Parameters
    ----------
    listen : str
        host:port; the host must be a loopback address.
    pages : mapping of str to Page
        By path.
    """

    def __init__(self, listen: str, pages: Mapping[str, Page]) -> None:
        address = parse_loopback(listen)
        handler = _make_handler(dict(pages), address[0])
        self._server = ThreadingHTTPServer(address, handler)
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def __enter__(self) -> LoopbackServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def parse_loopback(listen: str) -> tuple[str, int]:
    """Return the address and the port of ``host:port`` on the loopback.

    Raises
    ------
    ValueError
        If it is another host's, or cannot be understood.
    """
    host, _, port = listen.rpartition(":")
    host = "127.0.0.1" if host == "localhost" else host
    try:
        if ipaddress.IPv4Address(host).is_loopback and 0 <= int(port) < 2**16:
            return host, int(port)
    except ValueError:
        pass
    raise ValueError(
        f"{listen} must be 127.0.0.1:PORT: what is served there asks nobody for "
        "credentials; reach it from elsewhere through `ssh -L`"
    )


def _make_handler(
    pages: Mapping[str, Page], own_host: str
) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = _PATIENCE_SECONDS

        def do_GET(self) -> None:
            page = pages.get(self.path.partition("?")[0])
            # A web page elsewhere could give its own name this address.
            host = str(self.headers.get("Host", "")).rpartition(":")[0]
            if page is None or host not in ("localhost", own_host):
                self.send_error(404)
                return
            kind, content = page()
            self.send_response(200)
            for name, value in {**_HEADERS, "Content-Type": kind}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    return Handler
