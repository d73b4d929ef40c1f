"""Private evaluation, attacked: a short form of the study."""

import pytest

from simulations.studies.answers.__main__ import markdown
from simulations.studies.answers.attack import MECHANISMS, attacked
from simulations.studies.answers.coverage import LIES, composition, coverage

pytestmark = pytest.mark.federation


@pytest.mark.parametrize("lie", LIES)
def test_liars_do_not_break_the_interval(lie: str) -> None:
    found = coverage(lie, 12, 5)
    assert found.held >= 11
    assert 0.0 < found.error < found.width < 1.0


def test_two_accountants_agree() -> None:
    found = composition(400, 10)
    assert found.ours == pytest.approx(found.theirs, rel=1e-3)
    assert composition(400, 0).ours < found.ours


@pytest.mark.parametrize("per_class", [False, True])
def test_an_answer_tells_no_more_than_is_accounted_for(per_class: bool) -> None:
    assert attacked("as it is", per_class, 1500, 3).holds


@pytest.mark.parametrize(
    "name", ["defect: half the noise", "defect: an example counts twice"]
)
def test_a_planted_defect_is_caught(name: str) -> None:
    assert name in MECHANISMS
    assert not attacked(name, False, 1500, 3).holds


def test_the_tables_say_what_was_found() -> None:
    text = markdown([coverage("nothing is right", 2, 1)], [composition(100, 1)], [])
    assert "The interval held in 100.0 % of 2 evaluations" in text
    assert "| 100 | 1 | " in text
