"""The trainings under fault, one after the other on one federation, and what came."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from flwr_safedshb.node.approvals import KEY, inspect_bundle
from flwr_safedshb.node.flower_patches.fab import build_bundle
from simulations.chaos.checks import (  # epsilon_of, find_line
    check_all,
    epsilon_of,
    find_line,
    measure_distance,
)
from simulations.chaos.faults import DISK, Fault
from simulations.chaos.problem import DELTA, HONEST, HOSTILE, MAX_EPSILON, NODES
from simulations.chaos.tolerance import Tolerance
from simulations.chaos.trial import FaultTrial
from simulations.loopback import ROOT, Deployment

APP = ROOT / "simulations" / "chaos" / "flower-app"
# A little more than the room without which `safedshb node` does not start.
_DISK_SIZE = "80m"
# Seconds. While nobody is silent no round lasts as long as the first; where somebody
# is, so many rounds' worth of waiting is enough. Never less than the last: it takes the
# SuperLink a minute to see that a SuperNode is dead, and if the round were over before,
# the next one would begin with nodes that are not there.
_LONG_TIMEOUT, _ROUNDS_WAITED, _SHORT_TIMEOUT = 300.0, 3.0, 120.0

Say = Callable[[str], None]


@dataclass(frozen=True)
class FaultReport:
    """What came of a fault: one row of the report."""

    fault: str
    name: str
    seen: str  # the line of the log
    # Steps that a node charged for and the server could not use, the most of any node
    # for a fault of the server; and what they cost.
    lost_steps: int
    lost_epsilon: float
    effect: str
    distance: float  # of the final model of the run from the optimum
    problems: list[str]  # what does not hold and should


def run_trials(
    folder: Path,
    faults: Sequence[Fault],
    seed: int,
    steps: int,
    tolerance: Tolerance,
    say: Say,
) -> list[FaultReport]:
    """Run the trainings that the faults are part of, and examine each.

    Parameters
    ----------
    folder : Path
        Of the federation's files; must not exist.
    faults : sequence of Fault
        Those of a run follow each other, by step.
    seed, steps : int
    tolerance : Tolerance
        How good models are without a fault.
    say : callable of a text
        Is told what happens.
    """
    findings: list[FaultReport] = []
    # Its noise is seeded, so that a run can be compared with its model.
    config: dict[str, bool | float | int | str] = {
        "max-epsilon": MAX_EPSILON,
        "delta": DELTA,
        "require-secure-noise": False,
        KEY: inspect_bundle(build_bundle(APP)).hash,
    }
    timeout = _LONG_TIMEOUT
    say("a SuperLink and its SuperNodes start, with TLS and registered keys")
    to_fill = any(fault.key == "full-disk" for fault in faults)
    with (
        small_disk(folder / f"node-{DISK}") if to_fill else nullcontext(),
        Deployment(folder, NODES, config, APP, proxied=True) as federation,
    ):
        for run, group in itertools.groupby(faults, key=lambda fault: fault.run):
            struck = list(group)
            orders = {(f.node, f.step): f.order for f in struck if f.order is not None}
            trial = FaultTrial(federation, folder / run, seed, steps, timeout, orders)
            begin = time.monotonic()
            _run_trial(trial, struck, say)
            findings += examine_trial(trial, struck, tolerance)
            if not orders:
                per_round = (time.monotonic() - begin) / steps
                timeout = max(_SHORT_TIMEOUT, _ROUNDS_WAITED * per_round)
    return findings


def _run_trial(trial: FaultTrial, faults: Sequence[Fault], say: Say) -> None:
    say(f"a training begins: {trial.folder.name}")
    trial.submit_run()
    for step, group in itertools.groupby(faults, key=lambda fault: fault.step):
        together = list(group)
        for fault in together:
            say(f"round {step + 1}: {fault.name}")
            fault.strike(trial, fault.node, step)
        for fault in together:
            fault.repair(trial, fault.node, step)
    say(f"all repaired, the training goes on: {trial.folder.name}")
    trial.wait_end()


def examine_trial(
    trial: FaultTrial, faults: Sequence[Fault], tolerance: Tolerance
) -> list[FaultReport]:
    """Hold an ended trial against all that must be true after its faults."""
    died_charged = {fault.node for fault in faults if fault.dies_charged}
    common = check_all(trial, tolerance, died_charged)
    findings = []
    for fault in faults:
        problems = list(common)
        seen = find_line(trial, fault.log, fault.line, fault.node)
        if seen is None:
            problems.append(f"no line of the log of {fault.log} has {fault.line!r}")
        effect, wrong = _check_effect(trial, fault)
        findings.append(
            FaultReport(
                fault.key,
                fault.name,
                seen or "",
                *_count_losses(trial, fault),
                effect,
                measure_distance(trial),
                problems + wrong,
            )
        )
    return findings


def _count_losses(trial: FaultTrial, fault: Fault) -> tuple[int, float]:
    """Return the steps lost to a fault, and their epsilon, for the worst hit node."""
    nodes = HONEST if fault.effect == "again" else {fault.node} - {HOSTILE}
    worst = (0, 0.0)
    for node in nodes:
        released, charges = trial.list_released(node), trial.count_charges(node)
        lost = released.count(fault.step) - (fault.step in trial.list_used(node))
        lost += (charges - len(released)) * fault.dies_charged
        worst = max(worst, (lost, epsilon_of(charges) - epsilon_of(charges - lost)))
    return worst


def _check_effect(trial: FaultTrial, fault: Fault) -> tuple[str, list[str]]:
    """Say what the fault did to the training, and what is wrong with that."""
    node, round_ = fault.node, fault.step + 1
    match fault.effect:
        case "no part":
            return "no part in any round", []
        case "again":
            times = trial.list_asked(node).count(fault.step)
            wrong = [] if times == 2 else [f"round {round_} was done {times} times"]
            return f"round {round_} is done again", wrong
        case "whole":
            away = [n for n in HONEST if fault.step not in trial.list_used(n)]
            wrong = [f"round {round_} was without node {n}" for n in away]
            return "none", wrong
        case "none":
            sent, _ = trial.read_messages()
            known = trial.federation.node_ids.values()
            strangers = {message.node for message in sent}.difference(known)
            return "none", [f"{stranger} took part" for stranger in strangers]
    used = trial.list_used(node)
    back = min((step + 1 for step in used if step > fault.step), default=None)
    wrong = [] if back else [f"node {node} never came back"]
    if fault.step in used:
        wrong.append(f"node {node} was struck and not missed in round {round_}")
    return f"round {round_} without it; back in round {back}", wrong


def clear_folder(folder: Path) -> Path:
    """Return an empty folder; a killed run may have left a disk in it."""
    for line in Path("/proc/mounts").read_text().splitlines():
        target = Path(line.split()[1].replace("\\040", " "))
        if target.is_relative_to(folder.absolute()):
            _unmount(target)
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    return folder


@contextmanager
def small_disk(path: Path) -> Iterator[None]:
    """Put a small file system at a path."""
    path.mkdir(parents=True)
    options = f"size={_DISK_SIZE},mode=700"  # a node shares its folder with nobody
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise PermissionError(
            f"a disk to fill needs the right to mount one, as root: {done.stderr}"
        )
    try:
        yield
    finally:
        _unmount(path)


def _unmount(path: Path) -> None:
    subprocess.run(["umount", "--lazy", str(path)], check=True)
