"""A Renyi filter: bound epsilon of plans that are chosen adaptively.

Privacy loss distributions compose for plans that were fixed beforehand. If the next
plan may depend on earlier releases, their composition is not a bound: a server that
stops after a small loss and goes on with a costly plan after a large one reaches an
epsilon of 2.214 where the composition states 2.0. A Renyi filter is a bound (Feldman,
Zrnic, "Individual Privacy Accounting via a Renyi Filter", NeurIPS 2021), here of
several orders at once.

Proof
-----
Fix two neighbouring datasets. Step s is dominated by a pair (P_s, Q_s), which may
depend on what was released before it; L is the sum of the steps' losses under P.

1. For an order a = 1 + r let R_a be the sum of log E_P[e^(r L_s)] over the steps so
   far. Each term is known before its step is taken, so e^(r L - R_a) is a
   supermartingale that starts at 1. So is M = sum_a w_a e^(r L - R_a), for weights w_a
   that add up to 1 and were fixed before the first step.
2. For every x and epsilon, (1 - e^(epsilon-x))_+ <= c_a e^(r (x-epsilon)), with
   c_a = r^r / (1+r)^(1+r).
3. If for some order, which may depend on the history,

       r epsilon >= R_a + log(c_a / w_a) + log(1/delta),

   then (1 - e^(epsilon-L))_+ <= c_a e^(r (L-epsilon)) <= delta w_a e^(r L - R_a)
   <= delta M. The expectation is at most delta, also where a run is stopped.

So a ledger that admits only histories for which 3 holds releases with
(epsilon, delta)-DP, and the least epsilon for which 3 holds is valid at any time
(within its first block a ledger states another one; see `privacy.ledger.admission`). It
stays valid if R_a is replaced by something larger: an example may be charged
for steps of a part that it is not in.

If adding and removing an example have different bounds, 3 must hold for both
directions, each with its own supermartingale. Truncated tails and numerical errors
count as in `pld`: the first against delta, the second in R_a.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from flwr_safedshb.privacy.accounting import accountant, pld
from flwr_safedshb.privacy.accounting.pld import LOG_CONSTANTS
from flwr_safedshb.privacy.accounting.privacy_loss import POSITIVE_ORDERS, Floats
from flwr_safedshb.privacy.plan import ALL, PrivacyPlan, PrivacyUnit

# The weight of the order that the first releases need.
_MAIN_WEIGHT = 0.5


@dataclass(frozen=True)
class RenyiFilter:
    """A filter over several orders, fixed before the first release.

    Attributes
    ----------
    first : tuple of (PrivacyPlan, int)
        The first block of releases. The weights are optimal for a history that repeats
        it.
    delta : float
        In [1e-12, 0.1].
    limit : float
        The epsilon that such a history spends.
    unit : PrivacyUnit
    """

    first: tuple[tuple[PrivacyPlan, int], ...]
    delta: float
    limit: float
    unit: PrivacyUnit

    def epsilon(self, charges: accountant.Charges) -> float:
        """Return epsilon of all charges, whose plans may depend on earlier releases."""
        return accountant.maximize_over_parts(
            self._find_least_epsilon, charges, self.delta, self.unit
        )

    def _find_least_epsilon(self, steps: pld.Steps, delta: float) -> float:
        """Return the least epsilon for which a history passes (3)."""
        moments, log_delta = pld.compute_filter_moments(steps, delta)
        needed = moments + LOG_CONSTANTS - self.log_weights - log_delta
        needed /= POSITIVE_ORDERS
        # An order whose bound is NaN or infinite is of no use.
        usable = needed[np.isfinite(needed)]
        return max(0.0, float(usable.min(initial=math.inf)))

    @cached_property
    def log_weights(self) -> Floats:
        """Return log w for every positive order.

        Half of the weight is on the order that admits the most repetitions of the first
        releases; the weights of the others fall with their distance from it. All parts
        of the data have the same weights, because the parts may change later.
        """
        moments = self._compute_first_moments()
        room = POSITIVE_ORDERS * self.limit - LOG_CONSTANTS
        room = room + math.log(_MAIN_WEIGHT * self.delta)
        repetitions = np.where(moments > 0, room / moments, -math.inf)
        best = int(np.argmax(np.nan_to_num(repetitions, nan=-math.inf)))
        distance = np.abs(np.arange(len(POSITIVE_ORDERS)) - best)
        shares: Floats = np.where(distance == 0, 0.0, np.maximum(distance, 1.0) ** -2)
        weights: Floats = (1.0 - _MAIN_WEIGHT) * shares / shares.sum()
        weights[best] = _MAIN_WEIGHT
        return np.log(weights)

    def _compute_first_moments(self) -> Floats:
        """Return the log moments of the first releases as if each used all examples.

        The largest over the parts, for every positive order.
        """
        found: list[Floats] = []

        def collect_moments(steps: pld.Steps, delta: float) -> float:
            found.append(pld.compute_filter_moments(steps, delta)[0])
            return 0.0

        whole = [(replace(plan, part=ALL), n) for plan, n in self.first]
        accountant.maximize_over_parts(collect_moments, whole, self.delta, self.unit)
        if not found:
            return POSITIVE_ORDERS * (POSITIVE_ORDERS + 1.0)
        largest: Floats = np.max(found, axis=0)
        return largest
