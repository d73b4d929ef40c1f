"""The chaos suite's own checks, and a short form of the suite."""

import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, MetricRecord

from flwr_safedshb.aggregation import Average
from flwr_safedshb.algorithm.budget import LEDGER_NAME
from flwr_safedshb.algorithm.checkpoint import save
from flwr_safedshb.algorithm.progress import Progress
from flwr_safedshb.algorithm.wire import MOMENTUM_TAG
from flwr_safedshb.privacy.ledger.ledger import Ledger
from flwr_safedshb.strategy import SafeDSHB
from simulations.chaos.app import CHECKPOINT, LOG, TRACE
from simulations.chaos.faults import FAULTS
from simulations.chaos.problem import (
    DELTA,
    DIMENSION,
    EXAMPLES,
    HONEST,
    HOSTILE,
    MAX_EPSILON,
    NODES,
    PLAN,
    compute_momentum,
    find_optimum,
)
from simulations.chaos.suite import clear_folder, examine_trial, run_trials
from simulations.chaos.tolerance import Tolerance, measure_tolerance
from simulations.chaos.trace import append_entry
from simulations.chaos.trial import FaultTrial
from simulations.loopback import Deployment

SEED, STEPS = 3, 2
SESSION = "0123456789abcdef"
MODELS = {step: np.full(DIMENSION, 0.25 * step) for step in range(STEPS)}
TOLERANCE = Tolerance(0.1, 0.02)


def node_id(node: int) -> int:
    return 1000 + node


def reply(node: int, step: int, **changes: object) -> dict[str, object]:
    vector = compute_momentum(node, range(step + 1), MODELS, SEED)
    return {
        "to": f"{node}-{step}",
        "error": None,
        "records": ["arrays", "metrics"],
        "metrics": {"metrics": {"num-examples": EXAMPLES, MOMENTUM_TAG: 7}},
        "arrays": {"arrays/weight": vector.tolist()},
        **changes,
    }


def released(folder: Path, node: int, step: int, reply: str = "first") -> None:
    entry = {"step": step, "reply": reply}
    append_entry(folder / f"released-{node}.jsonl", entry)


@pytest.fixture
def trial(tmp_path: Path) -> FaultTrial:
    """Return a training of two steps without a fault, made up file by file."""
    logs = {"superlink": "all is well", "node-0": ""}
    federation = SimpleNamespace(
        node_ids={node: node_id(node) for node in range(NODES)},
        state_dir=lambda node: tmp_path / f"node-{node}",
        log=lambda name, characters=0: logs[name],
        logs=logs,
    )
    trial = FaultTrial(cast(Deployment, federation), tmp_path, SEED, STEPS, 1.0)
    (tmp_path / LOG).write_text("[ROUND 1/2]\n")
    for node in HONEST:
        trial.federation.state_dir(node).mkdir()
        path = trial.federation.state_dir(node) / LEDGER_NAME
        with Ledger(path, MAX_EPSILON, DELTA) as ledger:
            for step in range(STEPS):
                ledger.charge(PLAN, run=SESSION)
                released(tmp_path, node, step)
    for step in range(STEPS):
        for node in range(NODES):
            sent = {"id": f"{node}-{step}", "node": node_id(node), "step": step}
            model = MODELS[step].tolist()
            append_entry(tmp_path / TRACE, {**sent, "session": SESSION, "model": model})
        for node in HONEST:
            append_entry(tmp_path / TRACE, reply(node, step))
    finish(trial, find_optimum(SEED))
    return trial


def finish(trial: FaultTrial, model: np.ndarray, skipped: int = 0) -> None:
    arrays = ArrayRecord({"weight": Array(model.astype(np.float32).reshape(-1, 1))})
    metrics = MetricRecord({"skipped": skipped, "left-out": [node_id(HOSTILE)]})
    progress = Progress(SESSION, SEED, STEPS, STEPS, arrays)
    progress.train = {1: metrics, 2: metrics}
    save(trial.folder / CHECKPOINT, progress)


def problems(trial: FaultTrial) -> list[str]:
    hostile = next(fault for fault in FAULTS if fault.key == "hostile")
    (finding,) = examine_trial(trial, [replace(hostile, line="ROUND")], TOLERANCE)
    return finding.problems


def test_nothing_is_wrong_with_a_training_without_a_fault(trial: FaultTrial) -> None:
    assert problems(trial) == []


def test_a_reply_that_is_sent_again_need_not_be_charged_again(
    trial: FaultTrial,
) -> None:
    (sent, *_), _ = trial.read_messages()
    again = {**asdict(sent), "id": "again", "node": node_id(2), "step": 1}
    again["model"] = MODELS[1].tolist()
    append_entry(trial.folder / TRACE, again)
    append_entry(trial.folder / TRACE, reply(2, 1, to="again"))
    released(trial.folder, 2, 1)
    assert problems(trial) == []
    assert trial.list_released(2) == [0, 1]


def skip_a_round(trial: FaultTrial) -> None:
    finish(trial, find_optimum(SEED), skipped=1)


def use_the_hostile_node(trial: FaultTrial) -> None:
    finish(trial, find_optimum(SEED))
    progress = trial.load_progress()
    assert progress is not None
    progress.train[2]["left-out"] = []
    save(trial.folder / CHECKPOINT, progress)


def learn_nothing(trial: FaultTrial) -> None:
    finish(trial, np.zeros(DIMENSION))


def release_without_a_charge(trial: FaultTrial) -> None:
    released(trial.folder, 2, 1, "another")


def deliver_without_a_trace(trial: FaultTrial) -> None:
    append_entry(trial.folder / TRACE, reply(2, 1))


def forget_a_ledger(trial: FaultTrial) -> None:
    path = trial.federation.state_dir(1) / LEDGER_NAME
    path.unlink()
    Ledger(path, MAX_EPSILON, DELTA).close()


def send_the_gradient_bare(trial: FaultTrial) -> None:
    vector = compute_momentum(0, [0, 1], MODELS, SEED) + 0.01
    arrays = {"arrays/weight": vector.tolist()}
    released(trial.folder, 0, 1, "another")
    append_entry(trial.folder / TRACE, reply(0, 1, arrays=arrays))


def report_a_loss(trial: FaultTrial) -> None:
    metrics = {"metrics": {"num-examples": EXAMPLES, "loss": 0.5}}
    append_entry(trial.folder / TRACE, reply(0, 1, metrics=metrics))


def stated(epsilon: float) -> dict[str, object]:
    public = {
        "num-examples": EXAMPLES,
        MOMENTUM_TAG: 7,
        "epsilon": epsilon,
        "delta": DELTA,
    }
    return {"metrics": public}


def state_another_epsilon(trial: FaultTrial) -> None:
    append_entry(trial.folder / TRACE, reply(0, 1, metrics=stated(0.5)))


def test_a_node_may_state_what_its_steps_cost(trial: FaultTrial) -> None:
    append_entry(
        trial.folder / TRACE, reply(0, 1, metrics=stated(PLAN.epsilon(2, DELTA)))
    )
    assert not [told for told in problems(trial) if "reports" in told]


def send_more(trial: FaultTrial) -> None:
    records = ["arrays", "metrics", "more"]
    append_entry(trial.folder / TRACE, reply(0, 1, records=records))


def explain_too_much(trial: FaultTrial) -> None:
    error = "<class 'ValueError'>:<'patient 4711 has no age'>"
    append_entry(trial.folder / TRACE, reply(0, 1, error=error))


def log_a_path(trial: FaultTrial) -> None:
    (trial.folder / LOG).write_text(f"ROUND\n/data/{LEDGER_NAME} is gone\n")


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (skip_a_round, "were skipped"),
        (use_the_hostile_node, "round 2 used the hostile node"),
        (learn_nothing, "the model is 2.0"),
        (release_without_a_charge, "node 2 has charged 2 steps, computed 3"),
        (deliver_without_a_trace, "node 2 has charged 2 .* delivered 3"),
        (forget_a_ledger, "node 1 has charged 0 steps"),
        (send_the_gradient_bare, "node 0's reply in step 1 is not the momentum"),
        (report_a_loss, "reports .*loss"),
        (state_another_epsilon, "reports .*epsilon"),
        (send_more, "holds .*more"),
        (explain_too_much, "patient 4711"),
        (log_a_path, "the log of the server says"),
    ],
)
def test_each_check_can_fail(
    trial: FaultTrial, spoil: Callable[[FaultTrial], None], told: str
) -> None:
    spoil(trial)
    assert any(re.search(told, problem) for problem in problems(trial))


def test_a_fault_that_no_log_tells_of_is_a_problem(trial: FaultTrial) -> None:
    late = next(fault for fault in FAULTS if fault.key == "late")
    (finding,) = examine_trial(trial, [replace(late, step=0)], TOLERANCE)
    assert any("no line of the log" in problem for problem in finding.problems)
    assert any("was struck and not missed" in problem for problem in finding.problems)


def test_a_round_that_somebody_missed_is_not_whole(trial: FaultTrial) -> None:
    killed = next(fault for fault in FAULTS if fault.key == "gate-killed")
    (finding,) = examine_trial(
        trial, [replace(killed, step=7, log="server")], TOLERANCE
    )
    assert any(text == "round 8 was without node 2" for text in finding.problems)


def test_lost_steps_are_those_charged_and_never_used(trial: FaultTrial) -> None:
    """Node 1 dies after a charge, and computes step 1 once more than it delivers."""
    with Ledger(trial.federation.state_dir(1) / LEDGER_NAME) as ledger:
        ledger.charge(PLAN, steps=2, run=SESSION)
    released(trial.folder, 1, 1, "another")
    killed = next(fault for fault in FAULTS if fault.key == "killed-after")
    (finding,) = examine_trial(trial, [killed], TOLERANCE)
    assert finding.lost_steps == 2
    expected = PLAN.epsilon(4, DELTA) - PLAN.epsilon(2, DELTA)
    assert finding.lost_epsilon == pytest.approx(expected)


def test_a_charge_lost_with_its_node_hides_no_release(trial: FaultTrial) -> None:
    killed = next(fault for fault in FAULTS if fault.key == "killed-after")
    (finding,) = examine_trial(trial, [killed], TOLERANCE)
    assert any("node 1 has charged 2 steps" in text for text in finding.problems)


@pytest.mark.federation
def test_the_tolerance_tells_training_from_no_defence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The average, which the hostile node moves, lies outside what is called noise."""
    steps = 3
    normal = measure_tolerance(SEED, steps, runs=8)
    assert normal.limit < 1.0 < np.linalg.norm(find_optimum(SEED))
    undefended = partial(SafeDSHB, Average())
    monkeypatch.setattr("simulations.chaos.tolerance.SafeDSHB", undefended)
    assert measure_tolerance(SEED, steps, runs=2).mean > normal.limit


@pytest.mark.process
def test_a_disk_that_a_killed_run_has_left_is_taken_away(tmp_path: Path) -> None:
    folder = tmp_path / "of a run"
    script = """if True:
        import os, signal, sys
        from pathlib import Path
        from simulations.chaos.suite import small_disk
        with small_disk(Path(sys.argv[1])):
            os.kill(os.getpid(), signal.SIGKILL)
    """
    command = [sys.executable, "-c", script, str(folder / "node-0")]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert str(tmp_path) in Path("/proc/mounts").read_text()
    assert list(clear_folder(folder).iterdir()) == []
    assert str(tmp_path) not in Path("/proc/mounts").read_text()


SHORT = {"hostile": 0, "unregistered-key": 0, "killed-after": 1, "corrupt-ledger": 2}


@pytest.mark.process
def test_short_suite(tmp_path: Path) -> None:
    """Four faults, and every check after them, on a real federation."""
    faults = [
        replace(fault, run="nodes", step=SHORT[fault.key])
        for fault in FAULTS
        if fault.key in SHORT
    ]
    steps = 6
    normal = measure_tolerance(SEED, steps)
    findings = run_trials(tmp_path / "flower", faults, SEED, steps, normal, print)
    assert [finding.problems for finding in findings] == [[]] * len(SHORT)
    lost = {finding.fault: finding.lost_steps for finding in findings}
    assert lost == {key: int(key == "killed-after") for key in SHORT}
