"""The measured facts about spread: the command prints and draws them."""

from pathlib import Path

import pytest

from simulations.studies import spread

pytestmark = pytest.mark.federation


def test_the_figures_of_the_page_are_measured() -> None:
    # h = 4, d = 69 and 1000: docs/robustness.md.
    trace, top, ratio = spread.spreads(4, 69, draws=200)
    assert trace == pytest.approx(51.8, abs=0.05)
    assert top == pytest.approx(21.8, abs=0.05)
    assert ratio == pytest.approx(2.39, abs=0.005)
    assert spread.spreads(4, 1000, draws=40)[1] == pytest.approx(267, rel=0.02)


def test_the_command_leaves_a_table_and_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spread.main(["--draws", "2", "--out", str(tmp_path / "deep" / "spread.png")])
    rows = [line for line in capsys.readouterr().out.splitlines() if line[:3] == "| 4"]
    assert [row.split(" | ")[1] for row in rows] == ["1", "10", "69", "1000"]
    assert (tmp_path / "deep" / "spread.png").stat().st_size > 10_000
