"""An app is what its bytes are, and runs where its owner has listed them."""

import hashlib
import io
import json
import tomllib
import zipfile
from pathlib import Path

import pytest

from flwr_safedshb import cli
from flwr_safedshb.node.approvals import KEY, Approvals, inspect_bundle
from flwr_safedshb.node.flower_patches.fab import build_bundle

PROJECT = """
[project]
name = "my-app"
version = "1.2.0"
[tool.flwr.app]
publisher = "somebody"
[tool.flwr.app.components]
serverapp = "app:server"
clientapp = "app:client"
"""


def bundle(**files: str) -> bytes:
    with io.BytesIO() as buffer:
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.writestr("pyproject.toml", PROJECT)
            for name, text in files.items():
                archive.writestr(f"{name}.py", text)
        return buffer.getvalue()


def test_what_an_app_is() -> None:
    found = inspect_bundle(
        bundle(app="import os.path\nfrom torch import nn\nexec('1')")
    )
    assert (found.publisher, found.name, found.version) == (
        "somebody",
        "my-app",
        "1.2.0",
    )
    assert found.components == {"serverapp": "app:server", "clientapp": "app:client"}
    assert found.imports == {"app.py": {"os", "torch", "exec()"}}
    assert {*found.files} == {"app.py", "pyproject.toml"}


def test_code_that_cannot_be_read_is_said_to_be() -> None:
    assert inspect_bundle(bundle(app="def")).imports == {"app.py": {"(cannot be read)"}}


@pytest.mark.parametrize(
    "data", [b"", b"no zip", bundle()[:-30], bundle(big="#" * (65 * 2**20))]
)
def test_what_is_no_app_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="no bundle of a Flower app"):
        inspect_bundle(data)


@pytest.mark.parametrize("words", ["abc", "A" * 64, 3, True, "0" * 63, "../x"])
def test_a_list_that_is_none_is_refused(words: object) -> None:
    with pytest.raises(ValueError, match=KEY):
        Approvals.parse(words)


def test_an_empty_list_allows_nothing_and_no_list_everything() -> None:
    assert Approvals.parse("").find_refusal("0" * 64)
    assert Approvals.parse(None).find_refusal("0" * 64) is None
    both = Approvals.parse(f"{'0' * 64}, {'1' * 64}")
    assert both.find_refusal("1" * 64) is None
    assert Approvals.parse(both.to_text()) == both


def test_an_app_is_shown_and_written_into_the_nodes_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node = tmp_path / "node.toml"
    node.write_text('delta = 1e-5\n\n[supernode]\nsuperlink = "a:1"\n')
    hashes = []
    for number in ("1", "2"):
        app = tmp_path / f"{number}.fab"
        app.write_bytes(bundle(app=f"x = {number}"))
        hashes.append(hashlib.sha256(app.read_bytes()).hexdigest())
        assert cli.main(["approve", str(app), "--node", str(node)]) == 0
        assert hashes[-1] in capsys.readouterr().out
    found = tomllib.loads(node.read_text())
    assert Approvals.parse(found[KEY]) == Approvals(frozenset(hashes))
    assert found["delta"] == 1e-5
    assert found["supernode"] == {"superlink": "a:1"}


def test_a_list_over_several_lines_is_left_alone(tmp_path: Path) -> None:
    node, app = tmp_path / "node.toml", tmp_path / "a.fab"
    text = f'{KEY} = """\n{"0" * 64}\n"""\n'
    node.write_text(text)
    app.write_bytes(bundle())
    assert cli.main(["approve", str(app), "--node", str(node)]) == cli.USAGE
    assert node.read_text() == text


def test_a_folder_is_built_as_flower_builds_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    app = tmp_path / "app"
    app.mkdir()
    (app / "pyproject.toml").write_text(
        PROJECT.replace(
            "[tool.flwr.app.components]",
            'fab-include = ["app.py"]\n[tool.flwr.app.components]',
        )
        + "[tool.flwr.app.config]\n"
    )
    (app / "app.py").write_text("server = client = None\n")
    assert cli.main(["approve", str(app), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["hash"] == hashlib.sha256(build_bundle(app)).hexdigest()
    with pytest.raises(ValueError, match="no Flower app"):
        build_bundle(tmp_path)
