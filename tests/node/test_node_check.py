"""`safedshb node --check` fails where every step would be refused."""

from pathlib import Path

import pytest

from flwr_safedshb import cli
from flwr_safedshb.algorithm.budget import LEDGER_NAME
from flwr_safedshb.node import service
from flwr_safedshb.node.doctor.node import check_node
from flwr_safedshb.node.node_file import read_node_file
from flwr_safedshb.privacy.ledger.ledger import Ledger
from flwr_safedshb.privacy.plan import PrivacyPlan

HEALTHY = """
data = "{folder}/examples.npz"
state-dir = "{folder}/state"
max-epsilon = 2.0
delta = 1e-5
min-noise-multiplier = 1.0
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "examples.npz").write_bytes(b"")
    path = tmp_path / "node.toml"
    path.write_text(HEALTHY.format(folder=tmp_path))
    return path


def make_ledger(folder: Path, max_epsilon: float, steps: int = 1) -> None:
    state = folder / "state"
    state.mkdir(mode=0o700)
    with Ledger(state / LEDGER_NAME, max_epsilon, 1e-5) as ledger:
        ledger.charge(PrivacyPlan(1.0, 1.0, 25, 600), steps)


def find_verdicts(path: Path) -> dict[str, str]:
    results = check_node(read_node_file(path), does_connect=False)
    return {r.name: f"{r.verdict}: {r.finding}" for r in results if r.verdict != "ok"}


def test_a_healthy_node_passes_before_and_after_its_first_run(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "set_private_umask", lambda: None)  # this process
    assert find_verdicts(file) == {}
    assert not (file.parent / "state").exists()
    make_ledger(file.parent, 2.0)
    assert find_verdicts(file) == {}
    assert cli.main(["node", str(file), "--check", "--insecure", "127.0.0.1:9"]) == 0


@pytest.mark.parametrize(
    ("old", "new", "name", "words"),
    [
        ("min-noise-multiplier", "min-noise-multiplyer", "policy", "did you mean"),
        ("delta = 1e-5", "delta = 1e-6", "limits of the ledger", "stays for the"),
        ("max-epsilon = 2.0", "max-epsilon = 9.0", "limits of the ledger", "weaker"),
        ("delta = 1e-5", "", "limits of the ledger", "needs both"),
        ("data", "unit = 'add-remove'\ndata", "limits of the ledger", "unit="),
        ("examples.npz", "missing.npz", "data", "may not be read"),
        ("data", "approved-apps = ''\ndata", "approved-apps", "0 apps"),
        ("data", "approved-apps = 'me/app'\ndata", "approved-apps", "SHA-256"),
    ],
)
def test_what_would_be_refused_is_found(
    file: Path, old: str, new: str, name: str, words: str
) -> None:
    make_ledger(file.parent, 2.0)
    before = (file.parent / "state" / LEDGER_NAME).read_bytes()
    file.write_text(file.read_text().replace(old, new, 1))
    (found,) = find_verdicts(file).items()
    assert found[0] == name
    assert found[1].startswith("failed: ")
    assert words in found[1]
    assert (file.parent / "state" / LEDGER_NAME).read_bytes() == before


def test_a_key_of_no_rule_is_warned_of(file: Path) -> None:
    file.write_text(f"sensor = 3\n{file.read_text()}")
    assert list(find_verdicts(file)) == ["keys of the app"]


def test_a_federation_that_is_away_fails_the_check_and_stops_no_node(
    file: Path, tmp_path: Path
) -> None:
    (tmp_path / "ca.crt").write_text("no certificate")
    file.write_text(
        f'{file.read_text()}[supernode]\nsuperlink = "127.0.0.1:9"\n'
        'root-certificates = "ca.crt"\nkey = "node.key"\n'
    )
    node = read_node_file(file)
    names = [
        {r.name for r in check_node(node, does_connect) if r.verdict == "failed"}
        for does_connect in (False, True)
    ]
    assert names == [
        {"key of the node"},
        {"key of the node", "way to the SuperLink"},
    ]
