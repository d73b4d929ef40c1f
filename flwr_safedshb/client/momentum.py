"""The momentum that a client keeps between steps, and how far back it can go.

A server that was killed resumes from its newest checkpoint, some steps back, and a
message may be delivered twice. So a client keeps two momentums: the newest, and the one
before the step that the server could resume from (its anchor). Both have been sent or
are zero, so what is loaded for which step is no matter of privacy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
from flwr.app import ConfigRecord, ConfigRecordValues, Context
from numpy.typing import NDArray

from flwr_safedshb.flower.compat import refilled
from flwr_safedshb.privacy.ledger.ledger import Ledger

if TYPE_CHECKING:
    from flwr_safedshb.client.step import Step

Vector = NDArray[np.float32]

_KEY = "safedshb"


@dataclass(frozen=True)
class Kept:
    """A momentum after a step, (d,); before step 0 it is zero, (1,)."""

    step: int
    momentum: Vector


_START = Kept(-1, np.zeros(1, np.float32))


@dataclass(frozen=True)
class Past:
    """What a step starts from, and the anchor that was set before it."""

    newest: Kept
    anchor: Kept


def recall(session: str, step: int, context: Context, ledger: Ledger | None) -> Past:
    """Return what `step` of a run starts from; a new run starts from zero."""
    newest, anchor = _kept(session, context, ledger)
    usable = [kept for kept in (newest, anchor) if kept.step < step] or [_START]
    return Past(usable[0], usable[-1])


def keep(
    step: Step, momentum: Vector, past: Past, context: Context, ledger: Ledger | None
) -> None:
    """Keep m_t, and the anchor; with the ledger both outlive the node's process."""
    anchor = past.newest if step.anchor else past.anchor
    if ledger is not None:
        arrays = [momentum, anchor.momentum, np.array([anchor.step])]
        ledger.save_state(step.session, step.number, arrays)
    kept: dict[str, ConfigRecordValues] = {
        "session": step.session,
        "steps": [step.number, anchor.step],
        "newest": momentum.tobytes(),
        "anchor": anchor.momentum.tobytes(),
    }
    before = context.state.get(_KEY)
    context.state[_KEY] = (
        refilled(before, kept)
        if isinstance(before, ConfigRecord)
        else ConfigRecord(kept)
    )


def _kept(session: str, context: Context, ledger: Ledger | None) -> tuple[Kept, Kept]:
    """Return the newest momentum of a run, and its anchor."""
    if ledger is not None:
        saved = ledger.load_state(session)
        if saved is None:
            return _START, _START
        newest, anchor, (anchor_step,) = saved.arrays
        vectors = cast(Vector, newest), cast(Vector, anchor)
        return _pair(vectors, (saved.step, int(anchor_step)))
    state = context.state.get(_KEY)
    if state is None or state["session"] != session:
        return _START, _START
    kept = [
        np.frombuffer(cast(bytes, state[name]), np.float32)
        for name in ("newest", "anchor")
    ]
    return _pair(kept, cast(list[int], state["steps"]))


def _pair(vectors: Sequence[Vector], steps: Sequence[int]) -> tuple[Kept, Kept]:
    newest, anchor = (
        Kept(step, vector) if step >= 0 else _START
        for step, vector in zip(steps, vectors, strict=True)
    )
    return newest, anchor
