"""The reproduction: which runs, each once, and what is made of them."""

import io
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console

from simulations.config import resolved
from simulations.experiment import share
from simulations.results import record
from simulations.results.schema import RunRecord
from simulations.results.summary import Figure, final
from simulations.results.sweep import Sweep, complete, run_all
from simulations.studies.paper import statements, summary, tables
from simulations.studies.paper.__main__ import main
from simulations.studies.paper.cases import Case, cases
from tests.guard import HANGS
from tests.records import as_if_of, made_up

ROOT = Path(__file__).parents[3]
TINY = ("steps=2", "evaluate_every=1", "data=synthetic", "data.num_examples=500")
SILENT = Console(file=io.StringIO())
CASES = (
    Case("low", "dp-dsgd", None, 1),
    Case("low", "smea", "label-flip", 1),
    Case("low", "filter-literal", "alie", 2),
)


def test_the_papers_runs_come_first_and_each_once() -> None:
    everything = list(cases())
    ours = ("mimic-shift", "strongest")
    paper = [c for c in everything if c.method != "filter" and c.attack not in ours]
    assert everything[:135] == paper
    assert len(set(everything)) == len({c.name for c in everything}) == 285
    assert sum(case.attack in ours for case in everything) == 90
    assert Counter(case.regime for case in paper) == dict.fromkeys(
        ("low", "moderate", "high"), 45
    )
    assert Counter(case.attack for case in paper if case.regime == "low") == {
        None: 5, "alie": 10, "foe": 10, "sign-flip": 10, "label-flip": 10,
    }  # fmt: skip


def test_the_papers_settings() -> None:
    config = resolved(" ".join(Case("high", "filter", "foe", 4).overrides))
    said = {
        "num_nodes": 7, "num_malicious_nodes": 3, "steps": 400, "momentum": 0.99,
        "server_learning_rate": 1.0, "weight_decay": 1e-4, "seed": 4,
    }  # fmt: skip
    assert said.items() <= config.items()
    plan = config["privacy"]["plan"]  # type: ignore[index]
    assert (plan["clip_norm"], plan["batch_size"]) == (1.0, 25)
    assert plan["noise_multiplier"] == 3.0
    # The benchmark is plain, and its honest clients are as many.
    plain = resolved(" ".join(Case("low", "dp-dsgd", None, 1).overrides))
    expected = {"num_nodes": 4, "num_malicious_nodes": 0, "momentum": 0.0}
    assert expected.items() <= plain.items()
    assert "Average" in str(plain["aggregation"])


@pytest.mark.process
def test_only_what_is_missing_is_run(tmp_path: Path) -> None:
    work = Sweep(tmp_path, CASES, TINY)
    assert work.missing() == list(CASES)
    work.keep(CASES[0], work.run(CASES[0]))
    assert work.missing() == list(CASES[1:])
    first = work.path(CASES[0]).read_bytes()
    assert run_all(work, work.missing(), 1, SILENT) == {}
    assert work.missing() == []
    assert work.path(CASES[0]).read_bytes() == first
    # Another configuration is another run, and half a file is none.
    assert Sweep(tmp_path, CASES, (*TINY, "momentum=0.5")).missing()
    work.path(CASES[1]).write_text('{"format": 1')
    assert work.missing() == [CASES[1]]


@pytest.mark.process
def test_the_same_folder_for_two_configurations_holds_the_result_of_the_second(
    tmp_path: Path,
) -> None:
    case = CASES[0]
    found = {}
    for momentum in (0.5, 0.9):
        work = Sweep(tmp_path, (case,), (*TINY, f"momentum={momentum}"))
        assert complete(SILENT, work, 1)
        found[momentum] = work.runs()[case]
        assert found[momentum]["config"]["momentum"] == momentum
    assert found[0.5]["evaluations"] != found[0.9]["evaluations"]


@pytest.mark.federation
def test_a_run_on_other_data_or_with_other_versions_is_not_taken(
    tmp_path: Path,
) -> None:
    source = tmp_path / "data.txt"
    lines = [f"{i % 2} 1:{i % 7} 2:{(i * i) % 5}\n" for i in range(400)]
    source.write_text("".join(lines))
    case = Case("low", "dp-dsgd", None, 1)

    def work(path: Path) -> Sweep[Case]:
        more = ("steps=2", "data=libsvm", f"data.path={path}")
        return Sweep(tmp_path, (case,), more)

    work(source).keep(case, work(source).run(case))
    assert not work(source).missing()
    copied = tmp_path / "copy.txt"
    copied.write_bytes(source.read_bytes())
    assert not work(copied).missing()  # the same data elsewhere
    copied.write_text("".join(["1 1:3 2:1\n", *lines[1:]]))
    assert work(copied).missing()  # others under the same path
    there = work(source).found(case)
    assert there is not None
    older = {**there["versions"], "torch": "1.0"}
    record.write(work(source).path(case), {**there, "versions": older})
    assert work(source).missing()


@pytest.mark.federation
def test_label_flippers_are_clients_whose_replies_pass(tmp_path: Path) -> None:
    case = CASES[1]
    work = Sweep(tmp_path, (case,), TINY)
    flipped = work.run(case)
    assert flipped["rounds"]["replies"] == [7, 7]
    assert flipped["data"]["examples_per_node"] == [100] * 4
    overrides = " ".join(flipped["overrides"])
    honest, hostile = share(overrides, 1), share(overrides, 5)
    assert torch.equal(honest.examples[0], hostile.examples[0])
    assert torch.equal(1 - honest.examples[1], hostile.examples[1])


@pytest.mark.process
def test_a_run_that_fails_is_told_and_stops_no_other(tmp_path: Path) -> None:
    wrong = Case("low", "no-such-rule", "alie", 1)
    work = Sweep(tmp_path, (wrong, CASES[0]), TINY)
    failed = run_all(work, work.cases, 1, SILENT)
    assert list(failed) == [wrong]
    assert "no-such-rule" in failed[wrong]
    assert work.missing() == [wrong]


@pytest.mark.process
def test_killed_half_way_it_leaves_no_process_and_whole_files(tmp_path: Path) -> None:
    given = ["--output", str(tmp_path), "--regimes", "low", "--seeds", "1"]
    given += ["--workers", "1", "--set", *TINY]
    command = [sys.executable, "-m", "simulations.studies.paper", *given]
    killed = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    wait_for(lambda: len(list((tmp_path / "runs").glob("*.json"))) >= 2)
    children = Path(f"/proc/{killed.pid}/task/{killed.pid}/children").read_text()
    killed.kill()
    killed.wait()
    assert children.split()
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children.split()))
    # What it has done stays done: the next start does the rest.
    work = Sweep(tmp_path, tuple(cases(["low"], [1])), TINY)
    done = list((tmp_path / "runs").glob("*.json"))
    assert 2 <= len(done) == len(work.cases) - len(work.missing())


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HANGS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def made_up_runs(accuracy: float = 0.85) -> dict[Case, RunRecord]:
    return {
        case: made_up(
            accuracy + 0.001 * case.seed,
            (0.7, 0.6 if case.attack == "strongest" else 0.3),
        )
        for case in cases(["low"], [1, 2, 3])
    }


def failing(runs: dict[Case, RunRecord]) -> list[str]:
    found = statements.verdicts(runs)
    return [f"{v.whose}: {v.statement}" for v in found if not v.holds]


def changed(
    runs: dict[Case, RunRecord], method: str, attack: str | None, **to: float
) -> dict[Case, RunRecord]:
    losses = (0.7, to.get("loss", 0.3))
    new = {
        case: made_up(to.get("accuracy", 0.85) + 0.001 * case.seed, losses)
        for case in runs
        if (case.method, case.attack) == (method, attack)
    }
    assert new
    return {**runs, **new}


def test_verdicts_follow_the_runs() -> None:
    runs = made_up_runs()
    assert failing(runs) == []
    assert [
        statement.partition(":")[2] for statement in failing(made_up_runs(0.79))
    ] == [
        " Safe-DSHB, SMEA at low privacy: around 0.80, or more",
        " Safe-DSHB, Filter at low privacy: around 0.80, or more",
    ]
    # A rising loss of SMEA, and its accuracy: Filter is no longer alike.
    worse = failing(changed(runs, "smea", "foe", accuracy=0.7, loss=0.8))
    assert worse == [
        "the paper: Safe-DSHB, SMEA at low privacy: around 0.80, or more",
        "the paper: the training loss falls under its four attacks: Safe-DSHB, SMEA",
        "ours: no attack leaves a higher loss than strongest: Safe-DSHB, SMEA",
        "ours: Filter's accuracy is SMEA's, within two errors",
    ]
    # What the paper does not say is not said in its name.
    (better,) = failing(changed(runs, "filter", "alie", accuracy=0.95))
    assert better.startswith("ours: DP-DSGD is at least as good")
    rising = failing(changed(runs, "filter", "foe", loss=0.8))
    assert rising == [
        "ours: the training loss falls under its four attacks: Filter, default stop",
        "ours: no attack leaves a higher loss than strongest: Filter, default stop",
    ]
    # The paper says nothing of colluders who search.
    (stopped,) = failing(changed(runs, "smea", "strongest", loss=0.8))
    assert stopped.startswith("ours: it falls under mimic-shift and strongest, too")


def test_losses_that_the_paper_sees_match_are_compared() -> None:
    runs = made_up_runs()
    for seed, loss in enumerate((0.29, 0.30, 0.31), start=1):
        accuracy = 0.85 + 0.001 * seed
        runs[Case("low", "dp-dsgd", None, seed)] = made_up(accuracy, (0.7, loss))
    (apart,) = failing(changed(runs, "smea", "label-flip", loss=0.35))
    assert "ends where DP-DSGD's does" in apart
    assert failing(changed(runs, "smea", "label-flip", loss=0.305)) == []
    # Under FOE the paper says nothing of the kind.
    assert failing(changed(runs, "smea", "foe", loss=0.5)) == []


def test_regimes_degrade_and_foe_is_a_bit_lower_at_high_privacy_only() -> None:
    def runs(high: float, foe: float) -> dict[Case, RunRecord]:
        level = {"low": 0.9, "moderate": 0.85, "high": high}
        return {
            case: made_up(
                foe
                if case.attack == "foe" and case.regime == "high"
                else level[case.regime],
                (0.7, 0.3),
            )
            for case in cases(["low", "moderate", "high"], [1, 2])
        }

    assert failing(runs(0.76, 0.7)) == []
    low = failing(runs(0.76, 0.6))
    (about,) = (s for s in low if "SMEA at high" in s)
    assert about.startswith("the paper: Safe-DSHB, SMEA at high privacy: a bit lower")
    level = failing(runs(0.85, 0.85))
    assert {s for s in level if "tightens" in s} == {
        "the paper: accuracy falls as privacy tightens: DP-DSGD, no attack",
        "the paper: accuracy falls as privacy tightens: Safe-DSHB, SMEA",
    }


def test_a_loss_that_rises_is_told_with_its_panel_and_method() -> None:
    runs = made_up_runs()
    for seed in (1, 2, 3):
        runs[Case("low", "filter", "foe", seed)] = made_up(0.7, (0.693, 0.8))
    text = tables.markdown(runs)
    assert (
        "under its four attacks: Filter, default stop | ours | **does not hold**"
        in text
    )
    assert "rises at low privacy under FOE" in text
    row = "| low | FOE | 0.700 to 0.300 | 0.700 to 0.300 | 0.700 to 0.300 | "
    assert row + "**rises: 0.693 to 0.800** |" in text


def test_the_table_has_means_and_sample_deviations() -> None:
    row = summary.table(made_up_runs(), final)[0]
    figure = row["smea"]
    assert isinstance(figure, Figure)
    assert figure.mean == pytest.approx(0.852)
    assert figure.std == pytest.approx(0.001)
    assert str(Figure(0.5, 0.0, 1)) == "0.500"  # one run has no spread
    text = tables.markdown(made_up_runs())
    assert "| low | ALIE | 0.852 ± 0.001 |" in text
    assert "2763 = 11055 // 4" in text


def test_without_some_method_the_others_are_told() -> None:
    runs = {c: run for c, run in made_up_runs().items() if c.method != "filter"}
    assert failing(runs) == []
    assert "| 0.852 ± 0.001 | - | around 0.80 |" in tables.tables(runs)


@pytest.mark.federation
def test_the_command_draws_and_tabulates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(summary, "ATTACKS", ("foe",))  # panels take their time
    runs = {case: run for case, run in made_up_runs().items() if case.seed == 1}
    for case, run in runs.items():
        overrides = Sweep(tmp_path, (case,), TINY).overrides_of(case)
        path = tmp_path / "runs" / f"{case.name}.json"
        record.write(path, as_if_of(run, overrides))
    page = tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    page.write_text("<!-- begin reproduce --><!-- end reproduce -->")
    given = ["--output", str(tmp_path), "--regimes", "low", "--seeds", "1"]
    assert main([*given, "--page", str(page), "--set", *TINY]) == 0
    assert "DP-DSGD" in page.read_text()
    assert "images/reproduce_low_accuracy.png" in page.read_text()
    assert "19 runs, 19 of them are there" in capsys.readouterr().out
    figures = {path.name for path in (tmp_path / "figures").iterdir()}
    assert {f"low_foe_accuracy.{kind}" for kind in ("png", "svg")} <= figures
    # One attack and all of them together, two quantities, two formats.
    assert len(figures) == 8
    assert "DP-DSGD" in (tmp_path / "results.md").read_text()
    assert "statements" in (tmp_path / "results.json").read_text()
    assert "left out" in (tmp_path / "report.html").read_text()


def test_runs_that_differ_in_their_seed_alone_are_checked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[str] = []
    monkeypatch.setattr("simulations.check.check", looked.append)
    Sweep(tmp_path, tuple(cases())).check()
    assert len(looked) == 285 / 5 == len({*looked})
    assert all("seed=1" in text for text in looked)
