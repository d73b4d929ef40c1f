"""A study: its grid, which runs are done again, what it leaves, and whose it may be."""

import csv
import io
import json
import os
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from rich.console import Console

from simulations import study
from simulations.config import SettingsError
from simulations.experiment import make_share
from simulations.results import record
from simulations.results.schema import RunRecord
from simulations.results.sweep import Sweep, Training, run_missing
from simulations.study import Case, Runs, Study, find_study, grid, main, study_names
from tests.guard import HANGS
from tests.records import as_if_of, made_up

ROOT = Path(__file__).parents[2]
TINY = ("steps=2", "evaluate_every=1", "data=synthetic", "data.num_examples=500")
SILENT = Console(file=io.StringIO())
CASES = [
    Case(case.labels, case.overrides, 1)
    for case in (
        *grid("experiment=dp-dsgd", privacy=["low"], attack={"": ""}),
        *grid("experiment=paper", privacy=["low"], attack=["label-flip", "alie"]),
    )
]


def sweep(folder: Path, cases: Sequence[Case], *more: str) -> Sweep[RunRecord]:
    return Sweep(folder, cases, Training(), (*TINY, *more))


def keep_as_if_run(
    folder: Path,
    name: str,
    given: Sequence[str],
    make: Callable[[Case], RunRecord],
    more: Sequence[str] = TINY,
) -> list[Case]:
    """Write made-up runs of a study, as if they had been done with its command."""
    chosen = find_study(name)
    args = chosen.parser().parse_args(list(given))
    cases = list(chosen.choose_cases(args))
    work = Sweep(folder, cases, Training(), tuple(more))
    for case in cases:
        overrides = ["engine=batched", *work.overrides_of(case)]
        record.write(work.path(case), as_if_of(make(case), overrides))
    return cases


def test_a_grid_has_every_combination_once() -> None:
    cases = grid("steps=3", attack=("foe", "alie"), rule={"ours": "a=b c=d", "": ""})
    assert [case.overrides for case in cases] == [
        ("steps=3", "attack=foe", "a=b", "c=d"),
        ("steps=3", "attack=foe"),
        ("steps=3", "attack=alie", "a=b", "c=d"),
        ("steps=3", "attack=alie"),
    ]
    assert len({case.name for case in cases}) == 4


def test_a_run_without_a_label_belongs_to_all_of_an_axis() -> None:
    runs = Runs(dict.fromkeys(CASES, 0))
    assert runs.labels("attack") == ["label-flip", "alie"]
    assert list(runs.where(attack="alie")) == [CASES[0], CASES[2]]
    assert [len(some) for some in runs.by("attack").values()] == [2, 2]


@pytest.mark.process
def test_only_what_is_missing_is_run(tmp_path: Path) -> None:
    work = sweep(tmp_path, CASES)
    assert work.missing() == CASES
    work.measurement.write(
        work.path(CASES[0]), work.measurement.run(work.overrides_of(CASES[0]))
    )
    assert work.missing() == CASES[1:]
    first = work.path(CASES[0]).read_bytes()
    assert run_missing(SILENT, work, 1)
    assert work.missing() == []
    assert work.path(CASES[0]).read_bytes() == first
    # Another configuration is another run, and half a file is none.
    assert sweep(tmp_path, CASES, "momentum=0.5").missing()
    work.path(CASES[1]).write_text('{"format": 1')
    assert work.missing() == [CASES[1]]


@pytest.mark.process
def test_the_same_folder_for_two_configurations_holds_the_result_of_the_second(
    tmp_path: Path,
) -> None:
    found = {}
    for momentum in (0.5, 0.9):
        work = sweep(tmp_path, CASES[:1], f"momentum={momentum}")
        assert run_missing(SILENT, work, 1)
        found[momentum] = work.runs()[CASES[0]]
        assert found[momentum]["config"]["momentum"] == momentum
    assert found[0.5]["evaluations"] != found[0.9]["evaluations"]


@pytest.mark.federation
def test_a_run_on_other_data_or_with_other_versions_is_not_taken(
    tmp_path: Path,
) -> None:
    source = tmp_path / "data.txt"
    lines = [f"{i % 2} 1:{i % 7} 2:{(i * i) % 5}\n" for i in range(400)]
    source.write_text("".join(lines))
    case = CASES[0]

    def work(path: Path) -> Sweep[RunRecord]:
        more = ("steps=2", "data=libsvm", f"data.path={path}")
        return Sweep(tmp_path, (case,), Training(), more)

    overrides = work(source).overrides_of(case)
    path = work(source).path(case)
    there = Training().run(overrides)
    Training().write(path, there)
    assert not work(source).missing()
    copied = tmp_path / "copy.txt"
    copied.write_bytes(source.read_bytes())
    assert not work(copied).missing()  # the same data elsewhere
    copied.write_text("".join(["1 1:3 2:1\n", *lines[1:]]))
    assert work(copied).missing()  # others under the same path
    older = {**there["versions"], "torch": "1.0"}
    record.write(path, {**there, "versions": older})
    assert work(source).missing()


@pytest.mark.federation
def test_label_flippers_are_clients_whose_replies_pass(tmp_path: Path) -> None:
    flipped = Training().run(sweep(tmp_path, CASES).overrides_of(CASES[1]))
    assert flipped["rounds"]["replies"] == [7, 7]
    assert flipped["data"]["examples_per_node"] == [100] * 4
    overrides = " ".join(flipped["overrides"])
    honest, hostile = make_share(overrides, 1), make_share(overrides, 5)
    assert torch.equal(honest.examples[0], hostile.examples[0])
    assert torch.equal(1 - honest.examples[1], hostile.examples[1])


@pytest.mark.process
def test_a_run_that_fails_is_told_and_stops_no_other(tmp_path: Path) -> None:
    wrong = Case({"rule": "none"}, ("aggregation=no-such-rule",), 1)
    work, said = sweep(tmp_path, [wrong, CASES[0]]), io.StringIO()
    assert not run_missing(Console(file=said, width=200), work, 1)
    assert f"{wrong.name} failed" in said.getvalue()
    assert "no-such-rule" in said.getvalue()
    assert work.missing() == [wrong]


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HANGS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.process
def test_killed_half_way_it_leaves_no_process_and_whole_files(tmp_path: Path) -> None:
    given = ["--output", str(tmp_path), "--privacy", "low", "--seeds", "1"]
    given += ["--workers", "1", "--set", *TINY]
    command = [sys.executable, "-m", "simulations.study", "paper", *given]
    killed = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    wait_for(lambda: len(list((tmp_path / "runs").glob("*.json"))) >= 2)
    children = Path(f"/proc/{killed.pid}/task/{killed.pid}/children").read_text()
    killed.kill()
    killed.wait()
    assert children.split()
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children.split()))
    # What it has done stays done: the next start does the rest.
    chosen = find_study("paper")
    cases = list(chosen.choose_cases(chosen.parser().parse_args(given)))
    done = list((tmp_path / "runs").glob("*.json"))
    assert 2 <= len(done) == len(cases) - len(sweep(tmp_path, cases).missing())


def living(group: int) -> list[str]:
    """Return the processes of a group that have not ended, by name."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            name, _, rest = stat.read_text().partition("(")[2].rpartition(")")
            state, _, number = rest.split()[:3]
            if int(number) == group and state not in "ZX":
                found.append(name)
    return found


@pytest.mark.process
def test_ctrl_c_leaves_no_process_and_no_half_written_file(tmp_path: Path) -> None:
    given = ["demo", "--output", str(tmp_path), "--workers", "1"]
    child = subprocess.Popen(
        [sys.executable, "-m", "simulations.study", *given],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # What runs in a shell's background, as these tests may, ignores Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        # In the middle: some runs are written, others at work.
        deadline = time.monotonic() + HANGS
        while not list(tmp_path.glob("runs/*.json")):
            assert child.poll() is None, child.communicate()[1][-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.killpg(child.pid, signal.SIGINT)  # as a terminal does: to all of them
        _, err = child.communicate(timeout=HANGS)
        # Python's resource tracker ends by itself, a moment after its parent.
        while living(child.pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        left = living(child.pid)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    assert child.returncode == 130, err[-3000:]
    assert "Traceback" not in err
    assert left == []
    for path in tmp_path.rglob("*"):
        if path.is_file():
            assert path.suffix == ".json", path
            json.loads(path.read_text())


def test_runs_that_differ_in_their_seed_alone_are_checked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[str] = []
    monkeypatch.setattr("simulations.check.check", looked.append)
    chosen = find_study("paper")
    cases = list(chosen.choose_cases(chosen.parser().parse_args([])))
    Sweep(tmp_path, cases, Training()).check()
    assert len(looked) == 285 / 5 == len({*looked})
    assert all("seed=1" in text for text in looked)


def test_a_panel_is_chosen_by_its_labels_with_what_belongs_to_it() -> None:
    chosen = find_study("paper")
    args = chosen.parser().parse_args(["--panel", "foe/high", "--seeds", "1"])
    names = [case.name for case in chosen.choose_cases(args)]
    assert names == [
        "high_dp-dsgd_seed1",
        "high_foe_smea_seed1",
        "high_foe_filter-literal_seed1",
        "high_foe_filter_seed1",
    ]
    wrong = chosen.parser().parse_args(["--panel", "fo/high"])
    with pytest.raises(SettingsError, match="fo is no label; choose among"):
        list(chosen.choose_cases(wrong))


@pytest.mark.federation
def test_a_study_leaves_a_row_a_run_plots_and_a_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--panel", "foe/high", "--seeds", "1", "2", "--output", str(tmp_path)]
    keep_as_if_run(tmp_path, "paper", given, lambda c: made_up(0.8, (0.7, 0.3), c.seed))
    assert main(["paper", *given, "--set", *TINY]) == 0
    assert "8 runs, 8 of them are there" in capsys.readouterr().out
    with (tmp_path / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 8
    assert {row["attack"] for row in rows} == {"", "foe"}
    assert {row["accuracy"] for row in rows} == {"0.8"}
    assert all(row["seed"] and row["version"] is not None for row in rows)
    figures = {path.name for path in (tmp_path / "figures").iterdir()}
    assert {"High-privacy_accuracy.png", "High-privacy_training_loss.svg"} <= figures
    page = (tmp_path / "report.html").read_text()
    assert "DP-DSGD, no attack" in page
    assert "| ---" not in page  # no raw Markdown


MINE = """
from simulations.study import Study, grid

def measure(power, seed):
    return {"result": 2 ** power + seed}

study = Study("mine", "Mine", "What is it?", grid(power=(1, 2)), seeds=(0,),
              measure=measure, report=lambda runs: [])
number = 3
"""


@pytest.mark.process
def test_a_study_of_ones_own_runs_by_its_import_path_from_any_directory(
    tmp_path: Path,
) -> None:
    (tmp_path / "my_module.py").write_text(MINE)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "simulations.study", "my_module:study"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    with (tmp_path / "outputs" / "mine" / "results.csv").open() as file:
        assert [row["result"] for row in csv.DictReader(file)] == ["2", "4"]


def test_what_is_no_study_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "others_module.py").write_text(MINE)
    for name, words in {
        "nothing": "nothing: there is no such study; choose accounting",
        "no_such:study": "No module named 'no_such'",
        "others_module:missing": "has no attribute 'missing'",
        "others_module:number": "is a int, and no Study",
    }.items():
        assert main([name]) == 2
        assert words in capsys.readouterr().err
    found = find_study("others_module:study")
    with pytest.raises(SettingsError, match="power"):
        Sweep(tmp_path, [Case({}, ("force=3",))], found.measurement).check()


def test_a_published_study_is_found_by_its_entry_point(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    point = EntryPoint("theirs", "simulations.studies.drift:study", study.ENTRY_POINTS)

    def published(group: str, name: str = "theirs") -> list[EntryPoint]:
        return [point] if (group, name) == (study.ENTRY_POINTS, "theirs") else []

    monkeypatch.setattr(study, "entry_points", published)
    assert find_study("theirs").name == "drift"
    assert "theirs" in study_names()


@pytest.mark.parametrize("name", study_names())
def test_every_study_has_runs_of_distinct_names(name: str) -> None:
    found: Study = find_study(name)
    assert found.name == name
    if found.add_options is None and name != "yardstick":
        cases = list(found.list_cases(Namespace()))
        assert cases
        assert len({case.name for case in cases}) == len(cases)
        assert (
            found.page == ""
            or f"<!-- begin {name} -->" in (ROOT / found.page).read_text()
        )
