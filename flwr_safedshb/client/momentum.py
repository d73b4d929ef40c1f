"""The momentum that a client keeps between steps, and how far back it can go.

A server that was killed resumes from its newest checkpoint, some steps back, and a
message may be delivered twice. So a client keeps two momentums: the newest, and the one
before the step that the server could resume from (its anchor). Both have been sent or
are zero, so what is loaded for which step is no matter of privacy.

With a ledger they are files beside it; a simulation keeps them in Flower's context.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np
from flwr.app import ConfigRecord, ConfigRecordValues, Context

from flwr_safedshb.client.momentum_files import Kept, MomentumFiles, Vector
from flwr_safedshb.flower.compat import refilled
from flwr_safedshb.privacy.ledger.ledger import Ledger

if TYPE_CHECKING:
    from flwr_safedshb.client.step import Step

_KEY = "safedshb"
_ZERO = np.zeros(1, np.float32)


def recall(
    session: str, step: int, size: int, context: Context, ledger: Ledger | None
) -> Kept:
    """Return what `step` of a run starts from, (d,) or zero, (1,), for a new run."""
    if ledger is None:
        kept = _in_context(session, context)
        usable = [one for one in kept if one.step < step]
        found = usable[0] if usable else None
    else:
        files = MomentumFiles(ledger.path.parent)
        found = files.newest(session, step, size)
        if found is None and _moved(session, ledger, files):
            found = files.newest(session, step, size)
    return Kept(-1, _ZERO) if found is None else found


def keep(
    step: Step, momentum: Vector, past: Kept, context: Context, ledger: Ledger | None
) -> None:
    """Keep m_t, and the anchor; with the ledger both outlive the node's process."""
    kept = Kept(step.number, momentum, past.step if step.anchor else past.anchor)
    if ledger is not None:
        MomentumFiles(ledger.path.parent).write(step.session, kept)
        return
    before = [past, *_in_context(step.session, context), Kept(-1, _ZERO)]
    anchor = next(one for one in before if one.step in (kept.anchor, -1))
    values: dict[str, ConfigRecordValues] = {
        "session": step.session,
        "steps": [kept.step, anchor.step],
        "newest": momentum.tobytes(),
        "anchor": anchor.momentum.tobytes(),
    }
    record = context.state.get(_KEY)
    context.state[_KEY] = (
        refilled(record, values)
        if isinstance(record, ConfigRecord)
        else ConfigRecord(values)
    )


def has_room(ledger: Ledger, size: int) -> bool:
    """Say whether a momentum of d numbers can be kept on the ledger's disk."""
    return MomentumFiles(ledger.path.parent).room_for(size)


def _in_context(session: str, context: Context) -> list[Kept]:
    """Return the newest momentum of a run, and its anchor."""
    state = context.state.get(_KEY)
    if state is None or state["session"] != session:
        return []
    newest, anchor = cast(list[int], state["steps"])
    vectors = [
        np.frombuffer(cast(bytes, state[name]), np.float32)
        for name in ("newest", "anchor")
    ]
    return [Kept(newest, vectors[0], anchor), Kept(anchor, vectors[1], anchor)]


def _moved(session: str, ledger: Ledger, files: MomentumFiles) -> bool:
    """Move what an older version has kept in the ledger itself; say if it did."""
    saved = ledger.load_state(session)
    if saved is None:
        return False
    newest, anchor, (step,) = saved.arrays
    files.write(session, Kept(saved.step, cast(Vector, newest), int(step)))
    if step >= 0:
        files.write(session, Kept(int(step), cast(Vector, anchor), saved.step))
    ledger.forget_state(session)
    return True
