"""Compute the epsilons of other accountants for the same run, for comparison.

For reports only: the epsilon of a plan is :meth:`PrivacyPlan.epsilon`.
"""

from __future__ import annotations

from dataclasses import replace

from dp_accounting.rdp import RdpAccountant

from flwr_safedshb.privacy.accounting.accountant import state_epsilon
from flwr_safedshb.privacy.accounting.paper_bound import minimize_epsilon
from flwr_safedshb.privacy.accounting.ranges import check_delta, check_steps
from flwr_safedshb.privacy.plan import PrivacyPlan, PrivacyStatement
from flwr_safedshb.privacy.samplers import load_samplers
from flwr_safedshb.privacy.samplers.standard import Fixed, Poisson, Whole


def paper_theorem(plan: PrivacyPlan, steps: int, delta: float) -> PrivacyStatement:
    """Evaluate the paper's exact privacy theorem, for fixed-size batches.

    See `flwr_safedshb.privacy.accounting.paper_bound` for how.
    """
    if not isinstance(plan.sampler, Fixed):
        raise ValueError(
            f"sampling={plan.sampling!r}: the paper's theorem is for "
            f"sampling={Fixed.name!r}"
        )
    _check_arguments(plan, steps, delta)
    epsilon = minimize_epsilon(plan.noise_multiplier, plan.sampling_rate, steps, delta)
    return PrivacyStatement(
        epsilon=epsilon,
        delta=delta,
        steps=steps,
        sampler=Fixed.description,
        adjacency="replace-one",
        accountant="theorem of Allouah et al. 2023",
    )


def rdp(plan: PrivacyPlan, steps: int, delta: float) -> PrivacyStatement:
    """Evaluate dp_accounting's Renyi accountant, at the library's own orders.

    It is valid for the plan's mechanism, and looser than the plan's own epsilon.
    """
    _check_arguments(plan, steps, delta)
    event, relation = plan.sampler.dp_event(plan)
    accountant = RdpAccountant(neighboring_relation=relation).compose(event, steps)
    return PrivacyStatement(
        epsilon=float(accountant.get_epsilon(delta)),
        delta=delta,
        steps=steps,
        sampler=plan.sampler.description,
        adjacency=plan.adjacency,
        accountant="RDP accountant of dp_accounting",
    )


def opacus(plan: PrivacyPlan, steps: int, delta: float) -> PrivacyStatement:
    """Evaluate Opacus' accountant at this noise multiplier, as the paper does.

    It is ``opacus.accountants.RDPAccountant`` with the history [(s, b/m, T)]. Opacus
    takes s in units of C/b and assumes Poisson sampling under add-remove. So this is a
    statement about another mechanism, with half the plan's noise; never print it as the
    plan's.
    """
    _check_arguments(plan, steps, delta)
    from opacus.accountants import RDPAccountant  # imports torch

    accountant = RDPAccountant()
    accountant.history = [(plan.noise_multiplier, plan.sampling_rate, steps)]
    return PrivacyStatement(
        epsilon=float(accountant.get_epsilon(delta)),
        delta=delta,
        steps=steps,
        sampler=Poisson.description,
        adjacency="add-remove",
        accountant="RDP accountant of Opacus, at half the plan's noise",
    )


def figures(plan: PrivacyPlan, steps: int, delta: float) -> list[PrivacyStatement]:
    """Return every accountant's statement for the plan's clip, noise, batch and data.

    The first is the plan's own; the others, also for other samplers, are baselines.
    """
    variants = [
        replace(plan, sampling=sampler.name, adjacency=adjacency)
        for sampler in load_samplers().values()
        if sampler.name != Whole.name or plan.sampling_rate == 1
        for adjacency in sampler.adjacencies
    ]
    fixed = replace(plan, sampling=Fixed.name, adjacency=Fixed.adjacencies[0])
    variants.sort(key=lambda variant: variant != plan)
    return [
        *(state_epsilon([(variant, steps)], delta) for variant in variants),
        rdp(fixed, steps, delta),
        paper_theorem(fixed, steps, delta),
        opacus(plan, steps, delta),
    ]


def _check_arguments(plan: PrivacyPlan, steps: int, delta: float) -> None:
    check_delta(delta)
    if check_steps(steps) == 0 or plan.noise_multiplier == 0:
        raise ValueError(
            f"steps={steps} and noise_multiplier={plan.noise_multiplier} must be above "
            "0: without steps epsilon is 0, without noise it is infinite"
        )
