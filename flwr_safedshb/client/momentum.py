"""The momentum a client keeps between steps, and how far back it can go.

A server that was killed resumes from its newest checkpoint, some steps back, and a
message may be delivered twice. So a client keeps two momenta: the newest, and the one
before the step that the server could resume from (its anchor). Both have been sent or
are zero, so what is loaded for which step is no matter of privacy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import numpy as np
from flwr.app import ConfigRecord, ConfigRecordValues, Context
from numpy.typing import NDArray

from flwr_safedshb.flower.compat import refilled
from flwr_safedshb.privacy.ledger.ledger import Ledger

Vector = NDArray[np.float32]


def _empty() -> Vector:
    return np.empty(0, np.float32)


@dataclass(frozen=True)
class Kept:
    """A momentum, (d,), after a step; empty before step 0, where it is zero."""

    step: int = -1
    vector: Vector = field(default_factory=_empty)

    def advanced(self, gradient: NDArray[np.float64], beta: float) -> Vector:
        """m_t = beta m_{t-1} + (1 - beta) g~_t (Alg. 1, line 4), with m_{-1} = 0."""
        momentum = (1.0 - beta) * gradient
        if len(self.vector):
            momentum += beta * self.vector
        return momentum.astype(np.float32)


@dataclass(frozen=True)
class Memory:
    """What a client remembers of a run."""

    newest: Kept = field(default_factory=Kept)
    anchor: Kept = field(default_factory=Kept)

    def before(self, step: int) -> Kept:
        """Return the momentum to start `step` from, m_{t-1} if no step was missed."""
        for kept in (self.newest, self.anchor):
            if kept.step < step:
                return kept
        return Kept()

    def after(self, step: int, momentum: Vector, anchor: bool) -> Memory:
        """Return the memory after `step`; with `anchor`, what it started from stays."""
        past = self.before(step)
        kept = past if anchor or self.anchor.step >= step else self.anchor
        return Memory(Kept(step, momentum), kept)


_KEY = "safedshb"


def recall(session: str, context: Context, ledger: Ledger | None) -> Memory:
    """Return what was kept of a run; a new run has an empty memory."""
    if ledger is not None:
        saved = ledger.load_state(session)
        if saved is None:
            return Memory()
        newest, anchor, (anchor_step,) = saved.arrays
        return Memory(
            Kept(saved.step, cast(Vector, newest)),
            Kept(int(anchor_step), cast(Vector, anchor)),
        )
    state = context.state.get(_KEY)
    if state is None or state["session"] != session:
        return Memory()
    newest_step, anchor_step = cast(list[int], state["steps"])
    vectors = np.frombuffer(cast(bytes, state["vectors"]), np.float32)
    size = len(vectors) if anchor_step < 0 else len(vectors) // 2
    return Memory(Kept(newest_step, vectors[:size]), Kept(anchor_step, vectors[size:]))


def keep(session: str, memory: Memory, context: Context, ledger: Ledger | None) -> None:
    """Keep the memory of a run: with the ledger it outlives the node's process."""
    newest, anchor = memory.newest, memory.anchor
    if ledger is not None:
        arrays = [newest.vector, anchor.vector, np.array([anchor.step])]
        ledger.save_state(session, newest.step, arrays)
    vectors = newest.vector.tobytes() + anchor.vector.tobytes()
    kept: dict[str, ConfigRecordValues] = {
        "session": session,
        "steps": [newest.step, anchor.step],
        "vectors": vectors,
    }
    before = context.state.get(_KEY)
    context.state[_KEY] = (
        refilled(before, kept)
        if isinstance(before, ConfigRecord)
        else ConfigRecord(kept)
    )
