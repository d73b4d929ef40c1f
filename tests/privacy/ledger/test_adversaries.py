"""No adversary that looks at releases gets more out of a ledger than its limit says."""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from flwr_safedshb.privacy.accounting import accountant
from flwr_safedshb.privacy.ledger.admission import AdmissionRule, shrink_block
from flwr_safedshb.privacy.ledger.ledger import BudgetExhausted, Ledger
from flwr_safedshb.privacy.plan import Adjacency, PrivacyPlan
from tests.privacy.ledger.adversary import Move, worst_delta

# How many random games are played; set it higher to be surer.
GAMES = int(os.environ.get("SAFEDSHB_LEDGER_GAMES", "30"))
UNIT: Adjacency = "replace-one"
# Moves in one game.
LONGEST = 5


def whole(noise: float) -> PrivacyPlan:
    return PrivacyPlan(1.0, noise, 10, 10, "whole")


def sampled(noise: float, examples: int) -> PrivacyPlan:
    return PrivacyPlan(1.0, noise, 1, examples)


def charges_of(moves: Sequence[Move], counts: Sequence[int]) -> dict[PrivacyPlan, int]:
    charged: Counter[PrivacyPlan] = Counter()
    for move, count in zip(moves, counts, strict=True):
        if count:
            charged[move.plan.convert_to_unit(UNIT)] += move.steps * count
    return dict(charged)


def admits(budget: AdmissionRule, charged: dict[PrivacyPlan, int]) -> bool:
    """Ask a budget as a ledger does."""
    plan, steps = next(iter(charged.items()))
    return bool(budget.first) and (
        budget.admits_within_first(charged)
        or budget.find_max_steps(plan, charged, steps) >= steps
    )


# An attack on ledgers that compose whatever was chosen: a lucky loss is followed by
# something rare and large, an unlucky one by something small and certain.
FIRST = Move(whole(2.5), 1)
RARE, CERTAIN = Move(sampled(0.25, 10**5), 15), Move(whole(40.0), 146)
ATTACK = (FIRST, RARE, CERTAIN)


def test_a_composition_of_adaptive_choices_is_no_bound() -> None:
    """The adversary that the filter is for is one that the search here finds."""

    def composed(counts: tuple[int, ...]) -> bool:
        if max(counts) > 1:
            return False
        return (
            accountant.compute_epsilon([*charges_of(ATTACK, counts).items()], 1e-5)
            <= 2.0
        )

    delta, histories = worst_delta(2.0, ATTACK, composed, start=(0,))
    assert histories == 3
    assert delta == pytest.approx(1.925e-5, rel=0.01)
    assert worst_delta(2.214, ATTACK, composed, start=(0,))[0] >= 1e-5


def test_that_attack_does_not_fit_into_a_ledger(tmp_path: Path) -> None:
    for second in (RARE, CERTAIN):
        path = tmp_path / f"{second.steps}.sqlite"
        with Ledger(path, 2.0, 1e-5) as ledger:
            ledger.charge(FIRST.plan)
            with pytest.raises(BudgetExhausted):
                ledger.charge(second.plan, second.steps)


def game(seed: int) -> tuple[float, float, list[Move], list[tuple[PrivacyPlan, int]]]:
    """Return a limit, a delta, moves, and what is committed to first, if anything."""
    rng = np.random.default_rng(seed)
    delta, limit = 10.0 ** rng.uniform(-5, -2), float(rng.uniform(0.5, 3.0))
    moves: list[Move] = []
    for kind in rng.permutation(["whole", "whole", "fixed"])[: rng.integers(2, 4)]:
        if kind == "whole":
            plan = whole(10.0 ** rng.uniform(-0.1, 1.5))
        else:
            plan = sampled(10.0 ** rng.uniform(-0.6, 0.3), int(10 ** rng.uniform(1, 5)))
        cost = float(limit * rng.uniform(0.25, 0.8))
        # Few, where each is rounded.
        most = 2000 if kind == "whole" else 24
        steps = min(accountant.find_max_steps([], plan, delta, cost), most)
        if steps == 0:
            continue
        moves.append(Move(plan, steps))
        if kind == "fixed":
            moves.append(Move(plan, steps, mirrored=True))
    block = [(move.plan, move.steps) for move in moves if rng.random() < 0.6]
    return limit, delta, moves, [*dict(block).items()] if rng.random() < 0.6 else []


@pytest.mark.parametrize("seed", range(GAMES))
def test_the_best_adversary_stays_within_the_limit(seed: int) -> None:
    """Every way to choose the next plan by the losses so far, in random games."""
    limit, delta, moves, block = game(seed)
    for start in [None] if block else [(i,) for i in range(len(moves))]:
        if start is None:
            first = [*shrink_block(block, delta, limit, UNIT)]
        else:
            first = [(moves[start[0]].plan, moves[start[0]].steps)]
        same = tuple(
            (plan.convert_to_unit(UNIT), steps) for plan, steps in first if steps
        )
        budget = AdmissionRule(same, delta, limit, limit, UNIT)

        def allowed(counts: tuple[int, ...], budget: AdmissionRule = budget) -> bool:
            return sum(counts) <= LONGEST and admits(budget, charges_of(moves, counts))

        found, _ = worst_delta(limit, moves, allowed, start)
        assert found <= delta
