"""What the doctor finds, on healthy nodes and on every kind of sick one."""

import json
import os
import shutil
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib import metadata
from pathlib import Path

import pytest

from flwr_safedshb import cli
from flwr_safedshb.algorithm.budget import LEDGER_NAME
from flwr_safedshb.node.doctor import machine
from flwr_safedshb.node.doctor.machine import (
    CheckResult,
    check_expiry,
    check_key,
    check_link,
    check_skew,
)
from flwr_safedshb.privacy.ledger.ledger import Ledger
from flwr_safedshb.privacy.ledger.snapshot import open_snapshot
from flwr_safedshb.privacy.plan import PrivacyPlan
from simulations.loopback import Credentials
from tests.guard import HANGS

PLAN = PrivacyPlan(1.0, 1.0, 4, 20)
APP = """
import torch
from flwr.clientapp import ClientApp
from flwr_safedshb import PrivacyPlan, SafeDSHBClient, SeededRandomness, client_app

def squares(outputs, targets):
    return (outputs.squeeze(1) - targets) ** 2

def client_fn(context):
    if context.run_config.get("broken"):
        raise OSError("the disk with the data is gone")
    seeded = context.run_config.get("seeded", False)
    width = int(context.run_config.get("width", 3))
    data, more = (torch.ones(20, 3), torch.ones(20)), {}
    if context.run_config.get("odd"):
        data = [*zip(*data)][:3] + ["junk"] * 17
        more["like"] = torch.ones(3), 1.0
    return SafeDSHBClient(
        torch.nn.Linear(width, 1), squares, data,
        PrivacyPlan(1.0, float(context.run_config["noise"]), 4, 20), context,
        randomness=SeededRandomness(1) if seeded else None, **more,
    )

def numpy_client_fn(context):
    return client_fn(context).to_client()

app = client_app(client_fn)
other = ClientApp(client_fn=numpy_client_fn)
number = 5
"""


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """Return the file of a healthy node, whose app is beside it."""
    (tmp_path / "doctored.py").write_text(APP)
    (tmp_path / "pyproject.toml").write_text(
        '[tool.flwr.app.components]\nclientapp = "doctored:app"\n'
        "[tool.flwr.app.config]\nnoise = 1.0\n"
    )
    path = tmp_path / "node.toml"
    path.write_text(
        f'state-dir = "{tmp_path / "state"}"\nmax-epsilon = 50.0\ndelta = 1e-5\n'
        "min-noise-multiplier = 1.0\n"
    )
    return path


Found = tuple[int, dict[str, CheckResult]]


def examined(node: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> Found:
    folder = str(node.parent)
    code = cli.main(["doctor", str(node), "--app", folder, "--json", *arguments])
    answer = json.loads(capsys.readouterr().out)
    checks = [CheckResult(**check) for check in answer["checks"]]
    assert answer["fit"] is (code == 0)
    return code, {check.name: check for check in checks}


def failed(found: Found) -> dict[str, str]:
    code, checks = found
    wrong = {c.name: c.finding for c in checks.values() if c.verdict == "failed"}
    assert code == (1 if wrong else 0)
    return wrong


def everything(folder: Path) -> dict[str, bytes]:
    return {
        str(path): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix != ".pyc"
    }


def test_a_healthy_node_is_fit_and_left_as_it_was(
    node: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = everything(node.parent)
    code, checks = examined(node, capsys, "--steps", "10")
    assert code == 0
    assert {check.verdict for check in checks.values()} == {"ok"}
    expected = PLAN.epsilon(10, 1e-5)
    assert f"{expected:.4g} after it" in checks["budget"].finding
    assert "4 parameters" in checks["data and model"].finding
    assert "will be made" in checks["state-dir"].finding
    assert everything(node.parent) == before


def test_the_table_ends_in_a_verdict(
    node: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["doctor", str(node), "--app", str(node.parent)]
    assert cli.main(arguments) == 0
    assert capsys.readouterr().out.endswith("\nfit to join\n")
    assert cli.main([*arguments, "--run-config", "noise=0.5"]) == 1
    text = capsys.readouterr().out
    assert text.endswith("\nNOT fit to join: policy\n")


@pytest.mark.parametrize("name", ["app", "client_fn", "numpy_client_fn"])
def test_clients_are_found_by_name(
    node: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    arguments = ("--client", f"doctored:{name}", "--run-config", "noise=2.0")
    code, checks = examined(node, capsys, *arguments)
    assert code == 0
    assert "noise multiplier 2, 4 of 20" in checks["policy"].finding


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--client", "doctored"], "must be module:object"),
        (["--client", "doctored:nobody"], "cannot be loaded"),
        (["--client", "nowhere:app"], "cannot be loaded"),
        (["--client", "doctored:number"], "is int, not a client_fn"),
        (["--client", "doctored:other"], "name its client_fn instead"),
        (["--steps", "0"], "--steps=0"),
        (["--superlink", "127.0.0.1:1"], "belong together"),
    ],
)
def test_questions_that_make_no_sense(
    node: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    asked = ["doctor", str(node), "--app", str(node.parent), *arguments]
    assert cli.main(asked) == cli.USAGE
    assert message in capsys.readouterr().err


def test_a_missing_app_or_config_is_said(
    node: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert cli.main(["doctor", str(node), "--app", str(empty)]) == cli.USAGE
    assert "pyproject.toml" in capsys.readouterr().err
    assert cli.main(["doctor", str(empty / "node.toml")]) == cli.USAGE
    node.write_text("max-epsilon 4")
    assert cli.main(["doctor", str(node)]) == cli.USAGE
    assert "no TOML file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("run_config", "check", "finding"),
    [
        ("noise=0.5", "policy", "min-noise-multiplier=1.0 refuses the run, which asks"),
        ("broken=true", "data and model", "OSError: the disk with the data is gone"),
        ("width=7", "data and model", "fails on made-up examples"),
    ],
)
def test_what_a_run_asks_for_is_tried(
    node: Path,
    capsys: pytest.CaptureFixture[str],
    run_config: str,
    check: str,
    finding: str,
) -> None:
    wrong = failed(examined(node, capsys, "--run-config", run_config))
    assert list(wrong) == [check]
    assert finding in wrong[check]


def test_why_examples_cannot_be_used_is_told_to_their_owner(
    node: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = examined(node, capsys, "--run-config", "odd=true")
    # 17 of 20 are no accident.
    wrong = failed(found)
    assert [*wrong] == ["examples"]
    assert wrong["examples"].startswith("17 of 20 examples cannot be used; 17 cannot")
    check = found[1]["data and model"]
    assert check.verdict == "warning"
    assert "cannot be used and count as zero: DatasetError: items are" in check.finding


def test_seeded_noise_is_refused_and_warned_of_if_the_node_allows_it(
    node: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = failed(examined(node, capsys, "--run-config", "seeded=true"))
    assert "require-secure-noise=true" in wrong["policy"]
    node.write_text(node.read_text() + "require-secure-noise = false\n")
    code, checks = examined(node, capsys, "--run-config", "seeded=true")
    assert (code, checks["policy"].verdict) == (0, "warning")
    assert "FROM A SEED" in checks["policy"].finding


def test_a_misspelt_rule_is_found(
    node: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node.write_text(node.read_text().replace("min-noise", "min-nose"))
    wrong = failed(examined(node, capsys))
    assert "did you mean 'min-noise-multiplier'" in wrong["data and model"]


def test_what_is_left_in_the_ledger(
    node: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "state").mkdir(mode=0o700)
    path = tmp_path / "state" / LEDGER_NAME
    with Ledger(path, 50.0, 1e-5) as ledger:
        ledger.charge(PLAN, 30, run="first")
        spent = ledger.epsilon()
    before = everything(tmp_path)
    code, checks = examined(node, capsys)
    assert code == 0
    assert f"epsilon = {spent:.4g} of 50 is spent" in checks["ledger"].finding
    left = int(checks["budget"].finding.split()[0])
    with open_snapshot(path) as ledger:
        assert left == ledger.steps_left(PLAN) > 0
    assert failed(examined(node, capsys, "--steps", str(left))) == {}
    wrong = failed(examined(node, capsys, "--steps", str(left + 1)))
    assert f"{left} of the run's {left + 1} steps fit" in wrong["budget"]
    assert everything(tmp_path) == before


def test_a_damaged_or_another_ledger(
    node: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "state").mkdir(mode=0o700)
    path = tmp_path / "state" / LEDGER_NAME
    Ledger(path, 40.0, 1e-5).close()
    wrong = failed(examined(node, capsys))
    assert list(wrong) == ["policy"]
    assert "max_epsilon=50 is weaker than 40" in wrong["policy"]
    content = path.read_bytes()
    path.write_bytes(content[:2000] + b"\xff" * 3000 + content[5000:])
    wrong = failed(examined(node, capsys))
    assert f"the ledger {path} is refused" in wrong["ledger"]


def test_the_directory_of_the_ledger(tmp_path: Path) -> None:
    def verdicts(path: Path) -> list[str]:
        return [check.verdict for check in machine.check_state_dir(path, "ledger")]

    assert verdicts(tmp_path / "deep" / "down") == ["ok"]
    assert not (tmp_path / "deep").exists()
    (tmp_path / "file").touch()
    assert verdicts(tmp_path / "file") == ["failed"]
    assert verdicts(tmp_path / "file" / "below") == ["failed"]
    tmp_path.chmod(0o777)
    assert verdicts(tmp_path) == ["failed"]
    tmp_path.chmod(0o700)
    (tmp_path / "ledger").touch(mode=0o644)
    assert verdicts(tmp_path) == ["warning"]
    (tmp_path / "ledger").chmod(0o600)
    assert verdicts(tmp_path) == ["ok"]
    assert verdicts(Path("relative"))[0] == "warning"


def test_a_full_disk_and_a_system_without_entropy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 10 * 1024**2

    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage)
    (found,) = machine.check_state_dir(tmp_path, "ledger")
    assert (found.verdict, found.finding.split()[0]) == ("failed", "10")
    assert machine.check_entropy().verdict == "ok"
    monkeypatch.setattr(os, "urandom", bytes)
    assert machine.check_entropy().verdict == "failed"


def test_clocks() -> None:
    assert machine.check_clock(None).verdict == "ok"
    assert machine.check_clock(None, now=0.0).verdict == "failed"
    assert machine.check_clock("2026-05-01T00:00:00.000+00:00").verdict == "ok"
    ahead = machine.check_clock("2126-05-01T00:00:00.000+00:00")
    assert ahead.verdict == "failed"
    assert "it went back" in ahead.finding
    skews = {-400: "failed", -60: "warning", -1: "ok", 0.5: "ok", 3: "warning"}
    for seconds, verdict in {**skews, 6: "failed"}.items():
        assert check_skew(seconds).verdict == verdict


def test_a_flower_that_was_never_patched_is_warned_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "1.99.0")
    found = {check.name: check for check in machine.check_versions()}
    assert found["version of flwr"].verdict == "warning"
    assert "tried with 1.41, 1.42 only" in found["version of flwr"].finding


def test_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {check.verdict for check in machine.check_versions()} == {"ok"}
    monkeypatch.setattr(metadata, "version", lambda name: "0.1")
    assert {check.verdict for check in machine.check_versions()} == {"failed"}

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert all("not installed" in check.finding for check in machine.check_versions())


class Response(BaseHTTPRequestHandler):
    """A server that tells the time."""

    def do_GET(self) -> None:
        self.send_response(404)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[HTTPServer, Credentials]]:
    credentials = Credentials(tmp_path / "credentials")
    server = HTTPServer(("127.0.0.1", 0), Response)
    yield server, credentials
    server.server_close()


def asked(server: HTTPServer, shown: Credentials, trusted: Path) -> list[CheckResult]:
    """Look at a server that shows its certificate to one visitor."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(shown.certificate, shown.certificate_key)
    plain = server.socket
    server.socket = context.wrap_socket(plain, server_side=True)
    server.timeout = HANGS
    thread = threading.Thread(target=server.handle_request)
    thread.start()
    address = f"127.0.0.1:{server.server_port}"
    checks = list(check_link(address, trusted))
    thread.join()
    return checks


@pytest.mark.process
def test_the_way_to_the_superlink(
    served: tuple[HTTPServer, Credentials], tmp_path: Path
) -> None:
    server, credentials = served
    checks = asked(server, credentials, credentials.ca)
    assert [check.verdict for check in checks] == ["ok", "ok"]
    assert "holds 365 more days" in checks[0].finding
    other = Credentials(tmp_path / "other")
    assert "refused" in "".join(
        check.finding for check in check_link("127.0.0.1:9", other.ca)
    )


@pytest.mark.process
def test_an_expired_certificate_or_an_unknown_one_fails(tmp_path: Path) -> None:
    expired = Credentials(tmp_path / "expired", days=-1)
    with HTTPServer(("127.0.0.1", 0), Response) as server:
        (check,) = asked(server, expired, expired.ca)
    assert check.verdict == "failed"
    assert "expired" in check.finding
    assert "clock" in check.finding
    stranger = Credentials(tmp_path / "stranger")
    with HTTPServer(("127.0.0.1", 0), Response) as server:
        (check,) = asked(server, stranger, expired.ca)
    assert check.verdict == "failed"
    assert check_expiry("Nov 20 00:00:00 2026 GMT", 1.7947e9).verdict == "warning"


@pytest.mark.process
def test_the_key_of_a_node(tmp_path: Path) -> None:
    key = Credentials(tmp_path / "credentials").node_key("node")
    assert check_key(key).verdict == "ok"
    assert check_key(key.with_suffix(".pub")).verdict == "failed"
    assert check_key(tmp_path / "none").verdict == "failed"
    key.chmod(0o644)
    assert "chmod 600" in check_key(key).finding
