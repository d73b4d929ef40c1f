"""The study that holds the verdict before a training against its outcome."""

import pytest

from simulations.studies.trainability import find_outcomes, report, study
from simulations.study import Case, Runs
from tests.records import made_up


def choose(task: str, epsilon: str, path: str) -> Case:
    """Return a case of the study."""
    labels = {"task": task, "epsilon": epsilon, "path": path}
    (case,) = (c for c in study.list_cases(None) if c.labels == labels)  # type: ignore[arg-type]
    return case


def test_what_was_known_before_a_run_is_that_of_its_plan() -> None:
    case = choose("tumours, MLP 64", "0.1", "20")
    run = made_up(0.65, (0.7, 0.7), overrides=[*case.overrides, "seed=2"])
    (found,) = find_outcomes(Runs({case: run}))
    # sigma sqrt(d) = 5.25 sqrt(2049); see the theory for the load.
    assert found.d == 2049
    assert found.norm_ratio == pytest.approx(5.25 * 2049**0.5, rel=0.02)
    assert found.load == pytest.approx(5.25 * 2049**0.25 / 300**0.5 / 0.3, rel=0.02)
    assert found.growth > 300
    assert found.chance == pytest.approx(0.63, abs=0.05)


def test_verdicts_are_counted_at_the_best_of_the_rates() -> None:
    endings = {
        ("100", "20"): 0.95,
        ("0.1", "5"): 0.64,
        ("0.1", "20"): 0.7,
        ("10", "20"): 0.9,
    }
    runs = {}
    for (epsilon, path), accuracy in endings.items():
        case = choose("tumours, MLP 64", epsilon, path)
        overrides = [*case.overrides, "seed=2"]
        runs[case] = made_up(accuracy, (0.7, 0.2), overrides=overrides)
    (section,) = report(Runs(runs))
    assert "Load above 1, at the best of the rates: 1 of 1 settings" in section.text
    assert "Load below 0.15: 1 of 1 did" in section.text
    assert "Of 4 runs of 3 settings" in section.text
    assert section.table is not None
    shares = {row[2]: row[-1] for row in section.table.rows}
    assert shares["100"] == "1.00"
    assert float(shares["0.1"]) < 0.5 < float(shares["10"])
