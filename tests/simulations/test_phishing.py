"""LIBSVM's phishing data: by path, from the cache, downloaded over loopback."""

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from simulations.data import Phishing, phishing

FILE = Path(__file__).parents[3] / "shared" / "data" / "phishing"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(phishing.CACHE_VARIABLE, str(tmp_path / "cache"))
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


def literal_phishing() -> tuple[list[list[float]], list[int]]:
    inputs, labels = [], []
    for line in FILE.read_text().splitlines():
        label, *pairs = line.split()
        row = [0.0] * 68
        for pair in pairs:
            index, value = pair.split(":")
            row[int(index) - 1] = float(value)
        inputs.append(row)
        labels.append(int(label))
    return inputs, labels


def test_phishing_is_the_published_table() -> None:
    table = Phishing(str(FILE), 0.0).load()
    inputs, labels = literal_phishing()
    assert np.array_equal(table.inputs, np.array(inputs, np.float32))
    assert table.labels.tolist() == labels
    assert table.num_classes == 2
    assert sum(labels) == 6157
    # Half of the rows are repeated, and 64 inputs have both labels.
    by_row: dict[bytes, set[int]] = {}
    for row, label in zip(table.inputs, labels, strict=True):
        by_row.setdefault(row.tobytes(), set()).add(label)
    assert len(by_row) == 5849 - 64
    assert sum(len(found) for found in by_row.values()) == 5849


def test_a_folder_and_a_second_load_give_the_same(cache: Path) -> None:
    first = Phishing(str(FILE), 0.0).load()
    assert [path.suffix for path in cache.iterdir()] == [".npz"]
    second = Phishing(str(FILE.parent), 0.0).load()
    assert np.array_equal(first.inputs, second.inputs)
    assert np.array_equal(first.labels, second.labels)
    assert second.inputs.dtype == np.float32
    assert second.labels.dtype == np.int64


@pytest.mark.parametrize("rest", [0, 100, 100_000])
def test_a_damaged_parsed_cache_is_made_again(cache: Path, rest: int) -> None:
    first = Phishing(str(FILE), 0.0).load()
    (archive,) = cache.iterdir()
    whole = archive.read_bytes()
    archive.write_bytes(whole[:rest])
    assert np.array_equal(Phishing(str(FILE), 0.0).load().inputs, first.inputs)
    assert archive.stat().st_size == len(whole)


def test_a_download_is_cached_and_not_repeated(cache: Path) -> None:
    with served(FILE.read_bytes()) as (url, asked):
        first = Phishing(None, 0.0, url).load()
        second = Phishing(None, 0.0, url).load()
    assert asked == ["/phishing"]
    assert np.array_equal(first.inputs, second.inputs)
    assert (cache / "phishing").read_bytes() == FILE.read_bytes()
    # Nothing half-written is left beside them.
    assert sorted(path.suffix for path in cache.iterdir()) == ["", ".npz"]


@pytest.mark.parametrize("damage", ["changed", "cut", "longer"])
def test_a_corrupted_download_is_refused_and_not_cached(
    cache: Path, damage: str
) -> None:
    good = FILE.read_bytes()
    content = {
        "changed": good.replace(b"0.18257", b"0.18258", 1),
        "cut": good[:-1],
        "longer": good + b"\n",
    }[damage]
    with served(content) as (url, _):
        source = Phishing(None, 0.0, url)
        digest = hashlib.sha256(content).hexdigest()
        with pytest.raises(ValueError, match=f"{digest}.*try again.*data.path"):
            source.load()
    assert not cache.exists()
    with served(good) as (url, _):
        assert len(Phishing(None, 0.0, url).load()) == 11055


def test_a_corrupted_cache_is_refused(cache: Path) -> None:
    cache.mkdir()
    (cache / "phishing").write_bytes(FILE.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"cache/phishing has sha256.*remove it"):
        Phishing(None, 0.0, "http://127.0.0.1:1/").load()


@pytest.mark.parametrize("status", [None, 404])
def test_without_a_network_the_error_names_the_ways_out(
    cache: Path, status: int | None
) -> None:
    def load(url: str) -> None:
        ways = f"data.path=.*SAFEDSHB_DATA.*put it at {cache / 'phishing'}.*synthetic"
        with pytest.raises(ConnectionError, match=ways):
            Phishing(None, 0.0, url).load()

    if status is None:
        with served(b"") as (url, _):
            pass  # nobody listens there any more
        load(url)
    else:
        with served(b"", status) as (url, _):
            load(url)
    assert not cache.exists()


def test_a_cache_that_cannot_be_written_is_done_without(cache: Path) -> None:
    cache.write_text("a file where the folder would be")
    with served(FILE.read_bytes()) as (url, asked):
        for _ in range(2):
            assert len(Phishing(None, 0.0, url).load()) == 11055
    assert len(asked) == 2


def test_a_full_disk_leaves_nothing_half_written(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with served(FILE.read_bytes()) as (url, _):
        assert len(Phishing(None, 0.0, url).load()) == 11055
    assert list(cache.iterdir()) == []


def test_another_file_is_not_taken_for_phishing(tmp_path: Path) -> None:
    other = tmp_path / "phishing"
    with pytest.raises(FileNotFoundError, match=r"no file .*SAFEDSHB_DATA.*download"):
        Phishing(str(other), 0.0).load()
    other.write_text("1 1:1\n")
    with pytest.raises(ValueError, match="data=libsvm"):
        Phishing(str(tmp_path), 0.0).load()


def test_the_cache_is_in_the_users_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(phishing.CACHE_VARIABLE)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert phishing.cache_folder() == Path("/x/flwr-safedshb")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/h")
    assert phishing.cache_folder() == Path("/h/.cache/flwr-safedshb")
    monkeypatch.setattr("sys.platform", "darwin")
    assert phishing.cache_folder() == Path("/h/Library/Caches/flwr-safedshb")
    monkeypatch.setattr("sys.platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", "/l")
    assert phishing.cache_folder() == Path("/l/flwr-safedshb")
