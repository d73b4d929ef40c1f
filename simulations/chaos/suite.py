"""The trainings under fault, one after the other on one federation."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from flwr_safedshb.node.approvals import KEY, inspect_bundle
from flwr_safedshb.node.flower_patches.fab import build_bundle
from simulations.chaos.band import Band
from simulations.chaos.faults import DISK, Fault
from simulations.chaos.findings import Finding, examined
from simulations.chaos.problem import DELTA, MAX_EPSILON, NODES
from simulations.chaos.trial import Trial
from simulations.loopback import ROOT, Deployment

_APP = ROOT / "simulations" / "chaos" / "flower-app"
# A little more than the room without which `safedshb node` does not start.
_DISK_SIZE = "80m"
# Seconds. While nobody is silent no round lasts as long as the first; where somebody
# is, so many rounds' worth of waiting is enough. Never less than the last: it takes the
# SuperLink a minute to see that a SuperNode is dead, and if the round were over before,
# the next one would begin with nodes that are not there.
_LONG_TIMEOUT, _ROUNDS_WAITED, _SHORT_TIMEOUT = 300.0, 3.0, 120.0

Say = Callable[[str], None]


def trained(
    folder: Path,
    faults: Sequence[Fault],
    seed: int,
    steps: int,
    band: Band,
    say: Say,
) -> list[Finding]:
    """Run the trainings that the faults are part of, and examine each.

    Parameters
    ----------
    folder : Path
        Of the federation's files; must not exist.
    faults : sequence of Fault
        Those of a run follow each other, by step.
    seed, steps : int
    band : Band
        How good models are without a fault.
    say : callable of a text
        Is told what happens.
    """
    findings: list[Finding] = []
    # Its noise is seeded, so that a run can be compared with its model.
    config: dict[str, bool | float | int | str] = {
        "max-epsilon": MAX_EPSILON,
        "delta": DELTA,
        "require-secure-noise": False,
        KEY: inspect_bundle(build_bundle(_APP)).hash,
    }
    timeout = _LONG_TIMEOUT
    say("a SuperLink and its SuperNodes start, with TLS and registered keys")
    to_fill = any(fault.key == "full-disk" for fault in faults)
    with (
        small_disk(folder / f"node-{DISK}") if to_fill else nullcontext(),
        Deployment(folder, NODES, config, _APP) as federation,
    ):
        for run, group in itertools.groupby(faults, key=lambda fault: fault.run):
            struck = list(group)
            orders = {(f.node, f.step): f.order for f in struck if f.order is not None}
            trial = Trial(federation, folder / run, seed, steps, timeout, orders)
            begin = time.monotonic()
            _train(trial, struck, say)
            findings += examined(trial, struck, band)
            if not orders:
                per_round = (time.monotonic() - begin) / steps
                timeout = max(_SHORT_TIMEOUT, _ROUNDS_WAITED * per_round)
    return findings


def _train(trial: Trial, faults: Sequence[Fault], say: Say) -> None:
    say(f"a training begins: {trial.folder.name}")
    trial.submit()
    for step, group in itertools.groupby(faults, key=lambda fault: fault.step):
        together = list(group)
        for fault in together:
            say(f"round {step + 1}: {fault.name}")
            fault.strike(trial, fault.node, step)
        for fault in together:
            fault.repair(trial, fault.node, step)
    say(f"all repaired, the training goes on: {trial.folder.name}")
    trial.wait_end()


def cleared(folder: Path) -> Path:
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
    """Put a file system of a few pages at a path."""
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
