"""LIBSVM's phishing data: by path, from the cache, downloaded over loopback.

Most tests read a stand-in that they write themselves; what is true of the published
file alone is tested where SAFEDSHB_DATA has it.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from simulations.data import Phishing
from tests.phishing import ROWS, StandIn, literally


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SAFEDSHB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@contextmanager
def served(content: bytes, status: int = 200) -> Iterator[tuple[str, list[str]]]:
    """Serve one content over loopback; yield its address and the paths asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/phishing", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_the_published_table(real_phishing: Path) -> None:
    table = Phishing(str(real_phishing), 0.0).load()
    inputs, labels = literally(real_phishing)
    assert np.array_equal(table.inputs, np.array(inputs, np.float32))
    assert table.labels.tolist() == labels
    assert sum(labels) == 6157
    # Half of the rows are repeated, and 64 inputs have both labels.
    by_row: dict[bytes, set[int]] = {}
    for row, label in zip(table.inputs, labels, strict=True):
        by_row.setdefault(row.tobytes(), set()).add(label)
    assert len(by_row) == 5849 - 64
    assert sum(len(found) for found in by_row.values()) == 5849


def test_a_file_and_its_folder_give_the_same_table(stand_in: StandIn) -> None:
    inputs, labels = literally(stand_in.file)
    for path in (stand_in.file, stand_in.file.parent):
        table = Phishing(str(path), 0.2, sha256=stand_in.sha256).load()
        assert np.array_equal(table.inputs, np.array(inputs, np.float32))
        assert table.labels.tolist() == labels
        assert (table.num_classes, table.test) == (2, 0.2)
        assert table.inputs.dtype == np.float32
        assert table.labels.dtype == np.int64


def test_a_download_is_cached_and_not_repeated(cache: Path, stand_in: StandIn) -> None:
    with served(stand_in.file.read_bytes()) as (url, asked):
        first = stand_in.downloaded(url).load()
        second = stand_in.downloaded(url).load()
    assert asked == ["/phishing"]
    for table in (first, second):
        assert np.array_equal(table.inputs, stand_in.source().load().inputs)
    # Nothing half-written is left beside it.
    (cached,) = cache.iterdir()
    assert cached.read_bytes() == stand_in.file.read_bytes()


@pytest.mark.parametrize("damage", ["changed", "cut", "longer"])
def test_a_corrupted_download_is_refused_and_not_cached(
    cache: Path, stand_in: StandIn, damage: str
) -> None:
    good = stand_in.file.read_bytes()
    content = {
        "changed": good.replace(b"0.18257", b"0.18258", 1),
        "cut": good[:-1],
        "longer": good + b"\n",
    }[damage]
    assert content != good
    with (
        served(content) as (url, _),
        pytest.raises(ValueError, match=f"hash.*{stand_in.sha256}"),
    ):
        stand_in.downloaded(url).load()
    assert list(cache.iterdir()) == []
    with served(good) as (url, _):
        assert len(stand_in.downloaded(url).load()) == ROWS


def test_a_corrupted_cache_is_downloaded_again(cache: Path, stand_in: StandIn) -> None:
    cache.mkdir()
    (cache / "phishing").write_bytes(stand_in.file.read_bytes()[:-1])
    with served(stand_in.file.read_bytes()) as (url, asked):
        assert len(stand_in.downloaded(url).load()) == ROWS
    assert len(asked) == 1


def test_without_a_network_the_error_names_the_ways_out(
    cache: Path, stand_in: StandIn
) -> None:
    ways = rf"downloaded to {cache / 'phishing'} \(%s.*data.path=.*SAFEDSHB_DATA.*synth"
    with served(b"") as (closed, _):
        pass  # nobody listens there any more
    with pytest.raises(OSError, match=ways % ".*refused"):
        stand_in.downloaded(closed).load()
    with served(b"", 404) as (url, _), pytest.raises(OSError, match=ways % "404"):
        stand_in.downloaded(url).load()
    assert list(cache.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_named(
    cache: Path, stand_in: StandIn
) -> None:
    cache.write_text("a file where the folder would be")
    with (
        served(stand_in.file.read_bytes()) as (url, _),
        pytest.raises(OSError, match=f"{cache}.*SAFEDSHB_CACHE"),
    ):
        stand_in.downloaded(url).load()


def test_another_file_is_not_taken_for_phishing(
    tmp_path: Path, stand_in: StandIn
) -> None:
    other = tmp_path / "phishing"
    with pytest.raises(FileNotFoundError, match=r"no file .*SAFEDSHB_DATA.*download"):
        Phishing(str(other), 0.0).load()
    with pytest.raises(ValueError, match="data=libsvm"):
        Phishing(str(stand_in.file), 0.0).load()
