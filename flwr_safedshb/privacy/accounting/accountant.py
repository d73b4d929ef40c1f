"""Epsilon of a sequence of private steps, and how many steps a budget allows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from numbers import Integral

from flwr_safedshb.privacy.accounting import pld
from flwr_safedshb.privacy.accounting.ranges import (
    MAX_STEPS,
    check_delta,
    check_steps,
)
from flwr_safedshb.privacy.plan import (
    ALL,
    PrivacyPlan,
    PrivacyStatement,
    PrivacyUnit,
    Unit,
    join_unit,
    split_unit,
)

Charges = Sequence[tuple[PrivacyPlan, int]]
Totals = dict[PrivacyPlan, int]
Bound = Callable[[pld.Steps, float], float]
# The most examples of a group.
_MAX_GROUP = 200
EpsilonFunction = Callable[[Charges, float, PrivacyUnit | None], float]


def compute_epsilon(
    charges: Charges, delta: float, unit: PrivacyUnit | None = None
) -> float:
    """Return epsilon of all charges together, for plans that were fixed beforehand.

    It is the smaller of two bounds: by the composed privacy loss distributions, with
    their numerical errors added, and by the moments of the losses. For plans that were
    chosen adaptively, after looking at releases, use `RenyiFilter.epsilon`.

    Parameters
    ----------
    charges : sequence of (PrivacyPlan, int)
        Plans, and how many steps (T) were released under each.
    delta : float
        In [1e-12, 0.1].
    unit : PrivacyUnit, optional
        The unit of privacy. By default that of the plans, or replace-one if they
        differ: a plan's adjacency only names the unit, and its replace-one epsilon
        holds for add-remove too (a removed example is one replaced by an example
        without gradient). Plans for examples and plans for persons have no unit in
        common.

    Returns
    -------
    float
        0 without steps; infinity if a step had no noise, or if there are more steps
        than can be accounted for.

    Raises
    ------
    ValueError
        If a plan has no accountant for the unit.
    """
    return maximize_over_parts(pld.compute_pld_epsilon, charges, delta, unit)


def compute_privacy_curve(
    plan: PrivacyPlan, steps: int, deltas: Sequence[float]
) -> list[float]:
    """Return epsilon at each delta in (0, 1), also at those that protect nobody.

    A guarantee needs a small delta. Large ones describe the rest of the same mechanism:
    what an attacker gains who may often be wrong.
    """
    return [_bound_part(pld.compute_pld_epsilon, {plan: steps}, d) for d in deltas]


def bound_epsilon(
    charges: Charges, delta: float, unit: PrivacyUnit | None = None
) -> float:
    """Bound `compute_epsilon` from above in milliseconds, by the moments of the losses.

    If this bound fits a budget, `compute_epsilon` fits, too.
    """
    return maximize_over_parts(pld.compute_moment_epsilon, charges, delta, unit)


def compute_group_epsilon(
    plan: PrivacyPlan, steps: int, delta: float, group: int
) -> float:
    """Return epsilon of ``steps`` releases about ``group`` examples, or persons.

    It is an upper bound for all examples of somebody whom the plan does not know.
    """
    whole = isinstance(group, Integral) and not isinstance(group, bool)
    if not whole or not 1 <= group <= min(_MAX_GROUP, plan.num_examples):
        raise ValueError(
            f"group={group!r} must be an integer from 1 to "
            f"{min(_MAX_GROUP, plan.num_examples)}, of the examples in the plan"
        )
    delta, steps = check_delta(delta), check_steps(steps)
    if not steps:
        return 0.0
    if plan.noise_multiplier == 0:
        return math.inf
    found = [
        pld.compute_pld_epsilon([(pair, steps)], delta)
        for pair in plan.sampler.group_pairs(plan, group)
    ]
    return max(epsilon if epsilon >= 0 else math.inf for epsilon in found)


def state_epsilon(
    charges: Charges, delta: float, unit: PrivacyUnit | None = None
) -> PrivacyStatement:
    """Return `compute_epsilon` as a statement with its mechanism and unit."""
    renyi = bound_epsilon(charges, delta, unit)
    exact = compute_epsilon(charges, delta, unit)
    accountant = "PLD accountant" if exact < renyi else "RDP accountant"
    return make_statement(exact, charges, delta, unit, accountant)


def make_statement(
    epsilon: float,
    charges: Charges,
    delta: float,
    unit: PrivacyUnit | None,
    accountant: str,
) -> PrivacyStatement:
    """Return an epsilon of charges as a statement with its mechanism and unit."""
    merged = _merge_plans(charges, unit)
    return PrivacyStatement(
        epsilon=epsilon,
        delta=delta,
        steps=sum(merged.values()),
        sampler=_join_words(plan.sampler.description for plan in merged),
        adjacency=_join_words(plan.adjacency for plan in merged),
        accountant=accountant,
        unit=split_unit(unit)[0] if unit else _find_owner(charges),
    )


def maximize_over_parts(
    bound: Bound, charges: Charges, delta: float, unit: PrivacyUnit | None
) -> float:
    """Return the largest bound over the parts that an example may be in.

    The plans are converted to one unit before the charges are split into parts, so all
    parts are accounted in the same unit.
    """
    delta = check_delta(delta)
    parts = _split_parts(_merge_plans(charges, unit))
    return max(_bound_part(bound, part, delta) for part in parts)


def _split_parts(merged: Totals) -> list[Totals]:
    """Return the charges that the examples of each part pay for.

    The parts of a split have no example in common, and which one an example is in does
    not depend on its value. So if the example is replaced, the releases of the other
    part keep their distribution, given what came before: each example pays for the
    charges of its own part, and for those of all examples. Where a node has split its
    data in two ways, an example may be in any part of each, and pays for all.
    """
    parts = {plan.part for plan in merged} - {ALL}
    one_split = len({part.partition(":")[2] for part in parts}) == 1
    payments: list[Totals] = []
    for part in sorted(parts) if one_split else [ALL]:
        paid: Totals = {}
        for plan, steps in merged.items():
            if not one_split or plan.part in (ALL, part):
                same = replace(plan, part=ALL)
                paid[same] = paid.get(same, 0) + steps
        payments.append(paid)
    return payments


def _bound_part(bound: Bound, paid: Totals, delta: float) -> float:
    """Return the larger of the bounds for an example that is added, and removed."""
    if not paid:
        return 0.0
    noiseless = any(plan.noise_multiplier == 0 for plan in paid)
    if noiseless or sum(paid.values()) > MAX_STEPS:
        return math.inf
    # Sorted, so that the order of charges cannot change the last digits.
    kinds = sorted(paid.items(), key=lambda item: item[0].to_json())
    dominating_pairs = [
        (plan.sampler.dominating_pairs(plan), steps) for plan, steps in kinds
    ]
    largest = 0.0
    for i in range(max(len(several) for several, _ in dominating_pairs)):
        found = bound(
            [(some[i % len(some)], steps) for some, steps in dominating_pairs], delta
        )
        # NaN is no bound, so it counts as infinite.
        largest = max(largest, float(found)) if found >= 0 else math.inf
    return largest


def _join_words(words: Iterable[str]) -> str:
    return " and ".join(sorted(set(words))) or "nothing released"


def find_max_steps(
    charges: Charges,
    plan: PrivacyPlan,
    delta: float,
    max_epsilon: float,
    unit: PrivacyUnit | None = None,
) -> int:
    """Count the further steps of ``plan`` that fit the budget after ``charges``.

    Returns
    -------
    int
        The largest number whose epsilon is at most ``max_epsilon``, at most 10^9.
    """
    past = tuple((each, steps) for each, steps in charges if steps)
    return _find_max_steps(past, plan, check_delta(delta), max_epsilon, unit)


@lru_cache(maxsize=64)
def _find_max_steps(
    past: tuple[tuple[PrivacyPlan, int], ...],
    plan: PrivacyPlan,
    delta: float,
    max_epsilon: float,
    unit: PrivacyUnit | None,
) -> int:
    return find_largest(lambda steps: [*past, (plan, steps)], delta, max_epsilon, unit)


def find_largest(
    make_charges: Callable[[int], Charges],
    delta: float,
    max_epsilon: float,
    unit: PrivacyUnit | None,
    most: int = MAX_STEPS,
) -> int:
    """Find the largest count up to `most` whose charges cost at most ``max_epsilon``.

    Parameters
    ----------
    make_charges : callable (count) -> charges
        Charges of a larger count cost no less.
    """
    count = 0
    # The first bound is cheaper than the second, and never below it.
    for bound in (bound_epsilon, compute_epsilon):

        def compute_cost(count: int, bound: EpsilonFunction = bound) -> float:
            return bound(make_charges(count), delta, unit)

        count = find_largest_affordable(compute_cost, max_epsilon, count, most)
    return count


def fits_within(
    charges: Charges, delta: float, max_epsilon: float, unit: PrivacyUnit | None
) -> bool:
    """Return whether charges cost at most ``max_epsilon``, by the cheap bound first."""
    return any(
        bound(charges, delta, unit) <= max_epsilon
        for bound in (bound_epsilon, compute_epsilon)
    )


def find_largest_affordable(
    cost: Callable[[int], float], limit: float, known: int = 0, most: int = MAX_STEPS
) -> int:
    """Find the largest count up to `most` that costs at most ``limit``.

    Parameters
    ----------
    cost : callable (count) -> float
        It does not decrease.
    known : int
        Where the search starts; if this count costs more than ``limit``, 0 is returned.
    """
    low, high, attempt = known, most + 1, 0
    at_low, at_high = cost(low), math.inf
    if not (at_low <= limit and at_low < math.inf):
        return 0
    while high - low > 1:
        guess = _guess_count(low, at_low, high, at_high, limit, attempt)
        price = cost(guess)
        if price <= limit and price < math.inf:
            low, at_low = guess, price
        else:
            high, at_high = guess, price
        attempt += 1
    return low


def _guess_count(
    low: int, at_low: float, high: int, at_high: float, limit: float, attempt: int
) -> int:
    """Guess where a cost that grows like a power of the count meets the limit."""
    if at_low == 0 or limit == math.inf:
        guess = 2.0 * low + 1.0
    elif at_high == math.inf:
        # The cost grows at least like a root, unless other charges are most of it.
        guess = low * max((limit / at_low) ** 2, 2.0 if attempt > 1 else 1.0) + 1.0
    elif attempt % 3 == 2:
        guess = 0.5 * (low + high)
    else:
        power = math.log(high / low) / math.log(at_high / at_low)
        # Rounded to either side in turn, so that both ends come near.
        guess = low * (limit / at_low) ** power + attempt % 2
    return min(max(low + 1, math.floor(guess)), high - 1)


def _find_owner(charges: Charges) -> Unit:
    """Return whom the plans protect; if they differ, converting one of them raises."""
    return next((plan.unit for plan, steps in charges if steps), "example")


def _merge_plans(charges: Charges, unit: PrivacyUnit | None) -> Totals:
    """Add up the steps of plans that cost the same, in one unit of privacy."""
    units = {plan.privacy_unit for plan, steps in charges if steps}
    several = join_unit(_find_owner(charges), "replace-one")
    joined = units.pop() if len(units) == 1 else several
    merged: Totals = {}
    for plan, steps in charges:
        if count := check_steps(steps):
            same = plan.convert_to_unit(unit or joined)
            merged[same] = merged.get(same, 0) + count
    return merged
