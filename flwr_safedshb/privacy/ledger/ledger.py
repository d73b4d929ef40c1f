"""The privacy budget of one node: charged before data are touched, never forgotten.

Formal guarantees
-----------------
- A charge is on disk before it counts as made, and all charges together never exceed
  the budget (`store` says how).
- The limits are those the ledger was created with; a process may ask for stricter ones
  and is refused weaker ones.
"""

from __future__ import annotations

import hashlib
import io
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from flwr_safedshb.privacy.accounting.limits import EPSILON, MAX_STEPS, checked_delta
from flwr_safedshb.privacy.ledger.database import LedgerCorrupted, LedgerError, create
from flwr_safedshb.privacy.ledger.store import (
    BudgetExhausted,
    Store,
    Totals,
    genesis,
    plan_of,
)
from flwr_safedshb.privacy.plan import PrivacyPlan

__all__ = [
    "BudgetExhausted",
    "Charge",
    "Ledger",
    "LedgerCorrupted",
    "LedgerError",
    "SavedState",
]

# Steps that are looked ahead, so that not every charge needs the accountant.
_AHEAD = 64

Arrays = list[npt.NDArray[np.generic]]


@dataclass(frozen=True)
class Charge:
    """One entry: ``steps`` releases under ``plan`` in ``run``, at ``time`` (UTC)."""

    time: str
    run: str
    plan: PrivacyPlan
    steps: int


@dataclass(frozen=True)
class SavedState:
    """A run's state after ``step``."""

    step: int
    arrays: Arrays


class Ledger(Store):
    """Open the ledger at ``path``, or create it.

    Parameters
    ----------
    path : str or Path
        The SQLite file; created, readable by its owner only, if both limits are given
        and it does not exist.
    max_epsilon : float, optional
        Budget over the whole life of the ledger. For an existing ledger: a smaller one
        than it was created with binds this object, a larger one is refused.
    delta : float, optional
        For an existing ledger it must be the one that it was created with.

    Attributes
    ----------
    path : Path
        The file, by its real name.
    max_epsilon, delta : float
        The limits in force here.
    """

    def __init__(
        self,
        path: str | Path,
        max_epsilon: float | None = None,
        delta: float | None = None,
    ) -> None:
        path = Path(path)
        if max_epsilon is not None:
            max_epsilon = EPSILON.checked("max_epsilon", max_epsilon)
        if delta is not None:
            delta = checked_delta(delta)
        if not path.exists():
            if max_epsilon is None or delta is None:
                raise LedgerError(
                    f"there is no ledger {path}; give max_epsilon and delta to create "
                    "one, or the path of the ledger that holds the past charges"
                )
            create(path, max_epsilon, delta, genesis(max_epsilon, delta))
        super().__init__(path)
        self.max_epsilon = self._agreed(max_epsilon, delta)

    def epsilon(self) -> float:
        """Epsilon of everything charged so far, over all runs and plans."""
        # The accountants are slow to import, and a client must start without them.
        from flwr_safedshb.privacy.accounting import accountant

        with self._transaction() as transaction:
            totals = dict(self._totals(transaction))
        return accountant.epsilon(list(totals.items()), self.delta)

    def charges(self) -> list[Charge]:
        """Return every charge, oldest first."""
        with self._transaction() as transaction:
            self._totals(transaction)
            rows = transaction.execute(
                "SELECT time, run, p.plan, steps FROM charges c "
                "JOIN plans p ON p.id = c.plan ORDER BY c.id"
            ).fetchall()
        return [
            Charge(time, run, plan_of(text), steps) for time, run, text, steps in rows
        ]

    def load_state(self, run_id: str | int) -> SavedState | None:
        """Return what an older version kept of the run here, if it did.

        It had no file for a momentum and put it into the ledger.
        """
        with self._transaction() as transaction:
            row = transaction.execute(
                "SELECT step, arrays, hash FROM state WHERE run = ?", (str(run_id),)
            ).fetchone()
        if row is None:
            return None
        step, content, digest = row
        if digest != _digest(str(run_id), step, content):
            raise LedgerCorrupted(
                f"the state of run {run_id} in the ledger {self.path} was "
                "changed since it was saved; start a new run"
            )
        arrays: Arrays = []
        with io.BytesIO(content) as buffer:
            while buffer.tell() < len(content):
                arrays.append(np.load(buffer, allow_pickle=False))
        return SavedState(step, arrays)

    def forget_state(self, run_id: str | int) -> None:
        """Drop what `load_state` returns."""
        with self._transaction() as transaction:
            transaction.execute("DELETE FROM state WHERE run = ?", (str(run_id),))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _agreed(self, max_epsilon: float | None, delta: float | None) -> float:
        """Limits of this object; the file's own are the weakest possible."""
        created = self.max_epsilon
        if delta is not None and delta != self.delta:
            raise LedgerError(
                f"delta={delta:g} is not the one this ledger was created with, "
                f"{self.delta:g}; it stays for the ledger's life"
            )
        if max_epsilon is not None and max_epsilon > created:
            raise LedgerError(
                f"max_epsilon={max_epsilon:g} is weaker than {created:g}, the budget "
                "this ledger was created with; ask for at most that"
            )
        budget = created if max_epsilon is None else max_epsilon
        try:  # what an older version accepted may not be a limit at all
            checked_delta(self.delta)
            return EPSILON.checked("max_epsilon", budget)
        except ValueError as error:
            raise LedgerError(
                f"the ledger {self.path} was created with limits that protect "
                f"nothing: {error}; open it with a stricter max_epsilon, or, if it is "
                "its delta, make a new one for data that no run has seen"
            ) from error

    def _learn(self, plan: PrivacyPlan, steps: int, totals: Totals) -> Totals:
        from flwr_safedshb.privacy.accounting import accountant

        def bound(count: int) -> float:
            charges = [*{**totals, plan: count}.items()]
            return accountant.epsilon_upper_bound(charges, self.delta)

        past = totals.get(plan, 0)
        total = past + steps
        ahead = min(total + max(total, _AHEAD), max(total, MAX_STEPS))
        for enough in (ahead, total):
            if bound(enough) <= self.max_epsilon:
                break
        else:
            charges, limit = [*totals.items()], self.max_epsilon
            enough = past + accountant.max_steps(charges, plan, self.delta, limit)
        self._fitting = {**totals, plan: enough}
        return self._fitting


def _digest(run: str, step: int, content: bytes) -> bytes:
    return hashlib.sha256(f"{run}\n{step}\n".encode() + content).digest()
