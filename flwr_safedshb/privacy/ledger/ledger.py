"""The privacy budget of one node: charged before data are touched, never forgotten.

Formal guarantees
-----------------
- A charge is on disk before it counts as made, and all charges together never exceed
  the budget (`store` says how).
- All releases together are (max_epsilon, delta)-DP in the ledger's unit, whoever
  chooses their plans and by whatever was released before (`budget` says why).
- The limits and the unit are those the ledger was created with; a process may ask for
  stricter limits and is refused weaker ones, or another unit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, get_args

from flwr_safedshb.privacy.accounting.ranges import EPSILON, MAX_STEPS, check_delta
from flwr_safedshb.privacy.ledger.database import LedgerCorrupted, LedgerError, create
from flwr_safedshb.privacy.ledger.history import History, Kind, Totals
from flwr_safedshb.privacy.ledger.store import (
    Block,
    BudgetExhausted,
    Fitting,
    Store,
    genesis,
    plan_of,
)
from flwr_safedshb.privacy.plan import Adjacency, PrivacyPlan, PrivacyStatement

if TYPE_CHECKING:
    from flwr_safedshb.privacy.ledger.budget import Budget

__all__ = [
    "BudgetExhausted",
    "Charge",
    "Ledger",
    "LedgerCorrupted",
    "LedgerError",
]


@dataclass(frozen=True)
class Charge:
    """One entry: ``steps`` releases under ``plan`` in ``run``, at ``time`` (UTC)."""

    time: str
    run: str
    plan: PrivacyPlan
    steps: int


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
    unit : {"replace-one", "add-remove"}, optional
        The unit of privacy: by how many examples neighbouring datasets differ, and how.
        By default replace-one; for an existing ledger it must be its own. No run
        chooses it: plans of another adjacency are accounted in the ledger's unit.

    Attributes
    ----------
    path : Path
        The file, by its real name.
    max_epsilon, delta : float
        The limits in force here.
    unit : str
    """

    def __init__(
        self,
        path: str | Path,
        max_epsilon: float | None = None,
        delta: float | None = None,
        unit: Adjacency | None = None,
    ) -> None:
        path = Path(path)
        if unit is not None and unit not in get_args(Adjacency):
            raise ValueError(
                f"unit={unit!r} is unknown; use one of "
                + ", ".join(map(repr, get_args(Adjacency)))
            )
        if max_epsilon is not None:
            max_epsilon = EPSILON.check("max_epsilon", max_epsilon)
        if delta is not None:
            delta = check_delta(delta)
        if not path.exists():
            if max_epsilon is None or delta is None:
                raise LedgerError(
                    f"there is no ledger {path}; give max_epsilon and delta to create "
                    "one, or the path of the ledger that holds the past charges"
                )
            made = unit or "replace-one"
            head = genesis(max_epsilon, delta, made)
            create(path, max_epsilon, delta, made, head)
        super().__init__(path)
        if unit is not None and unit != self.unit:
            raise LedgerError(
                f"unit={unit!r} is not the one this ledger was created with, "
                f"{self.unit!r}; it stays for the ledger's life"
            )
        self._created_with = self.max_epsilon
        self.max_epsilon = self._agreed(max_epsilon, delta)

    def epsilon(self, run: str | int | None = None) -> float:
        """Epsilon of everything so far, or of one run alone.

        Within the first commitment it is that of the commitment, used or not; past it,
        that of all charges by a Renyi filter. A run alone is accounted in the same way,
        by its own commitment.
        """
        return self.statement(run).epsilon

    def statement(self, run: str | int | None = None) -> PrivacyStatement:
        """State `epsilon`, with the mechanism and the unit that it is true for."""
        first, charged = self._accounted(run)
        return self._budget(first).statement(charged)

    def steps_left(self, plan: PrivacyPlan) -> int:
        """Count the further steps of ``plan`` that fit; before any, as the first."""
        plan = plan.convert_to_unit(self.unit)
        first, charged = self._accounted(None)
        if first:
            return self._budget(first).steps_left(plan, charged)
        (_, steps), *_ = self._cut([(plan, MAX_STEPS)])
        return steps

    def charges(self) -> list[Charge]:
        """Return every charge, oldest first."""
        return self._listed("charge")

    def commitments(self) -> list[Charge]:
        """Return what runs were committed to, oldest first."""
        return self._listed("commit")

    def _listed(self, kind: Kind) -> list[Charge]:
        with self._transaction() as transaction:
            self._history(transaction)
            rows = transaction.execute(
                "SELECT time, run, p.plan, steps FROM entries e JOIN plans p "
                "ON p.id = e.plan WHERE kind = ? ORDER BY e.id",
                (kind,),
            ).fetchall()
        return [
            Charge(time, run, plan_of(text), steps) for time, run, text, steps in rows
        ]

    def _accounted(self, run: str | int | None) -> tuple[Totals, Totals]:
        """Return the first block and all charges, of everything or of one run."""
        if run is None:
            with self._transaction() as transaction:
                history = self._history(transaction).copy()
            return history.first, history.charged
        history = History(0, b"")
        for kind in get_args(Kind):
            for one in self._listed(kind):
                if one.run == str(run):
                    plan = one.plan.convert_to_unit(self.unit)
                    history.add(kind, one.run, plan, one.steps, b"")
        return history.first, history.charged

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
            check_delta(self.delta)
            return EPSILON.check("max_epsilon", budget)
        except ValueError as error:
            raise LedgerError(
                f"the ledger {self.path} was created with limits that protect "
                f"nothing: {error}; open it with a stricter max_epsilon, or, if it is "
                "its delta, make a new one for data that no run has seen"
            ) from error

    def _learn(self, plan: PrivacyPlan, charged: Totals, first: Totals) -> Fitting:
        budget = self._budget(first)
        if budget.allows_first(charged):
            self._fitting = Fitting(first, first)
        else:
            enough = budget.most_steps(plan, charged, charged[plan])
            self._fitting = Fitting(first, {**charged, plan: enough})
        return self._fitting

    def _has_room(self, block: Block) -> bool:
        return any(steps and self.steps_left(plan) > 0 for plan, steps in block)

    def _cut(self, block: Block) -> Block:
        from flwr_safedshb.privacy.ledger.budget import shrink_block

        return shrink_block(block, self.delta, self.max_epsilon, self.unit)

    def _budget(self, first: Totals) -> Budget:
        limits = self.delta, self._created_with, self.max_epsilon, self.unit
        return _budget_of(tuple(first.items()), *limits)


@lru_cache(maxsize=64)
def _budget_of(
    first: tuple[tuple[PrivacyPlan, int], ...],
    delta: float,
    max_epsilon: float,
    limit: float,
    unit: Adjacency,
) -> Budget:
    # The accountants are slow to import, and a client must start without them.
    from flwr_safedshb.privacy.ledger.budget import Budget

    return Budget(first, delta, max_epsilon, limit, unit)
