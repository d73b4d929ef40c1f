"""Trials of settings on public or made-up data."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flwr_safedshb import cli
from flwr_safedshb.privacy.plan import PrivacyPlan


def trials(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    short = ["--steps", "6", "--clip", "1", "--seeds", "1"]
    assert cli.main(["tune", "--json", *short, *arguments]) == cli.YES
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


def test_every_combination_is_tried_at_one_epsilon_and_the_best_worst_case_wins(
    capsys: pytest.CaptureFixture[str],
) -> None:
    choices = ("--rate", "2", "0.001", "--batch", "0", "50", "--epsilon", "3")
    found = trials(capsys, *choices)
    # 5000 examples, a tenth held back, on the six of seven who are honest.
    assert {(t["rate"], t["batch"]) for t in found} == {
        (2.0, 750), (2.0, 50), (0.001, 750), (0.001, 50),
    }  # fmt: skip
    losses = [trial["loss"] for trial in found]
    assert losses == sorted(losses)
    assert found[0]["rate"] == 2.0
    assert found[0]["accuracy"] > 0.6
    for trial in found:
        assert trial["attack"] in ("target", "strongest")
        plan = PrivacyPlan(1.0, trial["noise"], trial["batch"], 750)
        assert trial["epsilon"] == pytest.approx(plan.epsilon(6, 1e-5))
        assert 2.97 <= trial["epsilon"] <= 3.0


def test_what_is_measured_of_the_task_points_to_its_optimum(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (trial,) = trials(capsys, "--rate", "1", "-f", "0", "-n", "3")
    assert trial["attack"] == "none"
    assert 0.1 < trial["signal"] < 1.0
    assert trial["distance"] > 0.5


def test_public_data_and_a_model_of_ones_own(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    targets = rng.integers(2, size=600)
    inputs = rng.normal(size=(600, 4)) + 3.0 * targets[:, None]
    np.savez(tmp_path / "public.npz", inputs=inputs, targets=targets)
    (tmp_path / "tuned_model.py").write_text(
        "import torch\n\n\ndef make():\n    return torch.nn.Linear(4, 2)\n"
    )
    monkeypatch.chdir(tmp_path)
    chosen = ("--rate", "1", "--nodes", "3", "--epsilon", "10")
    found = trials(
        capsys, "--data", "public.npz", "--model", "tuned_model:make", *chosen
    )
    assert found[0]["accuracy"] > 0.7


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--data", "none.npz"], "none.npz"),
        (["--data", "other.npz"], "has no inputs and no targets"),
        (["--model", "nothing:there"], "cannot be loaded"),
        (["--batch", "5000"], "batch_size=5000"),
        (["-f", "4"], "malicious=4 needs n > 2f, got n=7"),
        (["--seeds", "0"], "seeds=0 must be at least 1"),
    ],
)
def test_what_cannot_be_tried_is_said_in_a_line(
    arguments: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    np.savez(tmp_path / "other.npz", x=np.zeros(3))
    monkeypatch.chdir(tmp_path)
    assert cli.main(["tune", *arguments]) == cli.USAGE
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1
