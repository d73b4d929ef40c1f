"""The demonstration: what it shows is so, and it says what it costs."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from rich.console import Console

from simulations.loopback import ROOT
from simulations.results import record, sweep
from simulations.results.schema import RunRecord
from simulations.results.sweep import Sweep
from simulations.studies import demo
from simulations.studies.demo import SETTINGS, Case, by_setting, main, show, story
from tests.guard import HANGS

pytestmark = pytest.mark.federation


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[RunRecord]]:
    cases = tuple(Case(setting, 1) for setting in SETTINGS)
    work = Sweep(tmp_path_factory.mktemp("demo"), cases)
    for case in cases:
        work.keep(case, work.run(case))
    return by_setting(work.runs())


def test_averaging_fails_under_foe_and_the_robust_rules_under_worse(
    groups: dict[str, list[RunRecord]],
) -> None:
    last = {k: v[0]["returned"]["accuracy"] for k, v in groups.items()}
    assert last["plain averaging, FOE"] < 0.5 < demo.CHANCE
    for setting in ("no attack", "SMEA, FOE", "Filter, FOE"):
        assert last[setting] > 0.8
    # Two of seven, and noise for epsilon 3: no rule withstands what is worst for it.
    for rule in ("SMEA", "Filter"):
        assert last[f"{rule}, strongest"] < last[f"{rule}, FOE"]


def test_all_settings_spend_the_same_privacy(
    groups: dict[str, list[RunRecord]],
) -> None:
    """The honest hospitals hold the same, attacked or not."""
    (said,) = {
        (run["privacy"]["num_examples"], run["privacy"]["epsilon"])
        for some in groups.values()
        for run in some
    }
    assert said[0] == 40
    assert said[1] == pytest.approx(2.99, abs=0.01)
    assert {
        str(run["data"]["test_set"]) for some in groups.values() for run in some
    } == {"held-out examples"}


def test_every_hospital_has_its_own_noise_and_the_same_epsilon(
    groups: dict[str, list[RunRecord]],
) -> None:
    nodes = groups["SMEA, FOE"][0]["by_node"]
    assert [node["num_examples"] for node in nodes] == [40, 60, 86, 120, 150]
    noise = [node["noise_multiplier"] for node in nodes]
    assert noise == sorted(noise, reverse=True)
    assert all(2.9 < node["epsilon"] <= 3.0 for node in nodes)


def test_hospitals_answer_what_a_model_is_worth_and_liars_do_not_decide(
    groups: dict[str, list[RunRecord]],
) -> None:
    for some in groups.values():
        told, true = some[0]["answers"], some[0]["returned"]["accuracy"]
        assert told["step"] == [100]
        assert told["low"][0] - 0.1 <= true <= told["high"][0] + 0.1
        assert abs(told["accuracy"][0] - true) < 0.25


def test_chance_is_the_share_of_the_larger_class() -> None:
    from simulations.data import BreastCancer

    labels = BreastCancer(0.2).load().labels
    assert labels.mean() == pytest.approx(demo.CHANCE, abs=0.01)


def test_the_table_says_what_epsilon_is_true_for(
    groups: dict[str, list[RunRecord]],
) -> None:
    text = io.StringIO()
    show(Console(file=text, width=200), groups)
    printed = text.getvalue()
    for setting, some in groups.items():
        line = next(x for x in printed.splitlines() if x.strip().startswith(setting))
        assert f"{some[0]['returned']['accuracy']:.3f}" in line
        assert f"{some[0]['answers']['accuracy'][-1]:.2f} (" in line
        assert "2.99" in line
    for words in (
        "fixed-size",
        "replace-one",
        "PLD accountant.",
        "0.0001",
        "100 steps",
        "not for hospitals",
    ):
        assert words in printed
    told = story(groups["SMEA, FOE"][0])
    assert told.startswith("7 hospitals")
    assert "2 hospitals are hijacked" in told
    assert "hold 40, 60, 86, 120, 150 tumours" in told
    assert "epsilon 3" in told


def test_the_command_runs_all_again_and_writes_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: dict[str, list[RunRecord]]
) -> None:
    ran: list[Case] = []

    def run_here(
        console: Console,
        work: Sweep[Case],
        workers: int,
        again: bool,
        cluster: str | None = None,
    ) -> bool:
        assert again
        for case in work.cases:
            record.write(work.path(case), groups[case.setting][0])
            ran.append(case)
        return True

    monkeypatch.setattr(sweep, "complete", run_here)
    for _ in range(2):
        assert main(["--output", str(tmp_path), "--seeds", "1", "2"]) == 0
    assert len(ran) == 24
    page = (tmp_path / "report.html").read_text()
    assert "7 hospitals train" in page
    assert "plain averaging, FOE" in page
    assert "What the nodes answer, privately" in page
    assert "Each node its own noise" in page


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
    child = subprocess.Popen(
        [sys.executable, "-m", "simulations.studies.demo", "--output", str(tmp_path)],
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
