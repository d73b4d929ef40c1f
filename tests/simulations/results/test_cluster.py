"""A sweep on a Ray cluster: the same files as on one machine."""

import io
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from simulations.config import SettingsError
from simulations.loopback.processes import free_port
from simulations.results.parallel import run_in_processes
from simulations.results.sweep import Sweep, Training, run_missing
from simulations.study import Case, grid
from tests.guard import HANGS

TINY = ("steps=2", "evaluate_every=1", "data=synthetic", "data.num_examples=500")
CASES = [
    Case(case.labels, case.overrides, 1)
    for case in (
        *grid("experiment=dp-dsgd", attack={"": ""}),
        *grid("experiment=paper", attack=["strongest", "alie"]),
    )
]
SILENT = Console(file=io.StringIO())


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """Start a head and two workers of one processor each; yield the address.

    Their files are in a folder of their own: any Ray that starts on this machine would
    join a cluster that it finds in the usual one. Its name is short, as sockets need.
    """
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    ray, address = Path(sys.executable).with_name("ray"), f"127.0.0.1:{free_port()}"
    local = ["--node-ip-address=127.0.0.1", "--num-cpus=1", "--block"]
    port = address.partition(":")[2]
    head = ["--head", f"--port={port}", "--include-dashboard=false"]
    head.append(f"--temp-dir={folder}")
    nodes = [head, [f"--address={address}"], [f"--address={address}"]]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for node in nodes:
            command = [str(ray), "start", *node, *local, "--disable-usage-stats"]
            started.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
            _wait(address, len(started))
        yield address
    finally:
        for process in reversed(started):
            process.terminate()
            process.wait(HANGS)
        shutil.rmtree(folder, ignore_errors=True)


def _wait(address: str, nodes: int) -> None:
    """Wait until so many nodes are there."""
    look = (
        f"import ray; ray.init({address!r}, log_to_driver=False); "
        "print(len([n for n in ray.nodes() if n['Alive']]))"
    )
    deadline = time.monotonic() + HANGS
    while time.monotonic() < deadline:
        command = [sys.executable, "-c", look]
        asked = subprocess.run(command, capture_output=True, text=True, check=False)
        if asked.returncode == 0 and int(asked.stdout.split()[-1]) >= nodes:
            return
    raise TimeoutError(f"{nodes} nodes at {address}")


@pytest.mark.process
def test_a_cluster_leaves_the_same_files(cluster: str, tmp_path: Path) -> None:
    here, there = (
        Sweep(tmp_path / name, CASES, Training(), TINY) for name in ("here", "there")
    )
    assert run_missing(SILENT, here, 1)
    # What is there is not run again, on a cluster either.
    Training().write(there.path(CASES[0]), Training().run(there.overrides_of(CASES[0])))
    assert run_missing(SILENT, there, None, cluster=cluster)
    assert there.missing() == []
    for case in CASES:
        first, second = (
            json.loads(work.path(case).read_text()) | {"seconds": 0}
            for work in (here, there)
        )
        assert first == second


@pytest.mark.parametrize("address", ["127.0.0.1:{port}", "nowhere", "127.0.0.1:x"])
def test_without_a_cluster_the_command_says_so(address: str) -> None:
    address = address.format(port=free_port())
    calls = run_in_processes(abs, [(-1,)], None, "", SILENT, address)
    with pytest.raises(SettingsError, match="there is no Ray cluster"):
        next(calls)
