"""Other users of a node's machine read nothing, change nothing, and are not trusted."""

import grp
import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord

from flwr_safedshb import cli
from flwr_safedshb.algorithm.checkpoint import save
from flwr_safedshb.algorithm.progress import Progress
from flwr_safedshb.algorithm.refusal import RefusedError
from flwr_safedshb.atomic_io import make_private_folder, replace_file
from flwr_safedshb.node import service
from flwr_safedshb.node.doctor import machine
from flwr_safedshb.node.node_file import NodeFile
from flwr_safedshb.node.service import NodeService, is_own_port
from flwr_safedshb.node.stop_request import StopRequest
from simulations.loopback.credentials import SCRIPT
from tests.clients import THETA, make, node

NOBODY = 65534
# A group that no user of the machine is known to have to themselves.
USERS = 54321
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root makes other users")


@pytest.fixture(autouse=True)
def no_umask() -> Iterator[None]:
    """Whatever is made is open to everybody unless the program says otherwise."""
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.fixture
def place() -> Iterator[Path]:
    """Return a folder that other users can come to, which pytest's own is not."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_what_is_made_is_private_whatever_the_umask(place: Path) -> None:
    make_private_folder(place / "a" / "b")
    assert mode(place / "a") == mode(place / "a" / "b") == 0o700
    replace_file(place / "c" / "file", lambda file: file.write(b"x"))
    assert (mode(place / "c"), mode(place / "c" / "file")) == (0o755, 0o600)


def loosen(path: Path) -> None:
    path.chmod(0o770)


def open_above(path: Path) -> None:
    path.parent.chmod(0o777)


def open_above_to_a_group(path: Path) -> None:
    os.chown(path.parent, -1, USERS)
    path.parent.chmod(0o770)


def give_away(path: Path) -> None:
    os.chown(path, NOBODY, NOBODY)


def link_of_another(path: Path) -> None:
    path.rename(path.with_name("real"))
    path.symlink_to(path.with_name("real"))
    os.lchown(path, NOBODY, NOBODY)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (loosen, "others can write"),
        (open_above, "everybody can write"),
        pytest.param(open_above_to_a_group, "others of group", marks=as_root),
        pytest.param(give_away, "belongs to user 65534", marks=as_root),
        pytest.param(link_of_another, "a link that somebody else", marks=as_root),
    ],
)
def test_a_folder_that_another_may_change_is_not_trusted(
    place: Path,
    change: Callable[[Path], None],
    told: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    state = place / "node" / "state"
    make_private_folder(state)
    change(state)
    with pytest.raises(PermissionError, match=told):
        make_private_folder(state)
    with pytest.raises(RefusedError, match="ledger of this node cannot be used"):
        make(node(state.parent)).fit([*THETA], {"step": 0, "momentum": 0.5})
    assert told in caplog.text
    assert not [*state.iterdir()]
    verdicts = [check.verdict for check in machine.check_state_dir(state, "ledger")]
    assert verdicts == ["failed"]


def test_a_group_of_ones_own_above_is_as_good(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    me = pwd.getpwuid(os.geteuid())
    other = next(user for user in pwd.getpwall() if user.pw_uid not in (0, me.pw_uid))
    for known, shared in (([me], False), ([me, other], True)):
        group = grp.struct_group(("g", "x", place.stat().st_gid, []))
        users = [pwd.struct_passwd((*u[:3], group.gr_gid, *u[4:])) for u in known]
        monkeypatch.setattr(grp, "getgrgid", lambda gid, group=group: group)
        monkeypatch.setattr(pwd, "getpwall", lambda users=users: users)
        (place / "above").mkdir(exist_ok=True)
        (place / "above").chmod(0o770)
        if shared:
            with pytest.raises(PermissionError, match="others of group"):
                make_private_folder(place / "above" / "state")
        else:
            make_private_folder(place / "above" / "state")


def test_a_sticky_folder_above_is_as_good_as_ones_own(place: Path) -> None:
    place.chmod(0o1777)
    assert make_private_folder(place / "state") == place / "state"


@contextmanager
def listening_as(user: int) -> Iterator[tuple[int, Callable[[], int]]]:
    """Let a user listen; yield the port, and what says how many have called there."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.setgroups([])
        os.setuid(user)
        with socket.create_server(("127.0.0.1", 0)) as mine:
            os.write(write, str(mine.getsockname()[1]).encode())
            while True:
                mine.accept()[0].close()
                os.write(write, b"!")
    port = int(os.read(read, 16))
    os.set_blocking(read, False)

    def calls() -> int:
        try:
            return len(os.read(read, 999))
        except BlockingIOError:
            return 0

    try:
        yield port, calls
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@as_root
@pytest.mark.process
def test_a_port_that_another_user_has_taken_is_not_asked_for_work(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mine:
        port = int(mine.getsockname()[1])
        assert is_own_port(port)
    assert not is_own_port(port)
    with listening_as(NOBODY) as (port, calls):
        assert not is_own_port(port)
        socket.create_connection(("127.0.0.1", port)).close()
        while not calls():
            time.sleep(0.01)
        # A SuperNode that could not listen there, and ends.
        monkeypatch.setattr(service, "find_free_port", lambda: port)
        monkeypatch.setattr(
            NodeService, "_make_command", lambda self, folder, port: ["sleep", "0.5"]
        )
        node = NodeFile(place / "node.toml", {}, None)
        nobody = NodeService(node, insecure="127.0.0.1:1")
        with StopRequest(pytest.fail) as stop:
            nobody._serve(None, place, b"x" * 32, stop)  # type: ignore[arg-type]
        assert not calls()


def trespass(top: Path) -> tuple[set[str], set[str]]:
    """Say which files another user can read, and what it can change."""
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            found = json.dumps(_tried(top)).encode()
            os.write(write, found)
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as answer:
        readable, changeable = json.loads(answer.read())
    os.wait()
    return {*readable}, {*changeable}


def _tried(top: Path) -> tuple[list[str], list[str]]:
    readable, changeable = [], []
    for folder, _, names in os.walk(top):
        here = Path(folder)
        with suppress(OSError):
            (here / "mine").touch()
            changeable.append(str(here.relative_to(top)))
        for name in names:
            path = here / name
            with suppress(OSError):
                path.read_bytes()
                readable.append(str(path.relative_to(top)))
            for change in (lambda p: p.open("ab").close(), Path.unlink):
                with suppress(OSError):
                    change(path)
                    changeable.append(str(path.relative_to(top)))
    return readable, changeable


@as_root
@pytest.mark.process
def test_a_second_user_reads_only_what_is_public_and_changes_nothing(
    place: Path,
) -> None:
    client = make(node(place))
    client.fit([*THETA], {"step": 0, "momentum": 0.5, "session": "s"})
    export = ["ledger", "export", str(place / "state")]
    assert cli.main([*export, "--output", str(place / "charges.csv")]) == 0
    assert cli.main(["kit", str(place / "kit")]) == 0
    arrays = ArrayRecord({"w": Array(np.zeros(2, np.float32))})
    save(place / "server" / "run.npz", Progress("s", 1, 1, 0, arrays))
    for what, *more in (["ca"], ["server", "127.0.0.1"], ["node", "one"]):
        command = [str(SCRIPT), what, str(place / "keys"), *more]
        subprocess.run(command, check=True, capture_output=True)
    kept = {p for p in place.rglob("*") if p.is_file()}
    readable, changeable = trespass(place)
    assert {name for name in readable if not name.startswith("kit/")} == set()
    assert not changeable
    assert {p for p in place.rglob("*") if p.is_file()} == kept
    # It is told from a folder that is open.
    (place / "open").mkdir()
    (place / "open" / "file").touch(0o666)
    readable, changeable = trespass(place)
    assert "open/file" in readable
    assert {"open", "open/file"} <= changeable


@as_root
@pytest.mark.process
def test_credentials_are_not_made_in_anothers_folder(place: Path) -> None:
    for change, told in ((give_away, "somebody else"), (loosen, "others can write")):
        folder = place / told.replace(" ", "-")
        folder.mkdir(0o700)
        change(folder)
        command = [str(SCRIPT), "node", str(folder), "one"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert told in done.stderr
        assert not [*folder.iterdir()]
