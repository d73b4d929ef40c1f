"""Metrics and pages are served to this machine alone."""

import urllib.error
import urllib.request

import pytest

from flwr_safedshb.node.metrics import (
    METRICS_PATH,
    LoopbackServer,
    Sample,
    make_metrics_page,
    parse_loopback,
    render_metrics,
)

pytest.importorskip("prometheus_client")

SAMPLES = [
    Sample("safedshb_spent", "Epsilon.", 0.5, {"node": 'a "b"\n'}),
    Sample("safedshb_spent", "Epsilon.", 2.0, {"node": "c"}),
    Sample("safedshb_answers", "Answers.", 3, kind="counter"),
]


def test_prometheus_reads_the_metrics_back() -> None:
    from prometheus_client.parser import text_string_to_metric_families

    text = render_metrics(SAMPLES).decode()
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert found == {
        ("safedshb_spent", 'a "b"\n'): 0.5,
        ("safedshb_spent", "c"): 2.0,
        ("safedshb_answers_total",): 3.0,
    }


def fetch(port: int, path: str, host: str | None = None) -> bytes:
    headers = {} if host is None else {"Host": host}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return bytes(answer.read())


def test_pages_are_served_by_path_and_made_anew_for_each_visit() -> None:
    samples: list[Sample] = []
    pages = {METRICS_PATH: make_metrics_page(lambda: samples)}
    with LoopbackServer("127.0.0.1:0", pages) as server:
        assert fetch(server.port, METRICS_PATH) == b""
        samples += SAMPLES
        assert b"safedshb_answers_total 3.0" in fetch(server.port, METRICS_PATH)
        with pytest.raises(urllib.error.HTTPError, match="404"):
            fetch(server.port, "/etc/passwd")


def test_a_web_page_under_another_name_cannot_read_them() -> None:
    pages = {METRICS_PATH: make_metrics_page(lambda: SAMPLES)}
    with LoopbackServer("127.0.0.1:0", pages) as server:
        host = f"localhost:{server.port}"
        assert fetch(server.port, METRICS_PATH, host)
        with pytest.raises(urllib.error.HTTPError, match="404"):
            fetch(server.port, METRICS_PATH, f"evil.example:{server.port}")


@pytest.mark.parametrize(
    "listen", ["0.0.0.0:9100", "example.org:9100", "9100", "127.0.0.1:x", "::1:80", ""]
)
def test_no_other_address_than_the_loopback_is_served(listen: str) -> None:
    with pytest.raises(ValueError, match=r"must be 127\.0\.0\.1:PORT"):
        parse_loopback(listen)
