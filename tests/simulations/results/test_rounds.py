"""A metric of a round is in every report by its name alone."""

import math
import re

import pytest

from flwr_safedshb.algorithm import round as algorithm_round
from simulations.engines import run
from simulations.results import record
from simulations.results.report import run_page
from simulations.results.rounds import rounds_section
from simulations.results.schema import RunRecord
from tests.records import made_up


def with_metrics(**metrics: list[float | None]) -> RunRecord:
    made = made_up(0.9, (0.7, 0.2))
    return {**made, "rounds": {**made["rounds"], "metrics": {**metrics}}}


def cells(page: str) -> list[str]:
    return re.findall(r"<td[^>]*><span>(.*?)</span>", page)


def test_a_metric_that_never_changes_is_not_shown() -> None:
    assert rounds_section({"all": [with_metrics(momentum=[0.9, 0.9])]}) == ""


def test_means_are_over_the_rounds_that_have_the_metric() -> None:
    some = [with_metrics(drift=[1.0, None]), with_metrics(drift=[5.0, 6.0])]
    page = rounds_section({"SMEA": some, "median": [with_metrics()]})
    assert cells(page) == ["drift", "SMEA", "4"]
    assert page.count("data:image/svg+xml;base64,") == 1


def test_a_metric_that_tells_two_groups_apart_is_shown() -> None:
    groups = {
        label: [with_metrics(kappa=[value, value])]
        for label, value in (("f = 1", 0.8), ("f = 2", 2.7))
    }
    assert cells(rounds_section(groups))[3:] == ["kappa", "f = 2", "2.7"]


@pytest.mark.federation
def test_a_new_metric_of_a_round_reaches_the_report(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = algorithm_round._rule_metrics

    def add_metric(*given: object) -> algorithm_round.Metrics:
        found = plain(*given)  # type: ignore[arg-type]
        twice = 2 * found["lambda-max"]
        return {**found, "twice-lambda-max": twice, "unbounded": math.inf}

    monkeypatch.setattr(algorithm_round, "_rule_metrics", add_metric)
    chosen = ["steps=3", "data.num_examples=800"]
    found = record.record(chosen, run(chosen), 1.0)
    metrics = found["rounds"]["metrics"]
    twice = [2 * value for value in metrics["lambda-max"] if value is not None]
    assert metrics["twice-lambda-max"] == twice
    assert metrics["unbounded"] == [None] * 3
    assert "twice-lambda-max" in cells(run_page(found))
