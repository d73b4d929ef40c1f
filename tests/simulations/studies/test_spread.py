"""The measured facts about spread: the command prints and draws them."""

from argparse import Namespace
from itertools import product

import pytest

from simulations.studies import spread
from simulations.study import Runs

pytestmark = pytest.mark.federation


def test_the_figures_of_the_page_are_measured() -> None:
    # h = 4, d = 69 and 1000: docs/robustness.md.
    found = spread.measure_spread(4, 69, draws=200)
    assert found["trace"] == pytest.approx(51.8, abs=0.05)
    assert found["top_eigenvalue"] == pytest.approx(21.8, abs=0.05)
    assert found["ratio"] == pytest.approx(2.39, abs=0.005)
    far = spread.measure_spread(4, 1000, draws=40)
    assert far["top_eigenvalue"] == pytest.approx(267, rel=0.02)


def test_the_report_has_a_table_and_a_picture() -> None:
    runs = Runs(
        {
            case: {"metrics": spread.measure_spread(h, d, draws=2)}
            for case, (h, d) in zip(
                spread.study.list_cases(Namespace()),
                product(spread.CLIENTS, spread.DIMENSIONS),
                strict=True,
            )
        }
    )
    (section,) = spread.report(runs)
    assert section.table is not None
    rows = [row for row in section.table.rows if row[0] == "4"]
    assert [row[1] for row in rows] == ["1", "10", "69", "1000"]
    assert len(section.figures["spread"].axes) == 2
