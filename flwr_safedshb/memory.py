"""The momentum a client keeps between steps, and how far back it can go.

A server that was killed resumes from its newest checkpoint, some steps back, and a
message may be delivered twice. So a client keeps two momenta: the newest, and the one
before the step that the server could resume from (its anchor). Both have been sent or
are zero, so what is loaded for which step is no matter of privacy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context
from numpy.typing import NDArray

from flwr_safedshb import npy
from flwr_safedshb.privacy.ledger import Ledger

Layers = list[NDArray[np.float32]]


@dataclass(frozen=True)
class Kept:
    """A momentum, and the step after which it is the momentum; none before step 0."""

    step: int = -1
    layers: Layers = field(default_factory=list)


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

    def after(self, step: int, layers: Layers, anchor: bool) -> Memory:
        """Return the memory after `step`; with `anchor`, what it started from stays."""
        past = self.before(step)
        kept = past if anchor or self.anchor.step >= step else self.anchor
        return Memory(Kept(step, layers), kept)

    def to_arrays(self) -> list[NDArray[np.generic]]:
        """Return everything as one list of arrays."""
        steps = np.array([self.newest.step, self.anchor.step, len(self.newest.layers)])
        return [steps, *self.newest.layers, *self.anchor.layers]

    @classmethod
    def from_arrays(cls, arrays: Sequence[NDArray[np.generic]]) -> Memory:
        """Rebuild what `to_arrays` returned."""
        newest, anchor, count = (int(value) for value in arrays[0].tolist())
        layers = [np.asarray(array, np.float32) for array in arrays[1:]]
        return cls(Kept(newest, layers[:count]), Kept(anchor, layers[count:]))


def advanced(past: Kept, gradient: Layers, beta: float) -> Layers:
    """m_t = beta m_{t-1} + (1 - beta) g~_t (Alg. 1, line 4), with m_{-1} = 0."""
    momentum = [(1.0 - beta) * layer.astype(np.float64) for layer in gradient]
    for new, old in zip(momentum, past.layers, strict=bool(past.layers)):
        new += beta * old
    return [layer.astype(np.float32) for layer in momentum]


_SESSION, _MEMORY = "safedshb.session", "safedshb.memory"


def recall(session: str, context: Context, ledger: Ledger | None) -> Memory:
    """Return what was kept of a run; a new run has an empty memory."""
    if ledger is not None:
        saved = ledger.load_state(session)
        return Memory() if saved is None else Memory.from_arrays(saved.arrays)
    named = context.state.config_records.get(_SESSION)
    if named is None or named["id"] != session:
        return Memory()
    arrays = context.state.array_records[_MEMORY].values()
    return Memory.from_arrays([npy.decode(array) for array in arrays])


def keep(session: str, memory: Memory, context: Context, ledger: Ledger | None) -> None:
    """Keep the memory of a run: with the ledger it outlives the node's process."""
    arrays = memory.to_arrays()
    if ledger is not None:
        ledger.save_state(session, memory.newest.step, arrays)
    context.state[_SESSION] = ConfigRecord({"id": session})
    context.state[_MEMORY] = ArrayRecord(
        {str(i): npy.encode(array) for i, array in enumerate(arrays)}
    )
