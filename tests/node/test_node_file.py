"""The one file of a node."""

from pathlib import Path

import pytest

from flwr_safedshb import cli
from flwr_safedshb.node.node_file import read_node_file
from flwr_safedshb.node.service import NodeService

FILE = """
state-dir = "state"
delta = 1e-5
[supernode]
superlink = "server:9092"
root-certificates = "ca.crt"
key = "/keys/node.key"
"""


def written(folder: Path, text: str = FILE) -> Path:
    path = folder / "node.toml"
    path.write_text(text)
    return path


def test_the_connection_is_apart_from_the_config(tmp_path: Path) -> None:
    node = read_node_file(written(tmp_path))
    # Receipts are signed with the key that the SuperLink knows the node by.
    own = {"state-dir": "state", "delta": 1e-5}
    assert node.config == {**own, "receipt-key": "/keys/node.key"}
    assert node.connection is not None
    assert node.connection.superlink == "server:9092"
    # Beside the file, wherever it is read from.
    assert node.connection.root_certificates == tmp_path / "ca.crt"
    assert node.connection.key == Path("/keys/node.key")


def test_the_nodes_key_is_not_handed_to_confined_workers(tmp_path: Path) -> None:
    open_node = read_node_file(written(tmp_path))
    confined = read_node_file(written(tmp_path, f"sandbox = true\n{FILE}"))
    assert open_node.config["receipt-key"] == "/keys/node.key"
    assert "/keys/node.key" not in confined.config.values()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (FILE.replace("key =", "kee ="), "does not know 'kee'"),
        (FILE.replace('superlink = "server:9092"\n', ""), "needs 'superlink'"),
        (FILE.replace('"server:9092"', "3"), "needs 'superlink'"),
        ("supernode = 3", "needs 'superlink'"),
        ("x = ", "no TOML file"),
    ],
)
def test_what_cannot_be_understood_is_named(
    text: str, words: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=words):
        read_node_file(written(tmp_path, text))


def test_a_node_needs_to_know_where_to_go(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs a table"):
        NodeService(read_node_file(written(tmp_path, "delta = 1e-5")))


def test_a_node_that_cannot_keep_a_budget_does_not_serve(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, "max-epsilon = 1.0\ndelta = 1e-5\n")
    assert cli.main(["node", str(path), "--insecure", "127.0.0.1:1"]) == 1
    told = capsys.readouterr().out
    assert "state-dir is not set" in told
    assert "OPERATORS ARE TRUSTED WITH CODE" in told


def test_a_fit_node_says_what_it_accepts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "state").mkdir(mode=0o700)
    path = written(
        tmp_path,
        f'max-epsilon = 1.0\ndelta = 1e-5\nstate-dir = "{tmp_path / "state"}"\n'
        f'approved-apps = "{"0" * 64}"\n',
    )
    code = cli.main(["node", str(path), "--insecure", "127.0.0.1:1", "--check"])
    told = capsys.readouterr().out
    assert code == 0, told
    assert "max-epsilon=1.0" in told
    assert "TRUSTED WITH CODE" not in told
