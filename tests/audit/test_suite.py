"""The hostile suite in short: all of the zoo, a few candidates each."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from flwr_safedshb.audit.label_inference import Reading
from flwr_safedshb.audit.outcomes import Case, Cases
from flwr_safedshb.audit.report import (
    HEADS,
    CasesRow,
    Report,
    Settings,
    cases_row,
    model_row,
)
from flwr_safedshb.audit.sensitivity_search import Finding
from flwr_safedshb.audit.suite import Attempt, attempts
from flwr_safedshb.audit.zoo import mixing
from flwr_safedshb.audit.zoo import pretrained as borrowed
from flwr_safedshb.cli import main
from simulations import audit

SHORT = Settings(candidates=40, guesses=20, rounds=2)
# What is large, or imports much, has its turn in the long form.
QUICK = [
    attempt
    for attempt in attempts()[0]
    if attempt.subject not in borrowed.SUBJECTS and "DP" not in attempt.subject.name
]


@pytest.mark.federation
@pytest.mark.parametrize("attempt", QUICK, ids=lambda a: ", ".join(a.names))
def test_no_model_of_the_zoo_breaks_its_bound(attempt: Attempt) -> None:
    done: list[int] = []
    row = attempt.run(SHORT, done.append)
    assert row.broken == ""
    if "not implemented for 'Half'" in row.refusal:
        pytest.skip(f"this torch cannot: {row.refusal}")
    if row.refusal:
        assert attempt.subject.must_refuse or attempt.subject in mixing.SUBJECTS
        return
    assert row.path in ("known layers", "torch.vmap", "one at a time")
    assert sum(done) == row.candidates >= 40
    # Something was measured; that a search comes near the bound takes more candidates.
    assert 0.0 < row.removed <= 1.0
    assert 0.0 < row.replaced <= 1.0
    assert row.labels.endswith(" of 20")


def test_names_choose_models() -> None:
    found, _ = attempts(["cnn", "mixup"])
    assert {attempt.names[0] for attempt in found} == {
        "CNN",
        "mixup",
        "mixup, with dropout",
    }
    with pytest.raises(ValueError, match="only='VGG' names no model; there are logist"):
        attempts(["VGG"])


@pytest.mark.federation
def test_a_run_goes_on_where_it_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "found" / "hostile.json"
    asked = ["--only", "weight_norm", "--candidates", "30", "--output", str(output)]
    assert main(["audit", *asked]) == 0
    assert "weight_norm" in capsys.readouterr().out
    first = Report.load(output)
    assert audit.main(["--hostile", "--json", *asked, "--only", "mixup"]) == 0
    assert json.loads(capsys.readouterr().out)["holds"]
    both = Report.load(output)
    assert both.models[0] == first.models[0]  # its seconds, too: it did not run again
    assert [row.name for row in both.models[1:]] == ["mixup", "mixup, with dropout"]
    # Other settings, or other code, and what was found no longer counts.
    assert Report.resumed(output, both.settings).models == both.models
    assert Report.resumed(output, replace(both.settings, seed=2)).models == []
    both.versions["code"] = "other"
    both.save(output)
    assert Report.resumed(output, both.settings).models == []


def test_what_is_broken_is_said() -> None:
    worse = Finding("CNN", "float32", path="known layers", removed=1.25, how="drawn")
    kept = Finding("CNN", "float32", path="known layers", accepted="must be refused")
    raised = Finding("CNN", "float32", path="known layers", raised="RuntimeError: x")
    fine = Finding("CNN", "float32", path="known layers", removed=1.0)
    read = Reading("CNN", 200, 200, 0.52)
    for finding, reading, said in (
        (worse, None, "1.25 by one drawn"),
        (raised, None, "RuntimeError: x"),
        (kept, None, "must be refused"),
        (fine, read, "labels are read better than by chance"),
        (fine, Reading("CNN", 100, 200, 0.52), ""),
    ):
        row = model_row(finding, reading)
        assert row.broken == said
        assert Report(SHORT, [row]).holds == (said == "")
        assert row.cells()[0] == (f"BROKEN: CNN: {said}" if said else "CNN")
        assert len(row.cells()) == len(HEADS)
    cases = Cases("odd", [Case("a", "answered"), Case("b", "answered", "twice")])
    assert cases_row(cases) == CasesRow("odd", 2, {"answered": 2}, ["b: twice"])
    assert not Report(SHORT, requests=[cases_row(cases)]).holds


@pytest.mark.parametrize("name", ["candidates", "guesses", "rounds", "steps"])
def test_settings_without_sense_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=0 must be at least 1"):
        Settings(**{name: 0})
    with pytest.raises(ValueError, match="seed=-1"):
        Settings(seed=-1)
