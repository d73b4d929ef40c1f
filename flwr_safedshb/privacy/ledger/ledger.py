"""The privacy budget of one node: charged before data are touched, never forgotten.

Formal guarantees
-----------------
- A charge is on disk before it counts as made, and all charges of all processes, runs
  and plans together never exceed the budget (`ledger_file` says how).
- All releases together are (max_epsilon, delta)-DP in the ledger's unit, whoever
  chooses their plans and by whatever was released before (`admission` says why).
- The limits and the unit are those the ledger was created with; a process may ask for
  stricter limits and is refused weaker ones, or another unit.
"""

from __future__ import annotations

import itertools
import logging
from dataclasses import dataclass, field
from functools import lru_cache
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Self, get_args

from flwr_safedshb.privacy.accounting.ranges import (
    EPSILON,
    MAX_STEPS,
    check_delta,
    check_steps,
    shorten_value,
)
from flwr_safedshb.privacy.ledger.database import (
    LedgerCorrupted,
    LedgerError,
    create_database,
)
from flwr_safedshb.privacy.ledger.history import (
    Block,
    History,
    Kind,
    Totals,
    is_within,
)
from flwr_safedshb.privacy.ledger.ledger_file import (
    LedgerFile,
    convert_to_unit,
    hash_limits,
)
from flwr_safedshb.privacy.ledger.proof import ChargeProof
from flwr_safedshb.privacy.plan import PrivacyPlan, PrivacyStatement, PrivacyUnit
from flwr_safedshb.sanitize import SAFE_NAME

if TYPE_CHECKING:
    from flwr_safedshb.privacy.ledger.admission import AdmissionRule

__all__ = [
    "BudgetExhausted",
    "Charge",
    "Ledger",
    "LedgerCorrupted",
    "LedgerError",
]

# After so many attempts, accounting is done while the file is locked.
_MAX_UNLOCKED_ATTEMPTS = 2


class BudgetExhausted(RuntimeError):  # noqa: N818  # the name users wait for
    """The charge would exceed the budget; nothing was charged."""


@dataclass(frozen=True)
class Charge:
    """One entry: ``steps`` releases under ``plan`` in ``run``, at ``time`` (UTC)."""

    time: str
    run: str
    plan: PrivacyPlan
    steps: int


@dataclass(frozen=True)
class Admissible:
    """Charges known to fit the budget after a first block; any subset fits, too."""

    first: Totals = field(default_factory=dict)
    charged: Totals = field(default_factory=dict)

    def covers(self, first: Totals, charged: Totals) -> bool:
        """Return whether these charges are known to fit after this first block."""
        return self.first == first and is_within(charged, self.charged)


class Ledger:
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
    unit : {"replace-one", "add-remove", "person", "person-add-remove"}, optional
        The unit of privacy: how neighbouring datasets differ, in one example or in one
        person with all of theirs. By default replace-one; for an existing ledger it
        must be the ledger's own. A run cannot choose it: plans of another adjacency are
        accounted in the ledger's unit, and plans for examples and for persons do not
        mix.

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
        unit: PrivacyUnit | None = None,
    ) -> None:
        path = Path(path)
        if unit is not None and unit not in get_args(PrivacyUnit):
            raise ValueError(
                f"unit={unit!r} is unknown; use one of "
                + ", ".join(map(repr, get_args(PrivacyUnit)))
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
            limits = max_epsilon, delta, unit or "replace-one"
            create_database(path, *limits, hash_limits(*limits))
        file = LedgerFile(path)
        for name, asked, made in (
            ("unit", unit, file.unit),
            ("delta", delta, file.delta),
        ):
            if asked not in (None, made):
                raise LedgerError(
                    f"{name}={asked!r} is not the one this ledger was created with, "
                    f"{made!r}; it stays for the ledger's life"
                )
        if max_epsilon is not None and max_epsilon > file.max_epsilon:
            raise LedgerError(
                f"max_epsilon={max_epsilon:g} is weaker than {file.max_epsilon:g}, the "
                "budget this ledger was created with; ask for at most that"
            )
        self.path, self.delta, self.unit = file.path, file.delta, file.unit
        self.max_epsilon = file.max_epsilon if max_epsilon is None else max_epsilon
        self._file = file
        self._admissible = Admissible()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the file; the next use opens it again."""
        self._file.close()

    def charge(self, plan: PrivacyPlan, steps: int = 1, run: str | int = "") -> None:
        """Charge ``steps`` releases under ``plan``; the charge is on disk on return.

        Raises
        ------
        ValueError
            If `run` is not a safe name, because it is kept for the ledger's life, or if
            the plan's sampler has no accountant for the ledger's unit.
        BudgetExhausted
            If all charges together would exceed ``max_epsilon``; none is made.
        LedgerError
            If the charge could not be written: release nothing.
        """
        if isinstance(steps, bool) or not isinstance(steps, Integral) or steps < 1:
            raise ValueError(
                f"steps={shorten_value(steps)} must be an integer of at least 1"
            )
        steps, name = int(steps), _check_run_name(run)
        same, admissible = convert_to_unit(plan, self.unit), self._admissible
        for attempt in itertools.count():
            with self._file.transaction() as history:
                first = {**history.first} or {same: steps}
                charged = {**history.charged}
                charged[same] = charged.get(same, 0) + steps
                if attempt >= _MAX_UNLOCKED_ATTEMPTS:
                    admissible = self._look_ahead(same, first, charged)
                if admissible.covers(first, charged):
                    self._file.append("charge", plan, steps, name)
                    return
            # Accounting takes seconds, so the file is not locked. If another process
            # changes the history meanwhile, the next attempt notices.
            admissible = self._look_ahead(same, first, charged)
            if not admissible.covers(first, charged):
                raise BudgetExhausted(
                    f"{steps} more steps would exceed max_epsilon={self.max_epsilon:g} "
                    f"at delta={self.delta:g}; nothing was charged, and this node can "
                    "take no further part under this plan"
                )

    def commit(self, block: Block, run: str | int = "") -> None:
        """Commit a run to plans and the most steps of each, before its first release.

        The first commitment of a ledger, if nothing was charged before it, is accounted
        as a whole by its privacy loss distribution. It then covers charges of plans
        with the same cost, in any order and by any run. A commitment that exceeds the
        budget is cut to the largest share that fits. A later commitment only states the
        cost of its run alone. A run that has an entry already is not committed again.

        Parameters
        ----------
        block : sequence of (PrivacyPlan, int)
            Plans, and the most steps of each; 0 for none.
        run : str or int
            A safe name.

        Raises
        ------
        ValueError
        LedgerError
            If it could not be written.
        """
        name = _check_run_name(run)
        if name in self._file.runs:
            return
        wanted = [(plan, check_steps(steps)) for plan, steps in block]
        for plan, _ in wanted:
            convert_to_unit(plan, self.unit)
        first, _ = self._add_up_entries(None)
        if first and not any(n and self.steps_left(plan) > 0 for plan, n in wanted):
            return  # otherwise a server could fill the file of a spent ledger
        # Accounting takes seconds, so the file is not locked.
        cut = wanted if first else self._shrink(wanted)
        with self._file.transaction() as history:
            if name in history.runs:
                return
            # Another process may have made the first block meanwhile.
            kept = wanted if history.first else cut
            for plan, steps in kept:
                if steps:
                    self._file.append("commit", plan, steps, name)
        if kept != wanted:
            logging.getLogger(__name__).warning(
                "ledger %s: run %s asks for up to %s steps of its plans, and the "
                "budget allows %s: the run will end with the budget",
                self.path,
                name,
                " and ".join(str(steps) for _, steps in wanted),
                " and ".join(str(steps) for _, steps in kept),
            )

    def epsilon(self, run: str | int | None = None) -> float:
        """Return the epsilon of all charges so far, or of one run alone.

        Within the first commitment it is the epsilon of the whole commitment, used or
        not; beyond it, that of all charges by a Renyi filter. A run alone is accounted
        in the same way, by its own commitment.
        """
        return self.statement(run).epsilon

    def statement(self, run: str | int | None = None) -> PrivacyStatement:
        """Return `epsilon` as a statement with its mechanism and unit."""
        first, charged = self._add_up_entries(run)
        return self._make_rule(first).state_epsilon(charged)

    def steps_left(self, plan: PrivacyPlan) -> int:
        """Count the further steps of ``plan`` that fit the budget."""
        plan = convert_to_unit(plan, self.unit)
        first, charged = self._add_up_entries(None)
        if first:
            return self._make_rule(first).count_steps_left(plan, charged)
        (_, steps), *_ = self._shrink([(plan, MAX_STEPS)])
        return steps

    def charges(self) -> list[Charge]:
        """Return every charge, oldest first."""
        return [Charge(*entry) for entry in self._file.list_entries("charge")]

    def commitments(self) -> list[Charge]:
        """Return every commitment, oldest first."""
        return [Charge(*entry) for entry in self._file.list_entries("commit")]

    def prove_charge(self, run: str | int) -> ChargeProof:
        """Return the newest charge of a run as a proof for others.

        Raises
        ------
        ValueError
            If the run has no charge.
        """
        before, entry, head = self._file.read_last_charge(_check_run_name(run))
        first, charged = self._add_up_entries(run)
        return ChargeProof(
            before.hex(),
            tuple(entry),
            head.hex(),
            self._file.max_epsilon,
            self.delta,
            self.unit,
            tuple((plan.to_json(), steps) for plan, steps in first.items()),
            tuple((plan.to_json(), steps) for plan, steps in charged.items()),
            self._make_rule(first).state_epsilon(charged).epsilon,
        )

    def _add_up_entries(self, run: str | int | None) -> tuple[Totals, Totals]:
        """Return the first block and the total charges, of all runs or of one."""
        if run is None:
            with self._file.transaction() as history:
                return {**history.first}, {**history.charged}
        history = History(0, b"")
        for kind in get_args(Kind):
            for _, name, plan, steps in self._file.list_entries(kind):
                if name == str(run):
                    same = convert_to_unit(plan, self.unit)
                    history.add_entry(kind, name, same, steps, b"")
        return history.first, history.charged

    def _look_ahead(
        self, plan: PrivacyPlan, first: Totals, charged: Totals
    ) -> Admissible:
        """Find charges that fit, these and more steps of ``plan``, and cache them."""
        rule = self._make_rule(first)
        if rule.admits_within_first(charged):
            self._admissible = Admissible(first, first)
        else:
            enough = rule.find_max_steps(plan, charged, charged[plan])
            self._admissible = Admissible(first, {**charged, plan: enough})
        return self._admissible

    def _shrink(self, block: Block) -> Block:
        """Return the largest share of a block that fits into an empty ledger."""
        from flwr_safedshb.privacy.ledger.admission import shrink_block

        return shrink_block(block, self.delta, self.max_epsilon, self.unit)

    def _make_rule(self, first: Totals) -> AdmissionRule:
        limits = self.delta, self._file.max_epsilon, self.max_epsilon, self.unit
        return _make_admission_rule(tuple(first.items()), *limits)


@lru_cache(maxsize=64)
def _make_admission_rule(
    first: tuple[tuple[PrivacyPlan, int], ...],
    delta: float,
    max_epsilon: float,
    limit: float,
    unit: PrivacyUnit,
) -> AdmissionRule:
    # The accountants are slow to import, and a client must start without them.
    from flwr_safedshb.privacy.ledger.admission import AdmissionRule

    return AdmissionRule(first, delta, max_epsilon, limit, unit)


def _check_run_name(run: str | int) -> str:
    name = str(run)
    if name and not SAFE_NAME.fullmatch(name):
        raise ValueError(
            f"run={name[:80]!r} must be up to 64 letters, digits, '.', '_' and "
            "'-', and begin with a letter or digit"
        )
    return name
