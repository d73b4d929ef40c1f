"""What a sequence of private steps costs, and how many more a budget allows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial

import numpy as np
from dp_accounting import (
    DpEvent,
    GaussianDpEvent,
    NeighboringRelation,
    PoissonSampledDpEvent,
    SampledWithoutReplacementDpEvent,
)
from dp_accounting.rdp import RdpAccountant
from dp_accounting.rdp.rdp_privacy_accountant import compute_epsilon
from numpy.typing import NDArray

from flwr_safedshb.privacy.accounting import pld
from flwr_safedshb.privacy.accounting.limits import (
    MAX_STEPS,
    checked_delta,
    checked_steps,
)
from flwr_safedshb.privacy.plan import SAMPLER_WORDS, PrivacyPlan, PrivacyStatement

Charges = Sequence[tuple[PrivacyPlan, int]]

# Few, because the library's cost grows with the square of an order.
_RENYI_ORDERS = (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 32, 48, 64)
# What rounding may take from a Renyi divergence near 0; added so that bounds stay so.
_RENYI_ROUNDING = 1e-13


def epsilon(
    charges: Charges, delta: float, interval: float = pld.BASE_INTERVAL
) -> float:
    """Epsilon of all charges together.

    It comes from the composed privacy loss distributions; where their grid is too
    coarse for very rare sampling, the bound by Renyi divergences may be the smaller one
    and is taken, being as valid.

    Steps may follow different plans. If some plans state replace-one and others
    add-remove, all are accounted under replace-one: a plan's adjacency only names the
    unit, the Poisson mechanism is the same, and its replace-one epsilon holds for
    add-remove too (a removed example is one replaced by an example without gradient).

    Parameters
    ----------
    charges : sequence of (PrivacyPlan, int)
        Plans, and how many steps (T) were released under each.
    delta : float
        In [1e-12, 1).
    interval : float
        Grid of the losses; a coarser one is faster and never gives less.

    Returns
    -------
    float
        0 without steps, infinity if a step had no noise.
    """
    return min(
        epsilon_upper_bound(charges, delta), _pld_epsilon(charges, delta, interval)
    )


def statement(charges: Charges, delta: float) -> PrivacyStatement:
    """Epsilon of all charges together, with the mechanism and unit it is true for."""
    merged = _merged(charges)
    renyi, exact = epsilon_upper_bound(charges, delta), epsilon(charges, delta)
    return PrivacyStatement(
        epsilon=exact,
        delta=delta,
        steps=sum(merged.values()),
        sampler=_words(SAMPLER_WORDS[plan.sampling] for plan in merged),
        adjacency=_words(plan.adjacency for plan in merged),
        accountant="PLD accountant" if exact < renyi else "RDP accountant",
    )


def _words(words: Iterable[str]) -> str:
    return " and ".join(sorted(set(words))) or "nothing released"


def _pld_epsilon(charges: Charges, delta: float, interval: float) -> float:
    delta = checked_delta(delta)
    merged = _merged(charges)
    if not merged:
        return 0.0
    if _lacks_noise(merged):
        return math.inf
    return pld.composed_epsilon(merged, delta, interval)


def epsilon_upper_bound(charges: Charges, delta: float) -> float:
    """Bound epsilon from above in milliseconds, by Renyi divergences.

    For a quick yes: where this fits a budget, the exact figure does.
    """
    delta = checked_delta(delta)
    merged = _merged(charges)
    if not merged:
        return 0.0
    if _lacks_noise(merged):
        return math.inf
    total = sum(steps * _renyi(plan) for plan, steps in merged.items())
    return float(compute_epsilon(_RENYI_ORDERS, total, delta)[0])


def max_steps(
    charges: Charges, plan: PrivacyPlan, delta: float, max_epsilon: float
) -> int:
    """Count the further steps of ``plan`` that fit after ``charges``.

    Returns
    -------
    int
        The largest number whose epsilon is at most ``max_epsilon``, at most 10^9.
    """
    past = tuple(_merged(charges).items())
    return _max_steps(past, plan, checked_delta(delta), max_epsilon)


@lru_cache(maxsize=64)
def _max_steps(
    past: tuple[tuple[PrivacyPlan, int], ...],
    plan: PrivacyPlan,
    delta: float,
    max_epsilon: float,
) -> int:
    def fits_cheaply(steps: int) -> bool:
        return epsilon_upper_bound([*past, (plan, steps)], delta) <= max_epsilon

    def fits_on(interval: float, steps: int) -> bool:
        return epsilon([*past, (plan, steps)], delta, interval) <= max_epsilon

    # Each test is cheaper than the next and never says yes where that says no.
    steps = 0
    for fits in (
        fits_cheaply,
        partial(fits_on, pld.COARSE_INTERVAL),
        partial(fits_on, pld.BASE_INTERVAL),
    ):
        steps = _last_fitting(fits, steps)
    return steps


def _last_fitting(fits: Callable[[int], bool], known: int) -> int:
    """Find the largest integer that fits, from one that does, in logarithmic tests."""
    step = 1
    while known + step <= MAX_STEPS and fits(known + step):
        known, step = known + step, 2 * step
    while step > 1:
        step //= 2
        if known + step <= MAX_STEPS and fits(known + step):
            known += step
    return known


def library_event(plan: PrivacyPlan) -> tuple[DpEvent, NeighboringRelation]:
    """Describe one step of the plan to the Renyi accountant of dp_accounting.

    That accountant reads a multiplier as noise over sensitivity. It has no event for
    Poisson sampling under replace-one; the fixed-size event is a valid bound for it,
    since the divergence is computed for any batches that coincide without the example
    and lie within 2C/b of each other with it.
    """
    if plan.adjacency == "add-remove":
        noise = GaussianDpEvent(pld.poisson_noise_multiplier(plan))
        event = PoissonSampledDpEvent(plan.sampling_rate, noise)
        return event, NeighboringRelation.ADD_OR_REMOVE_ONE
    noise = GaussianDpEvent(plan.noise_multiplier)
    event = SampledWithoutReplacementDpEvent(plan.num_examples, plan.batch_size, noise)
    return event, NeighboringRelation.REPLACE_ONE


@lru_cache(maxsize=64)
def _renyi(plan: PrivacyPlan) -> NDArray[np.float64]:
    """Renyi divergences of one step at the orders above."""
    event, relation = library_event(plan)
    accountant = RdpAccountant(_RENYI_ORDERS, relation).compose(event)
    divergences: NDArray[np.float64] = np.maximum(accountant.rdp, 0.0)
    return divergences + _RENYI_ROUNDING


def _merged(charges: Charges) -> dict[PrivacyPlan, int]:
    """Add up the steps of plans that cost the same, in one unit of privacy."""
    units = {plan.adjacency for plan, steps in charges if steps}
    merged: dict[PrivacyPlan, int] = {}
    for plan, steps in charges:
        same = replace(
            plan,
            clip_norm=1.0,
            clipping="per-example",
            adjacency=plan.adjacency if len(units) == 1 else "replace-one",
        )
        merged[same] = merged.get(same, 0) + checked_steps(steps)
    return {plan: steps for plan, steps in merged.items() if steps}


def _lacks_noise(merged: Mapping[PrivacyPlan, int]) -> bool:
    return any(plan.noise_multiplier == 0 for plan in merged)
