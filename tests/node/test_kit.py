"""The deployment guide, run as it stands: its commands bring up a federation."""

import importlib
import os
import re
import shlex
import signal
import stat
import subprocess
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from cryptography import x509
from flwr.app import ArrayRecord, Context, RecordDict

from flwr_safedshb.algorithm.budget import LEDGER_NAME
from flwr_safedshb.algorithm.checkpoint import load
from flwr_safedshb.node.node_file import read_node_file
from flwr_safedshb.privacy.ledger.ledger import Ledger
from flwr_safedshb.strategy import SafeDSHB
from simulations.loopback import ROOT, free_port
from simulations.loopback.credentials import SCRIPT
from tests.environments import built_wheel, installed, variables
from tests.guard import HANGS

GUIDE = ROOT / "docs" / "deployment.md"
KIT = SCRIPT.parent
STEPS, NODES = 3, 3


@dataclass(frozen=True)
class Block:
    """Commands of the guide, and where they are run."""

    title: str
    script: str

    @property
    def stays(self) -> bool:
        return self.title.endswith("keeps running")


def blocks() -> list[Block]:
    pattern = r'^```sh title="([^"]*)"\n(.*?)^```$'
    found = re.findall(pattern, GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    return [Block(title, script) for title, script in found]


# The lines of the guide whose work is done before, without an index of packages.
INSTALL = """python3 -m venv $FEDERATION/venv
$FEDERATION/venv/bin/pip install flwr-safedshb
"""


class Machine:
    """This machine in the part of all machines of the guide.

    It has the wheel and nothing of the repository, other ports and another folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "empty"
        self.folder.mkdir()
        self.federation = folder / "federation"
        installed(self.federation / "venv", built_wheel(folder))
        (settings,) = [b.script for b in blocks() if b.title == "settings"]
        for old, new in (
            ("$HOME/federation", str(self.federation)),
            ("127.0.0.1:9091", f"127.0.0.1:{free_port()}"),
            ("127.0.0.1:9092", f"127.0.0.1:{free_port()}"),
            ("127.0.0.1:9093", f"127.0.0.1:{free_port()}"),
        ):
            assert settings.count(old) == 1
            settings = settings.replace(old, new)
        self.settings = settings

    def run(self, block: Block, timeout: float = 2 * HANGS) -> tuple[int, str]:
        done = subprocess.run(
            ["sh", "-c", f"set -eu\n{self.settings}{block.script}"],
            cwd=self.folder,
            env=variables(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            check=False,
        )
        return done.returncode, done.stdout

    @contextmanager
    def running(self) -> Iterator[list[subprocess.Popen[bytes]]]:
        """Stop everything in the end that was started here."""
        processes: list[subprocess.Popen[bytes]] = []
        try:
            yield processes
        finally:
            for number in (signal.SIGTERM, signal.SIGKILL):
                for process in processes:
                    with suppress(ProcessLookupError):
                        os.killpg(process.pid, number)
                for process in processes:
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(10)

    def start(self, block: Block, log: Path) -> subprocess.Popen[bytes]:
        with log.open("wb") as output:
            return subprocess.Popen(
                ["sh", "-c", f"set -eu\n{self.settings}{block.script}"],
                cwd=self.folder,
                env=variables(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_for(self, log: Path, words: str, count: int = 1) -> None:
        deadline = time.monotonic() + HANGS
        while log.read_text(errors="replace").count(words) < count:
            assert time.monotonic() < deadline, log.read_text(errors="replace")
            time.sleep(0.2)


# What a process says when it is ready, by its command.
READY = {
    "flower-superlink": ("Uvicorn running on", 1),
    "safedshb gate": ("Listening on", 1),
    "haproxy -W": ("", 0),
    "safedshb node": ("SuperNode ID:", NODES),
}


@pytest.mark.process
def test_the_guide_brings_up_a_federation_that_trains(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    said: dict[str, str] = {}
    with machine.running() as processes:
        for number, block in enumerate(blocks()):
            if block.title == "settings":
                continue
            if block.title == "on every machine":
                assert block.script.startswith(INSTALL)
                block = Block(block.title, block.script.removeprefix(INSTALL))
            if block.stays:
                log = tmp_path / f"block-{number}.log"
                processes.append(machine.start(block, log))
                (command,) = [name for name in READY if name in block.script]
                machine.wait_for(log, *READY[command])
                continue
            code, output = machine.run(block)
            if block.title == "on a stranger's machine":
                assert code != 0
                assert "Exit Code: 305" in output
                assert "Failed to activate SuperNode" in output
                continue
            assert code == 0, f"{block.title}: {output}"
            said[block.script.split()[0] + " " + block.script.split()[1]] = output
        check_the_gate_is_closed(machine)
    assert "fit to join" in said["safedshb doctor"]
    assert "NOT fit" not in said["safedshb doctor"]
    assert "it tells no time" not in said["safedshb doctor"]
    assert "CAN ANYONE JOIN" not in said["flwr run"]
    check_the_run(machine, said)


def check_the_run(machine: Machine, said: dict[str, str]) -> None:
    progress = load(machine.federation / "model.npz")
    assert progress is not None, said["flwr run"]
    assert [m["replies"] for m in progress.train.values()] == [NODES] * STEPS
    assert all(m["skipped"] == 0 for m in progress.train.values())
    # Three private steps are no accuracy to speak of; they are steps.
    assert progress.step == STEPS
    status = said["safedshb status"]
    assert all(f"node-{node}" in status for node in range(NODES)), status
    assert "ended: round 3 of 3" in status
    assert "online" in status
    assert "weight" in said["python -"]
    assert "tensor(" in said["python -"]
    for node in range(NODES):
        folder = machine.federation / f"node-{node}"
        with Ledger(folder / "state" / LEDGER_NAME) as ledger:
            assert len(ledger.charges()) == STEPS
            assert (ledger.max_epsilon, ledger.delta) == (4.0, 1e-5)
    assert f"after {STEPS} steps" in said["safedshb ledger"]
    exported = (machine.federation / "charges.csv").read_text()
    assert len(exported.splitlines()) == 1 + STEPS


def check_the_gate_is_closed(machine: Machine) -> None:
    """Through the gate nobody registers a key, which the server's operator can."""
    stranger = machine.federation / "stranger" / "key.pub"
    home = machine.federation / "flwr"
    (inside,) = re.findall(r"SUPERLINK=(\S+)", machine.settings)
    (gate,) = re.findall(r"GATE=(\S+)", machine.settings)
    config = (home / "config.toml").read_text()
    register = f"flwr supernode register {shlex.quote(str(stranger))} federation\n"
    (home / "config.toml").write_text(config.replace(inside, gate))
    code, output = machine.run(Block("", register))
    assert code != 0
    assert "registered successfully" not in output
    (home / "config.toml").write_text(config)
    code, output = machine.run(Block("", register))
    assert code == 0, output
    assert "registered successfully" in output


def test_the_kits_app_starts_from_the_same_model_so_that_it_resumes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(KIT / "app")
    app = importlib.import_module("my_app")
    config = tomllib.loads((KIT / "app" / "pyproject.toml").read_text())
    context = Context(0, 0, {}, RecordDict(), config["tool"]["flwr"]["app"]["config"])
    begun: list[ArrayRecord] = []
    monkeypatch.setattr(
        SafeDSHB, "start", lambda _, grid, initial, **more: begun.append(initial)
    )
    for seed in (1, 2):
        torch.manual_seed(seed)
        app.main(None, context)
    assert begun[0] == begun[1]


def made(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(SCRIPT), *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=HANGS,
    )


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.process
def test_credentials_are_secret_valid_and_never_overwritten(tmp_path: Path) -> None:
    folder = tmp_path / "server"
    old = os.umask(0o000)  # whatever the user's is
    try:
        assert made("ca", str(folder)).returncode == 0
        names = ("127.0.0.1", "::1", "link.example.org", "10.1.2.3")
        assert made("server", str(folder), *names, DAYS="10").returncode == 0
        assert made("node", str(folder), "node-1").returncode == 0
    finally:
        os.umask(old)
    secret = {"ca.key", "server.key", "node-1.key"}
    public = {"ca.crt", "server.crt", "node-1.pub"}
    assert {path.name for path in folder.iterdir()} == secret | public
    assert {mode(folder / name) for name in secret} == {0o600}
    assert {mode(folder / name) for name in public} == {0o644}
    ca, server = (
        x509.load_pem_x509_certificate((folder / name).read_bytes())
        for name in ("ca.crt", "server.crt")
    )
    server.verify_directly_issued_by(ca)
    alternatives = server.extensions.get_extension_for_class(
        x509.SubjectAlternativeName
    ).value
    assert [str(name.value) for name in alternatives] == list(names)
    assert (server.not_valid_after_utc - server.not_valid_before_utc).days == 10
    content = {path: path.read_bytes() for path in folder.iterdir()}
    for arguments in (("ca",), ("server", "127.0.0.1"), ("node", "node-1")):
        done = made(arguments[0], str(folder), *arguments[1:])
        assert done.returncode == 1
        assert "is not overwritten" in done.stderr
    assert {path: path.read_bytes() for path in folder.iterdir()} == content


@pytest.mark.process
@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("nothing",),
        ("ca",),
        ("server", "{}"),
        ("server", "{}", "127.0.0.1"),  # without a CA
        ("node", "{}"),
        ("node", "{}", "../other"),
        ("node", "{}", "-x y"),
    ],
)
def test_credentials_that_make_no_sense(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    done = made(*(argument.format(tmp_path) for argument in arguments))
    assert done.returncode == 1
    assert done.stderr.startswith("credentials.sh: ")
    assert list(tmp_path.rglob("*")) == []


@pytest.mark.process
def test_a_bad_address_leaves_no_half_of_a_certificate(tmp_path: Path) -> None:
    made("ca", str(tmp_path))
    before = set(tmp_path.iterdir())
    for address in ("a b", "x,DNS:evil.example.org", "256.1.1.1"):
        assert made("server", str(tmp_path), address).returncode == 1
        assert set(tmp_path.iterdir()) == before


def options(text: str, command: str) -> list[list[str]]:
    """Return the options of each call of a command in a text."""
    joined = re.sub(r"\\\n[# ]*", " ", text)
    calls = re.findall(rf"(?:^|[\s/]){command} ([^\n&]*)", joined, re.MULTILINE)
    return [sorted(re.findall(r"--[a-z-]+", call)) for call in calls if "--" in call]


@pytest.mark.parametrize(
    ("command", "unit"),
    [
        ("flower-superlink", "superlink.service"),
        ("safedshb gate", "gate.service"),
    ],
)
def test_services_and_containers_have_the_guides_options(
    command: str, unit: str
) -> None:
    documented = options(GUIDE.read_text(), command)[0]
    assert len(documented) >= 4
    service = (KIT / "systemd" / unit).read_text()
    assert options(service, command) == [documented]
    container = (KIT / "container" / "Containerfile").read_text()
    assert options(container, command) == [documented]


def test_the_nodes_template_is_a_policy_and_the_guide_has_every_rule() -> None:
    from flwr_safedshb.algorithm.admission import NODE_KEYS
    from flwr_safedshb.privacy.policy import NodePolicy, get_rule_names

    config = read_node_file(KIT / "node.toml").config
    policy = NodePolicy.from_config(config, ("data", *NODE_KEYS))
    assert policy.max_epsilon is not None
    assert policy.delta is not None
    assert policy.min_noise_multiplier is not None
    assert policy.max_clip_norm is not None
    assert policy.require_secure_noise
    guide = GUIDE.read_text()
    assert [
        key for key in {*config, *get_rule_names()} if f"`{key}`" not in guide
    ] == []
