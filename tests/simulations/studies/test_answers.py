"""Private evaluation, attacked: a short form of the study."""

from argparse import Namespace

import pytest

from simulations.studies.answers import (
    LIES,
    MECHANISMS,
    attack,
    compose,
    cover,
    report,
    study,
)
from simulations.study import Runs

pytestmark = pytest.mark.federation


@pytest.mark.parametrize("lie", LIES)
def test_liars_do_not_break_the_interval(lie: str) -> None:
    found = cover(lie, 12, 5)
    assert found["held"] >= 11  # type: ignore[operator]
    assert 0.0 < found["error"] < found["width"] < 1.0  # type: ignore[operator]


def test_two_accountants_agree() -> None:
    found = compose(400, 10)
    assert found["ours"] == pytest.approx(found["theirs"], rel=1e-3)
    assert compose(400, 0)["ours"] < found["ours"]  # type: ignore[operator]


@pytest.mark.parametrize("per_class", [False, True])
def test_an_answer_tells_no_more_than_is_accounted_for(per_class: bool) -> None:
    assert attack("as it is", per_class, 1500, 3)["verdict"] == "holds"


@pytest.mark.parametrize(
    "name", ["defect: half the noise", "defect: an example counts twice"]
)
def test_a_planted_defect_is_caught(name: str) -> None:
    assert name in MECHANISMS
    assert attack(name, False, 1500, 3)["verdict"] == "caught"


def test_the_tables_say_what_was_found() -> None:
    cases = {case.labels["of"]: case for case in study.list_cases(Namespace())}
    runs = {
        cases["nothing is right"]: {"metrics": cover("nothing is right", 2, 1)},
        cases["1"]: {"metrics": compose(400, 1)},
    }
    covered, composed = report(Runs(runs))
    assert "The interval held in 100.0 % of 2 evaluations" in covered.text
    assert composed.table is not None
    assert composed.table.rows[0][:2] == ["400", "1"]
