"""The audit in short: all of the zoo, a few candidates each, in one report."""

import json
from pathlib import Path
from typing import Any

import pytest

from flwr_safedshb.audit import report as report_module
from flwr_safedshb.audit.label_inference import LabelGuesses
from flwr_safedshb.audit.outcomes import Outcome, Outcomes
from flwr_safedshb.audit.report import Report
from flwr_safedshb.audit.sensitivity_search import SearchResult
from flwr_safedshb.audit.suites import (
    SUITES,
    ZOO,
    Settings,
    Task,
    make_request_row,
    make_search_row,
    make_search_tasks,
)
from flwr_safedshb.audit.zoo import mixing, pretrained
from flwr_safedshb.cli import main
from simulations import audit

SHORT = Settings(candidates=40, guesses=20, rounds=2)
MODELS = {target.name: target for target in ZOO}
# What is large, or imports much, has its turn in the long form.
LONG = {target.name for target in pretrained.MODELS}
QUICK = [
    task
    for task in make_search_tasks(SHORT)
    if task.name not in LONG and "DP" not in task.name
]


@pytest.mark.federation
@pytest.mark.parametrize("task", QUICK, ids=lambda task: task.name)
def test_no_model_of_the_zoo_breaks_its_bound(task: Task) -> None:
    done: list[int] = []
    (row,) = task.run(done.append)
    assert row.broken == ""
    if "not implemented for 'Half'" in row.outcome:
        pytest.skip(f"this torch cannot: {row.outcome}")
    if row.outcome.startswith("refused"):
        target = MODELS[row.subject]
        assert target.must_refuse or target in mixing.MODELS
        return
    assert row.outcome in ("known layers", "torch.vmap", "one at a time")
    assert sum(done) == row.trials >= 40
    # Something was measured; that a search comes near the bound takes more candidates.
    assert 0.0 < float(row.figures["worst / C"]) <= 1.0
    assert 0.0 < float(row.figures["worst / 2C"]) <= 1.0
    assert str(row.figures["labels"]).endswith(" of 20")


def test_names_choose_models() -> None:
    found = make_search_tasks(SHORT, ["cnn", "mixup"])
    assert {task.name.partition(", float")[0] for task in found} == {
        *("CNN", "CNN, bfloat16", "mixup", "mixup, with dropout"),
    }
    with pytest.raises(
        ValueError, match="only='VGG' matches no model; choose from logist"
    ):
        list(make_search_tasks(SHORT, ["VGG"]))


def run(path: Path, *options: str) -> list[dict[str, Any]]:
    assert main(["audit", "--output", str(path), *options]) == 0
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    return rows


@pytest.mark.federation
def test_a_run_goes_on_where_it_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "found" / "audit.json"
    asked = ["--only", "weight_norm", "--candidates", "30"]
    (first,) = run(path, *asked)
    assert "weight_norm" in capsys.readouterr().out
    more = [*asked, "--only", "mixup", "--json", "--output", str(path)]
    assert audit.main(["--hostile", *more]) == 0
    both = json.loads(capsys.readouterr().out)
    assert both["holds"]
    assert both["rows"][0] == first  # its seconds, too: it did not run again
    names = [row["subject"] for row in both["rows"]]
    assert names == ["weight_norm", "mixup", "mixup, with dropout"]
    # What another suite finds is added.
    options = ["--suite", "epsilon", "--trials", "100"]
    assert [row["suite"] for row in run(path, *options)][2:4] == [
        "sensitivity",
        "epsilon",
    ]
    # With other settings, code or packages, what was found no longer counts.
    again = run(path, "--only", "mixup, with", "--candidates", "31")
    assert [row["subject"] for row in again if row["suite"] == "sensitivity"] == names[
        2:
    ]
    assert len(run(path, "--only", "mixup, with", "--candidates", "31")) == len(again)
    monkeypatch.setattr(report_module, "_package_versions", lambda: {"torch": "other"})
    assert len(run(path, "--only", "mixup, with", "--candidates", "31")) == 1


def test_a_file_that_is_no_report_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.json"
    path.write_text('{"results": []}')
    assert main(["audit", "--suite", "epsilon", "--output", str(path)]) == 2
    assert "mine.json is not a report of this audit" in capsys.readouterr().err
    assert path.read_text() == '{"results": []}'


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--trials 99", "trials=99 must be at least 100"),
        ("--trials abc", "argument --trials: invalid int value: 'abc'"),
        ("--candidates 0", "candidates=0 must be at least 1"),
        ("--delta -1", "delta=-1 must be above 0 and below 1"),
        ("--delta nan", "delta=nan must be above 0 and below 1"),
        ("--confidence 1", "confidence=1 must be"),
        ("--seed -1", "seed=-1 must be at least 0"),
        ("--output /proc/nope/x.json", "/proc/nope"),
        ("--suite all", "suite='all' must be one of sensitivity, messages"),
    ],
)
def test_bad_options_are_refused_before_any_work(
    options: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = audit.main(options.split())
    except SystemExit as left:
        code = int(str(left.code))
    assert code == 2
    assert words in capsys.readouterr().err


def test_what_is_broken_is_said() -> None:
    worse = SearchResult("known layers", removal_ratio=1.25, origin="drawn")
    kept = SearchResult("known layers", accepted="must be refused")
    raised = SearchResult("known layers", raised="RuntimeError: x")
    fine = SearchResult("known layers", removal_ratio=1.0)
    for result, guesses, words in (
        (worse, None, "1.25 by one drawn"),
        (raised, None, "RuntimeError: x"),
        (kept, None, "must be refused"),
        (
            fine,
            LabelGuesses(200, 200, 0.52),
            "labels are guessed better than the plan allows",
        ),
        (fine, LabelGuesses(100, 200, 0.52), ""),
    ):
        row = make_search_row("CNN", result, guesses)
        assert row.broken == words
        assert Report([row]).holds == (words == "")
        cells = SUITES["sensitivity"].format_row(row)
        assert cells[:2] == ("CNN", f"BROKEN: {words}" if words else "known layers")
        assert len(cells) == len(SUITES["sensitivity"].headings)
    cases = Outcomes([Outcome("a", "answered"), Outcome("b", "answered", "twice")])
    row = make_request_row("odd", cases)
    assert (row.trials, row.outcome, row.broken) == (2, "2 answered", "b: twice")
    assert not Report([row]).holds


@pytest.mark.parametrize("name", ["candidates", "guesses", "rounds", "steps"])
def test_settings_without_sense_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=0 must be at least 1"):
        Settings(**{name: 0})  # type: ignore[arg-type]
