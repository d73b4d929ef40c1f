"""Prediction against outcome: the grid, what is predicted, and what agrees."""

from dataclasses import replace
from pathlib import Path

import pytest

from simulations.config import composed
from simulations.results import record
from simulations.results.schema import RunRecord
from simulations.results.sweep import Sweep
from simulations.studies.withstand import __main__ as withstand
from simulations.studies.withstand.cases import Case, Setting, cases, settings
from simulations.studies.withstand.outcome import agreement, outcomes, predict
from tests.records import as_if_of, made_up

TINY = ("data=synthetic", "data.num_examples=5000")
SETTINGS = (Setting(7, 3, 4.0, 0.99), Setting(10, 1, 0.5, 0.99))


def made_up_runs(attacked: float) -> dict[Case, RunRecord]:
    return {
        case: made_up(0.9, (0.7, attacked if case.attacked else 0.3))
        for case in cases(SETTINGS, [1])
    }


def test_the_grid_has_eighty_settings_each_once() -> None:
    everything = list(cases(settings(), [1]))
    assert len(settings()) == 80
    assert len({case.name for case in everything}) == len(set(everything)) == 160
    shares = [it.f / it.n for it in settings()]
    assert min(shares) == 0.1
    assert max(shares) == pytest.approx(3 / 7)


def test_honest_clients_alone_are_as_many() -> None:
    runs = [Case(SETTINGS[0], attacked, 1) for attacked in (True, False)]
    first, second = (composed(" ".join(run.overrides)) for run in runs)
    assert first.num_nodes - first.num_malicious_nodes == second.num_nodes == 4
    assert "Strongest" in str(first.attack)


def test_what_is_predicted_follows_the_first_model() -> None:
    worst, best = (predict(setting, TINY) for setting in SETTINGS)
    assert worst.spec.gradient == pytest.approx(best.spec.gradient, rel=0.5)
    assert worst.spec.smoothness > 0.0
    assert worst.radius > 5 * best.radius
    assert (worst.withstands, best.withstands) == (False, True)


def test_half_of_the_progress_decides() -> None:
    kept, lost = (outcomes(made_up_runs(loss), TINY) for loss in (0.49, 0.51))
    assert all(one.withstood for one in kept)
    assert not any(one.withstood for one in lost)
    # The better federation comes first, and is said to withstand.
    assert [one.agrees for one in kept] == [True, False]
    assert [one.agrees for one in lost] == [False, True]
    assert agreement(kept).startswith(
        "The prediction agrees with the outcome in 1 of 2"
    )


@pytest.mark.federation
def test_the_command_prints_the_table(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(withstand, "settings", lambda: list(SETTINGS))
    for case, run in made_up_runs(0.4).items():
        overrides = Sweep(tmp_path, (case,), TINY).overrides_of(case)
        path = tmp_path / "runs" / f"{case.name}.json"
        record.write(path, as_if_of(run, overrides))
    page = tmp_path / "page.md"
    page.write_text("<!-- begin withstand --><!-- end withstand -->")
    given = ["--output", str(tmp_path), "--page", str(page), "--set", *TINY]
    assert withstand.main(given) == 0
    assert "1 of 2 settings" in page.read_text()
    assert "4 runs, 4 of them are there" in capsys.readouterr().out
    assert replace(SETTINGS[0], alpha=10.0).words.endswith("dirichlet10")
