"""Measure what adaptive choices cost: ``python -m simulations.studies.filtering``.

For ordinary histories of a ledger, the least budget that admits them: if all of it was
committed beforehand (PLD), if only the first run was (a Renyi filter for the rest), and
if nothing was (the filter, charge by charge).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.table import Table

from flwr_safedshb.privacy.accounting import accountant
from flwr_safedshb.privacy.accounting.renyi_filter import RenyiFilter
from flwr_safedshb.privacy.plan import Adjacency, PrivacyPlan

DELTA = 1e-5
UNIT: Adjacency = "replace-one"
# Budgets that are tried, in units of the cost by PLD.
FACTORS = np.geomspace(1.0, 5.0, 400)

Block = tuple[tuple[PrivacyPlan, int], ...]


@dataclass(frozen=True)
class Costs:
    """The least budgets for one history."""

    history: str
    composed: float
    first_committed: float
    adaptive: float

    def cells(self) -> tuple[str, ...]:
        """Return a row of the table: budgets, and their ratios to PLD."""
        ratios = [b / self.composed for b in (self.first_committed, self.adaptive)]
        budgets = [self.composed, self.first_committed, self.adaptive]
        return (
            self.history,
            *(f"{budget:.3g}" for budget in budgets),
            *(f"{ratio:.2f}" for ratio in ratios),
        )


def histories() -> dict[str, list[Block]]:
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


def costs_of(history: str, runs: Sequence[Block]) -> Costs:
    """Return the least budgets for a history of runs."""
    charges = [entry for run in runs for entry in run]
    composed = accountant.compute_epsilon(charges, DELTA, UNIT)
    plan, _ = runs[0][0]
    return Costs(
        history,
        composed,
        composed if len(runs) == 1 else _least_budget(runs[0], charges, composed),
        _least_budget(((plan, 1),), charges, composed),
    )


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


def main() -> int:
    """Print the table."""
    heads = (
        "history",
        "PLD",
        "first run committed",
        "nothing committed",
        "/ PLD",
        "/ PLD",
    )
    table = Table(*heads, title=f"Least budget at delta = {DELTA:g}")
    for history, runs in histories().items():
        table.add_row(*costs_of(history, runs).cells())
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
