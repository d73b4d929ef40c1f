"""Models of other frameworks train as they are."""

import runpy
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "examples" / "frameworks"


@pytest.mark.federation
def test_the_model_and_collator_of_a_trainer_learn(
    capsys: pytest.CaptureFixture[str],
) -> None:
    runpy.run_path(str(FOLDER / "huggingface.py"), run_name="__main__")
    assert (
        float(capsys.readouterr().out.split("accuracy")[-1]) > 0.65
    )  # chance is a half
