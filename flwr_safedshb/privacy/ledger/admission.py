"""Decide which charges a ledger's budget admits, and compute their epsilon.

Formal guarantee
----------------
A node that charges a ledger with the limit (E, delta) releases with (E, delta)-DP, even
if the plans of its charges are chosen adaptively, after looking at earlier releases.

1. A *block* is a list of plans and numbers of steps that is fixed before the first
   release. Within it releases may come in any order that is chosen as they come, and
   may stop early: the composed privacy loss distribution (PLD) of the whole block
   dominates. By induction over the number of releases: the first one, s, is dominated
   by its pair; whatever comes out of it, the rest is dominated by the composition of
   the block without s; a pair and another that dominates for every outcome of the first
   dominate together as independent ones do (Zhu, Dong, Wang, "Optimal Accounting of
   Differential Privacy via Characteristic Function", AISTATS 2022, Theorem 10), and a
   product does not depend on the order. To stop early is to forget the rest.
2. The *first block* is what was committed before the first charge, or else the first
   charge itself. It is admitted if its PLD epsilon is at most E.
3. A charge beyond the first block may be chosen by looking at releases, and then no PLD
   bounds it. It is admitted only if a Renyi filter (`accounting.renyi_filter`) passes
   twice: for the first block whole, and for all that has been charged.
4. These two ways must not be mixed: if one path spent all of delta on a PLD, and
   another, which left early, all of it on the filter, the two would add up. They are
   not. Either the first block whole passes the filter; then every history that is
   admitted does, within the block because it is part of it. Or it does not; then
   nothing leaves the block, and 1 holds. Which of the two it is was known before the
   first release.

A process may ask for a stricter limit E' <= E. It is admitted within the first block if
the PLD or the filter is at most E', and out of it by 3 with E' for E. That implies what
E demands, and for E' alone the argument is the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from flwr_safedshb.privacy.accounting import accountant
from flwr_safedshb.privacy.accounting.ranges import MAX_STEPS
from flwr_safedshb.privacy.accounting.renyi_filter import RenyiFilter
from flwr_safedshb.privacy.ledger.history import Block, Totals, is_within
from flwr_safedshb.privacy.plan import PrivacyPlan, PrivacyStatement, PrivacyUnit

# The accountant admits so many further steps at once, so that few charges need it.
_AHEAD = 64


@dataclass(frozen=True)
class AdmissionRule:
    """Admit charges after a given first block; all plans are in the ledger's unit.

    Attributes
    ----------
    first : tuple of (PrivacyPlan, int)
        The first block, fixed before the first release.
    delta : float
    max_epsilon : float
        E, fixed before the first release, too: the filter is made for it.
    limit : float
        E', at most E.
    unit : PrivacyUnit
    """

    first: tuple[tuple[PrivacyPlan, int], ...]
    delta: float
    max_epsilon: float
    limit: float
    unit: PrivacyUnit

    def state_epsilon(self, charged: Totals) -> PrivacyStatement:
        """State the epsilon of the first block, or beyond it that of all charges."""
        if is_within(charged, dict(self.first)):
            found = accountant.state_epsilon(self.first, self.delta, self.unit)
            return replace(found, steps=sum(charged.values()))
        charges = [*charged.items()]
        epsilon, name = self._filter.epsilon(charges), "Renyi filter"
        return accountant.make_statement(epsilon, charges, self.delta, self.unit, name)

    def admits_within_first(self, charged: Totals) -> bool:
        """Return whether the charges are in the first block and that block fits."""
        return is_within(charged, dict(self.first)) and self._first_fits

    def find_max_steps(self, plan: PrivacyPlan, charged: Totals, hint: int) -> int:
        """Return how many steps of a plan the filter admits with the other charges.

        Parameters
        ----------
        plan : PrivacyPlan
        charged : dict of PrivacyPlan to int
            All charges so far; the entry of `plan` is ignored.
        hint : int
            A number of steps to try first, with some more added. If they fit, that
            number is returned, though more may fit.
        """
        others = {each: steps for each, steps in charged.items() if each != plan}
        first, most = dict(self.first), MAX_STEPS
        # 3 and 4: what leaves the first block needs that the block, whole, passes.
        if not self._filter.epsilon(self.first) <= self.limit:
            most = first.get(plan, 0) if is_within(others, first) else 0

        def compute_cost(count: int) -> float:
            return self._filter.epsilon([*others.items(), (plan, count)])

        for enough in (min(hint + max(hint, _AHEAD), most), min(hint, most)):
            if compute_cost(enough) <= self.limit:
                return enough
        return accountant.find_largest_affordable(compute_cost, self.limit, most=most)

    def count_steps_left(self, plan: PrivacyPlan, charged: Totals) -> int:
        """Count the further steps of a plan that fit."""
        used = charged.get(plan, 0)
        in_block = self.admits_within_first(charged)
        committed = dict(self.first).get(plan, 0) if in_block else 0
        filtered = self.find_max_steps(plan, charged, MAX_STEPS)
        return max(committed - used, filtered - used, 0)

    @cached_property
    def _first_fits(self) -> bool:
        return accountant.fits_within(self.first, self.delta, self.limit, self.unit)

    @cached_property
    def _filter(self) -> RenyiFilter:
        return RenyiFilter(self.first, self.delta, self.max_epsilon, self.unit)


def shrink_block(block: Block, delta: float, limit: float, unit: PrivacyUnit) -> Block:
    """Return the largest share of a first block that costs at most a limit."""
    largest = max((steps for _, steps in block), default=0)
    if not largest or accountant.fits_within(block, delta, limit, unit):
        return block

    def take_share(count: int) -> Block:
        return [(plan, steps * count // largest) for plan, steps in block]

    return take_share(accountant.find_largest(take_share, delta, limit, unit, largest))
