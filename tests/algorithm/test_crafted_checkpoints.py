"""Whatever is in a checkpoint's place: the same checkpoint, or one clear error."""

import io
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.lib import format as npy

from flwr_safedshb.algorithm import checkpoint
from flwr_safedshb.algorithm.progress import Progress
from tests.algorithm.test_checkpoint import progress

QUICK = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
Content = dict[str, object]
FIRST, SECOND = (f"model/{name}.npy" for name in progress().arrays)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "run.npz"
    checkpoint.save(path, progress())
    return path


def parts_of(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def pack(path: Path, parts: dict[str, bytes], kind: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path, "w", kind) as archive:
        for name, content in parts.items():
            archive.writestr(name, content)


def written(array: np.ndarray) -> bytes:
    with io.BytesIO() as file:
        np.save(file, array, allow_pickle=True)
        return file.getvalue()


def content_of(path: Path) -> Content:
    with np.load(path) as file:
        found: Content = json.loads(file["content"].tobytes())
        return found


def set_text(path: Path, text: bytes) -> None:
    parts = parts_of(path)
    parts["content.npy"] = written(np.frombuffer(text, np.uint8))
    pack(path, parts)


def refused(path: Path, model_bytes: int = 2**20) -> None:
    with pytest.raises(ValueError, match="is not a checkpoint"):
        checkpoint.load(path, model_bytes)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("step", -5),
        ("step", 10),
        ("step", 1.5),
        ("step", True),
        ("step", "4"),
        ("step", 10**400),
        ("seed", -1),
        ("seed", None),
        ("num_rounds", 2**64),
        ("num_rounds", 3),
        ("session", "=1+1"),
        ("session", "two\nlines"),
        ("session", 7),
        ("names", ["weight"]),
        ("names", ["bias", "bias"]),
        ("names", ["weight", "\ud800"]),
        ("names", "ab"),
        ("names", {"a": 1}),
        ("kept", 1),
        ("kept", False),
        ("format", 2),
        ("settings", []),
        ("settings", {"nested": json.loads("[" * 40 + "]" * 40)}),
        ("histories", {}),
        ("histories", {"train": []}),
        ("histories", [1]),
    ],
)
def test_values_that_no_run_has(path: Path, key: str, value: object) -> None:
    set_text(path, json.dumps({**content_of(path), key: value}).encode())
    refused(path)


@pytest.mark.parametrize(
    "train",
    [
        {"-1": {}},
        {"\u0661": {}},
        {"1.5": {}},
        {"x": {}},
        {"1": {"loss": "text"}},
        {"1": {"loss": None}},
        {"1": {"loss": 2**64}},
        {"1": {"loss": [1, 0.5]}},
        {"1": {"loss": {"a": 1}}},
        {"1": []},
    ],
)
def test_metrics_that_no_round_has(path: Path, train: object) -> None:
    found = content_of(path)
    histories = found["histories"]
    assert isinstance(histories, dict)
    found["histories"] = {**histories, "train": train}
    set_text(path, json.dumps(found).encode())
    refused(path)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"null",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"9" * 10_000,
        b"\xff\xfe",
        b'{"format": 2}',
    ],
    ids=["empty", "null", "lists", "objects", "digits", "bytes", "bare"],
)
def test_texts_that_are_no_checkpoint(path: Path, text: bytes) -> None:
    set_text(path, text)
    refused(path)


def headed(shape: str, descr: str = "'<f4'", body: bytes = b"") -> bytes:
    with io.BytesIO() as file:
        file.write(npy.magic(1, 0))
        text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}"
        line = text.encode().ljust(117) + b"\n"
        file.write(len(line).to_bytes(2, "little") + line + body)
        return file.getvalue()


@pytest.mark.parametrize(
    "part",
    [
        written(np.array([{"a": 1}], dtype=object)),
        written(np.array(["text"])),
        written(np.array([(1, 2.0)], dtype="i4,f4")),
        headed("(1 << 40,)"),
        headed("(1099511627776,)"),
        headed("(-1,)", body=b"\0" * 4),
        headed("(10 ** 10,)"),
        headed("(" * 60 + ")" * 60),
        headed("(2,)", "'<f400'", b"\0" * 8),
        headed("(0, 18446744073709551616)"),
        headed("(2,)", "'|O'", b"\0" * 16),
        b"\x93NUMPY\x09\x00",
        b"",
    ],
)
def test_arrays_that_no_model_has(path: Path, part: bytes) -> None:
    parts = parts_of(path)
    parts[FIRST] = part
    pack(path, parts)
    refused(path)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_no_numbers(path: Path, value: float) -> None:
    parts = parts_of(path)
    array = np.load(io.BytesIO(parts[FIRST]))
    checkpoint.load(path)
    array.flat[0] = value
    pack(path, {**parts, FIRST: written(array)})
    refused(path)


def test_the_model_that_is_kept_is_the_same_one(path: Path) -> None:
    parts = parts_of(path)
    parts[FIRST.replace("model", "kept")] = written(np.zeros(1, np.float32))
    pack(path, parts)
    refused(path)


def compress(path: Path) -> None:
    pack(path, parts_of(path), zipfile.ZIP_DEFLATED)


def bomb(path: Path) -> None:
    """64 megabytes of zeros in 64 kilobytes; a megabyte is all that is allowed."""
    body = headed("(67108864,)", "'|b1'")
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open(FIRST, "w") as file,
    ):
        file.write(body)
        for _ in range(64):
            file.write(bytes(2**20))
    assert path.stat().st_size < 2**17


def add_a_part(path: Path) -> None:
    pack(path, {**parts_of(path), "more.npy": written(np.zeros(1))})


def repeat_a_part(path: Path) -> None:
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(match="Duplicate"):
        archive.writestr("content.npy", parts_of(path)["content.npy"])


def leave_a_part(path: Path) -> None:
    parts = parts_of(path)
    del parts[SECOND]
    pack(path, parts)


def overlap(path: Path) -> None:
    """Two hundred names for the bytes of one part."""
    with zipfile.ZipFile(path, "a") as archive:
        for number in range(200):
            (info,) = [i for i in archive.infolist() if i.filename == FIRST]
            copy = zipfile.ZipInfo(f"model/more-{number}.npy")
            for name in ("header_offset", "file_size", "compress_size", "CRC"):
                setattr(copy, name, getattr(info, name))
            archive.filelist.append(copy)
            archive.__dict__["_didModify"] = True


def make_it_long(path: Path) -> None:
    os.truncate(path, 2**40)


def make_it_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    "change",
    [
        compress,
        bomb,
        add_a_part,
        repeat_a_part,
        leave_a_part,
        overlap,
        make_it_long,
        make_it_a_pipe,
    ],
)
def test_files_that_would_take_more_than_they_are(
    path: Path, change: Callable[[Path], None]
) -> None:
    change(path)
    refused(path)


def test_a_file_larger_than_two_models_is_not_read(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "_MAX_TEXT", 0)
    refused(path, 16)


@QUICK
@given(st.data())
def test_bytes_that_were_changed(path: Path, data: st.DataObject) -> None:
    checkpoint.save(path, progress())
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content) - 1))
        match data.draw(st.sampled_from(["set", "insert", "cut", "copy"])):
            case "set":
                content[place] = data.draw(st.integers(0, 255))
            case "insert":
                content[place:place] = data.draw(st.binary(max_size=8))
            case "cut":
                del content[place : place + data.draw(st.integers(1, 50))]
            case _:
                content[place:place] = content[: data.draw(st.integers(0, 200))]
        content = content or bytearray(b"x")
    path.write_bytes(content)
    assert loaded(path) in (None, progress())


def loaded(path: Path) -> Progress | None:
    """Return what a file holds, or None if it is refused as it should be."""
    try:
        return checkpoint.load(path, 2**20)
    except ValueError as error:
        if "is not a checkpoint" not in str(error):
            raise
    return None


KEYS = ["format", "session", "seed", "num_rounds", "step", "names", "kept"]
KEYS += ["histories", "settings"]
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)


@QUICK
@given(key=st.sampled_from(KEYS), value=JSON)
def test_texts_that_were_changed(path: Path, key: str, value: object) -> None:
    """What is loaded is a progress that can be saved and loaded again."""
    checkpoint.save(path, progress())
    set_text(path, json.dumps({**content_of(path), key: value}).encode())
    found = loaded(path)
    if found is None:
        return
    assert 0 <= found.step <= found.num_rounds
    checkpoint.save(path, found)
    again = checkpoint.load(path)
    assert again is not None
    assert repr(again) == repr(found)
