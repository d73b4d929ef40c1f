"""A process killed at any moment of a step costs at most its message."""

import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flwr_safedshb import client
from flwr_safedshb.algorithm.momentum_store import MomentumFiles
from flwr_safedshb.privacy.ledger.ledger import Ledger
from tests.clients import ask, ledger, node, same
from tests.guard import HANGS


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def after(call: Callable[..., Any]) -> Callable[..., None]:
    def then_die(*arguments: Any, **more: Any) -> None:
        call(*arguments, **more)
        die()

    return then_die


# Where a step is when it is killed, and whether it has charged and kept by then.
MOMENTS = {
    "before the charge": (Ledger, "charge", die, False, False),
    "after the charge": (Ledger, "charge", after(Ledger.charge), True, False),
    "before the momentum": (MomentumFiles, "save", die, True, False),
    "after the momentum": (
        MomentumFiles,
        "save",
        after(MomentumFiles.save),
        True,
        True,
    ),
    "before the reply": (client, "split_vector", die, True, True),
}


def killed_step(folder: Path, moment: str) -> None:
    where, name, instead, _, _ = MOMENTS[moment]
    setattr(where, name, instead)
    ask(node(folder), 1, session="run")


@pytest.mark.process
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_kill_costs_at_most_its_message(tmp_path: Path, moment: str) -> None:
    *_, charged, kept = MOMENTS[moment]
    first = ask(node(tmp_path), 0, session="run")
    fork = multiprocessing.get_context("fork")
    process = fork.Process(target=killed_step, args=(tmp_path, moment))
    process.start()
    process.join(HANGS)
    assert process.exitcode == -signal.SIGKILL
    assert len(ledger(tmp_path).charges()) == 1 + charged
    # The next message goes on from what was kept, as if nothing had been.
    straight = node()
    assert same(ask(straight, 0, session="run"), first)
    if kept:
        ask(straight, 1, session="run")
    expected = ask(straight, 2, session="run")
    assert same(ask(node(tmp_path), 2, session="run"), expected)
    assert len(ledger(tmp_path).charges()) == 2 + charged
