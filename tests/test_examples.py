"""The examples run as their pages say."""

import subprocess
import sys
from pathlib import Path

import nbclient
import nbformat
import pytest

from tests.guard import HANGS

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.process
def test_red_teaming_prints_its_table() -> None:
    folder = EXAMPLES / "red-team"
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "attack.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=HANGS,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]

    def table(text: str) -> dict[tuple[str, str], float]:
        rows = [line.split() for line in text.splitlines()]
        return {(strategy, attack): float(value) for strategy, attack, value in rows}

    found, said = table(ran.stdout), table((folder / "output.txt").read_text())
    assert list(found) == list(said)
    for case, value in found.items():
        # Other processors round otherwise, and ten images are a thirtieth.
        assert abs(value - said[case]) < 0.04, case
    for attack in ("ALIE", "FOE", "FarCluster", "NonFinite"):
        assert found["SafeDSHB", attack] > 0.8
    assert found["FedAvg", "FarCluster"] < 0.5
    assert found["FedMedian", "NonFinite"] < 0.2
    lines = (folder / "attack.py").read_text().splitlines()
    assert sum(map(bool, lines)) <= 20


@pytest.mark.process
def test_the_notebook_runs_and_draws() -> None:
    path = EXAMPLES / "notebook" / "round.ipynb"
    notebook = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    assert not any(cell.get("outputs") for cell in notebook.cells)
    nbclient.NotebookClient(
        notebook, timeout=int(HANGS), kernel_name="python3"
    ).execute()
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", ())]
    pictures = [out for out in outputs if "image/png" in out.get("data", {})]
    assert len(pictures) == 7
    printed = "".join(out.text for out in outputs if out.output_type == "stream")
    assert "epsilon = 3.8491 at delta = 1e-05 after 100 steps" in printed
