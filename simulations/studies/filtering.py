"""Measure what adaptive choices cost: ``python -m simulations.study filtering``.

For ordinary histories of a ledger, the least budget that admits them: if all of it was
committed beforehand (PLD), if only the first run was (a Renyi filter for the rest), and
if nothing was (the filter, charge by charge).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from flwr_safedshb.privacy.accounting import accountant
from flwr_safedshb.privacy.accounting.renyi_filter import RenyiFilter
from flwr_safedshb.privacy.plan import Adjacency, PrivacyPlan
from simulations.results.tables import Table
from simulations.study import Runs, Section, Study, grid

DELTA = 1e-5
UNIT: Adjacency = "replace-one"
# Budgets that are tried, in units of the cost by PLD.
FACTORS = np.geomspace(1.0, 5.0, 400)

Block = tuple[tuple[PrivacyPlan, int], ...]


def list_histories() -> dict[str, list[Block]]:
    """Return ordinary histories: the runs of each, as what they are charged for."""
    paper = PrivacyPlan(1.0, 1.0, 25, 2763)
    calmer = PrivacyPlan(1.0, 2.0, 25, 2763)
    full = PrivacyPlan(1.0, 20.0, 2763, 2763, "whole")
    poisson = PrivacyPlan(1.0, 1.0, 25, 2763, "poisson")
    answers = PrivacyPlan(1.0, 40.0, 2763, 2763, "whole")
    changing = [PrivacyPlan(1.0, 1.0 + 0.25 * i, 25 + 10 * i, 2763) for i in range(10)]
    return {
        "one run, 400 steps of 25, s = 1": [((paper, 400),)],
        "one run, 400 steps of 25, s = 2": [((calmer, 400),)],
        "one run, 60 full batches, s = 20": [((full, 60),)],
        "ten runs of one plan, 400 steps, s = 1": [((paper, 400),)] * 10,
        "ten runs of one plan, 400 steps, s = 2": [((calmer, 400),)] * 10,
        "ten runs of one plan, 60 full batches": [((full, 60),)] * 10,
        "ten runs of one Poisson plan, s = 1": [((poisson, 400),)] * 10,
        "training with 40 evaluations": [((paper, 400), (answers, 40))],
        "five runs, each with 10 evaluations": [((paper, 400), (answers, 10))] * 5,
        "ten runs, each with another plan": [((plan, 200),) for plan in changing],
    }


def find_budgets(history: int) -> dict[str, float]:
    """Return the least budgets for a history, by its place in the list."""
    runs = list(list_histories().values())[history]
    charges = [entry for run in runs for entry in run]
    composed = accountant.compute_epsilon(charges, DELTA, UNIT)
    plan, _ = runs[0][0]
    committed = composed
    if len(runs) > 1:
        committed = _least_budget(runs[0], charges, composed)
    adaptive = _least_budget(((plan, 1),), charges, composed)
    return {"composed": composed, "first_committed": committed, "adaptive": adaptive}


def _least_budget(
    first: Block, charges: Sequence[tuple[PrivacyPlan, int]], composed: float
) -> float:
    for budget in composed * FACTORS:
        renyi = RenyiFilter(first, DELTA, float(budget), UNIT)
        if renyi.epsilon(charges) <= budget:
            return float(budget)
    raise ArithmeticError(
        f"no budget up to {FACTORS[-1]:g} times {composed:g} is enough"
    )


def report(runs: Runs[Any]) -> Iterator[Section]:
    """Yield budgets, and their ratios to PLD."""
    rows = []
    for case, run in runs.items():
        budgets = list(run["metrics"].values())
        ratios = [f"{budget / budgets[0]:.2f}" for budget in budgets[1:]]
        rows.append([case.labels["history"], *(f"{b:.3g}" for b in budgets), *ratios])
    heads = ["history", "PLD", "first run committed", "nothing committed"]
    yield Section(
        f"Least budget at delta = {DELTA:g}",
        table=Table([*heads, "first / PLD", "nothing / PLD"], rows),
    )


study = Study(
    "filtering",
    "What adaptive choices cost",
    "How much more budget does a history need if less of it is committed beforehand?",
    grid(history={name: f"history={i}" for i, name in enumerate(list_histories())}),
    seeds=(0,),
    report=report,
    measure=find_budgets,
)
