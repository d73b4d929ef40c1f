"""Trials of settings on public or made-up data."""

import json
from pathlib import Path

import numpy as np
import pytest

from flwr_safedshb import cli
from flwr_safedshb.privacy.plan import PrivacyPlan


def trials(
    capsys: pytest.CaptureFixture[str], *arguments: str
) -> list[dict[str, float]]:
    assert cli.main(["tune", "--json", "--steps", "20", *arguments]) == cli.YES
    found: list[dict[str, float]] = json.loads(capsys.readouterr().out)
    return found


def test_every_combination_is_tried_and_the_best_comes_first(
    capsys: pytest.CaptureFixture[str],
) -> None:
    choices = ("--clip", "1", "--noise", "0.5", "30", "--rate", "1", "0.001")
    found = trials(capsys, *choices)
    assert {(t["noise"], t["rate"]) for t in found} == {
        (0.5, 1.0),
        (30.0, 1.0),
        (0.5, 0.001),
        (30.0, 0.001),
    }
    assert found[0]["noise"] == 0.5
    assert found[0]["accuracy"] > 0.75
    accuracies = [trial["accuracy"] for trial in found]
    assert accuracies == sorted(accuracies, reverse=True)
    # 5000 examples, a tenth held back, on five nodes.
    expected = PrivacyPlan(1.0, 0.5, 32, 900).epsilon(20, 1e-5)
    assert found[0]["epsilon"] == pytest.approx(expected)


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
    chosen = ("--clip", "1", "--rate", "1", "--nodes", "3")
    found = trials(
        capsys, "--data", "public.npz", "--model", "tuned_model:make", *chosen
    )
    assert found[0]["accuracy"] > 0.9


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--data", "none.npz"], "none.npz"),
        (["--data", "other.npz"], "has no inputs and no targets"),
        (["--model", "nothing:there"], "cannot be loaded"),
        (["--batch", "5000"], "batch_size=5000"),
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
