"""The entries of a ledger, summed by plan: all that its epsilon depends on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from flwr_safedshb.privacy.plan import PrivacyPlan

Kind = Literal["commit", "charge"]
# Plans, and the most steps of each.
Block = Sequence[tuple[PrivacyPlan, int]]
# Steps of plans that are accounted in the ledger's unit.
Totals = dict[PrivacyPlan, int]


@dataclass
class History:
    """The entries of a ledger, summed by plan.

    Attributes
    ----------
    count : int
        Number of entries.
    head : bytes
        The hash of the newest entry.
    first : dict of PrivacyPlan to int
        The first block.
    charged : dict of PrivacyPlan to int
        All releases.
    runs : set of str
        Runs that have an entry.
    """

    count: int
    head: bytes
    first: Totals = field(default_factory=dict)
    charged: Totals = field(default_factory=dict)
    runs: set[str] = field(default_factory=set)
    _first_run: str | None = None

    def add_entry(
        self, kind: Kind, run: str, plan: PrivacyPlan, steps: int, digest: bytes
    ) -> None:
        """Add an entry and its hash."""
        self.count, self.head = self.count + 1, digest
        # One run commits at one moment, so that its entries are the first block.
        if not self.charged and self._first_run in (None, run):
            if kind == "commit":
                self.first[plan] = self.first.get(plan, 0) + steps
                self._first_run = run
            elif not self.first:
                self.first, self._first_run = {plan: steps}, run
        if kind == "charge":
            self.charged[plan] = self.charged.get(plan, 0) + steps
        self.runs.add(run)


def is_within(charged: Totals, block: Totals) -> bool:
    """Return whether a block has at least the steps that were charged, of each plan."""
    return all(block.get(plan, 0) >= steps for plan, steps in charged.items())
