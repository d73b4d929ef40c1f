"""Beyond the paper: which runs, what is skipped, and what is made of them."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from simulations.config import resolved
from simulations.data import files
from simulations.data.files import fashion_mnist
from simulations.experiment import federation
from simulations.results import record, sweep
from simulations.results.schema import RunRecord
from simulations.results.sweep import Sweep
from simulations.studies.beyond.__main__ import main
from simulations.studies.beyond.parts import PARTS, UNHARMED, Case, cases
from simulations.studies.beyond.summary import markdown, panels, write
from tests import records
from tests.configured import CONF


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fashion-MNIST is not on this machine."""
    folder = str(tmp_path / "none")
    monkeypatch.setattr(files, "DEBIAN_FASHION_MNIST", folder)
    monkeypatch.delenv("SAFEDSHB_DATA", raising=False)


def test_every_run_is_there_once() -> None:
    everything = list(cases([*PARTS], [1, 2]))
    assert len(everything) == len({case.name for case in everything}) == 536
    rules = {case.method for case in everything if case.part == "rules"}
    assert rules == {
        UNHARMED, "average", "krum", "multi-krum", "trimmed-mean", "median",
        "geometric-median", "smea", "filter",
    }  # fmt: skip
    for part in ("rules", "large", "network"):
        attacks = {case.attack for case in everything if case.part == part}
        assert attacks == {
            None, "alie", "foe", "sign-flip", "label-flip", "mimic-shift", "strongest",
        }  # fmt: skip
    every = {case.method for case in everything if case.part == "fractions"}
    known = {path.stem for path in (CONF / "aggregation").glob("*.yaml")}
    assert every - {UNHARMED} == known - {"filter-literal"}
    alphas = {case.setting for case in everything if case.part == "heterogeneity"}
    assert alphas == {"alpha = 0.1", "alpha = 1", "alpha = 10"}


@pytest.mark.parametrize(
    ("part", "n", "f"),
    [("rules", 7, 3), ("heterogeneity", 10, 2), ("large", 50, 10), ("network", 10, 3)],
)
def test_the_settings_are_those_that_are_told(part: str, n: int, f: int) -> None:
    """And the benchmark is of the honest clients alone, by the same messages."""
    setting = next(iter(PARTS[part].settings))
    attacked = resolved(" ".join(Case(part, setting, "smea", "alie", 1).overrides))
    unharmed = resolved(" ".join(Case(part, setting, UNHARMED, None, 1).overrides))
    assert (attacked["num_nodes"], attacked["num_malicious_nodes"]) == (n, f)
    assert (unharmed["num_nodes"], unharmed["num_malicious_nodes"]) == (n - f, 0)
    same = ("steps", "momentum", "server_learning_rate", "privacy", "data", "split")
    assert {key: attacked[key] for key in same} == {key: unharmed[key] for key in same}
    assert f"{f} adversaries among {n}" in PARTS[part].question


def test_the_honest_hold_the_same_with_and_without_an_attack() -> None:
    more = ["data=synthetic", "privacy.plan.batch_size=1"]
    attacked = Case("heterogeneity", "alpha = 1", "smea", "alie", 1)
    unharmed = Case("heterogeneity", "alpha = 1", UNHARMED, None, 1)
    held = [
        federation(" ".join([*case.overrides, *more])) for case in (attacked, unharmed)
    ]
    assert held[0].sizes == held[1].sizes
    assert len(set(held[0].sizes)) > 1
    assert torch.equal(held[0].training[0], held[1].training[0])


def made_up(case: Case) -> RunRecord:
    hurt = case.method == "average"
    accuracy, losses = (0.3, (0.7, 50.0)) if hurt else (0.9, (0.7, 0.2))
    return records.made_up(accuracy, losses, case.seed, case.overrides)


def test_the_table_has_a_row_for_each_panel_and_marks_what_diverges() -> None:
    runs = {case: made_up(case) for case in cases(["heterogeneity", "large"], [1, 2])}
    text = markdown(runs)
    assert "| ALIE, alpha = 0.1 | 0.900 ± 0.000 | 0.900 ± 0.000 |" in text
    assert "| FOE |" + " 0.900 ± 0.000 |" * 3 + " 0.300 ± 0.000 ↗ |" in text
    assert "38 runs with seeds [1, 2], 76 s in all." in text
    assert "A network" not in text
    (first, *_) = panels(runs, "large").values()
    assert {len(some) for some in first.values()} == {2}


@pytest.fixture
def one_attack(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer panels, for they take their time."""
    monkeypatch.setitem(PARTS, "large", replace(PARTS["large"], attacks=("foe",)))


@pytest.mark.federation
def test_figures_tables_and_page_are_written(one_attack: None, tmp_path: Path) -> None:
    write({case: made_up(case) for case in cases(["large"], [1])}, tmp_path)
    drawn = {path.name for path in (tmp_path / "figures").iterdir()}
    assert {"large_foe_accuracy.png", "large_training_loss.svg"} <= drawn
    assert len(drawn) == 2 * 2 * 2
    rows = json.loads((tmp_path / "results.json").read_text())
    assert [row["method"] for row in rows[1:]] == ["SMEA", "Filter", "FedAvg"]
    assert rows[3]["training_loss"] == {"first": 0.7, "last": 50.0}
    page = (tmp_path / "report.html").read_text()
    assert "A larger federation: FOE" in page
    assert "FedAvg" in page


def test_without_the_images_their_part_is_left_out(
    nowhere: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--parts", "network", "--output", str(tmp_path / "out")]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "apt-get install dataset-fashion-mnist" in printed
    assert not (tmp_path / "out").exists()


def test_the_images_may_lie_beside_other_data(
    nowhere: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fashion_mnist() is None
    folder = tmp_path / "fashion-mnist"
    folder.mkdir()
    (folder / "train-images-idx3-ubyte.gz").touch()
    monkeypatch.setenv("SAFEDSHB_DATA", str(tmp_path))
    assert fashion_mnist() == folder
    case = Case("network", "", "smea", "foe", 1)
    assert f"data.path={folder}" in case.overrides


@pytest.mark.federation
def test_the_command_goes_on_where_it_was(
    one_attack: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[Case] = []

    def run_here(
        console: Console, work: Sweep[Case], workers: int, again: bool, cluster: None
    ) -> bool:
        for case in work.missing()[:2]:
            run = records.as_if_of(made_up(case), work.overrides_of(case))
            record.write(work.path(case), run)
            ran.append(case)
        return not work.missing()

    monkeypatch.setattr(sweep, "complete", run_here)
    monkeypatch.setattr(sweep, "Console", lambda: Console(file=io.StringIO()))
    page = tmp_path / "page.md"
    page.write_text("<!-- begin beyond --><!-- end beyond -->")
    given = ["--parts", "large", "--seeds", "1", "--output", str(tmp_path)]
    given += ["--page", str(page), "--set", "data=synthetic"]
    assert main(given) == 1
    assert not (tmp_path / "results.md").exists()
    assert main(given) == 0
    assert len(ran) == len(set(ran)) == 4
    assert "FedAvg" in (tmp_path / "results.md").read_text()
    assert "images/beyond_large_accuracy.png" in page.read_text()
    # Under other settings the same folder holds no run that could be taken.
    assert main([*given, "steps=7"]) == 1
    assert len(ran) == 6
