"""Asks a ledger for charges in orders that a server may choose by what was released.

Promised is: no sequence of commitments and charges that is admitted costs more than the
limit, in the ledger's unit, whoever chose it and by whatever was released.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from flwr_safedshb.audit.outcomes import Case, Cases
from flwr_safedshb.privacy.accounting import accountant
from flwr_safedshb.privacy.ledger import database
from flwr_safedshb.privacy.ledger.ledger import BudgetExhausted, Ledger
from flwr_safedshb.privacy.plan import PrivacyPlan

MakeLedger = Callable[[Path, float, float], Ledger]
Charges = tuple[tuple[PrivacyPlan, int], ...]

_PAPER = PrivacyPlan(1.0, 1.0, 25, 2763)
_ADDED = replace(_PAPER, sampling="poisson", adjacency="add-remove")
_ANSWER = PrivacyPlan(1.0, 50.0, 100, 100, sampling="whole")
_CALM = PrivacyPlan(1.0, 20.0, 10, 10, sampling="whole")
_DIGEST = "0" * 16
# After one release either of two others, by its outcome: at epsilon = 2, delta is 1.9
# times what each path alone has by its composed privacy loss distribution.
_FIRST = (PrivacyPlan(1.0, 2.5, 10, 10, sampling="whole"), 1)
_RARE = (PrivacyPlan(1.0, 0.25, 1, 10**5), 15)
_SURE = (PrivacyPlan(1.0, 40.0, 10, 10, sampling="whole"), 146)


@dataclass(frozen=True)
class Order:
    """Charges that must not all be admitted.

    Attributes
    ----------
    name : str
    limit, delta : float
    committed, charges : tuple of (PrivacyPlan, int)
    """

    name: str
    limit: float
    delta: float
    committed: Charges
    charges: Charges


ORDERS = (
    Order("a rare loss after a release", 2.0, 1e-5, (), (_FIRST, _RARE)),
    Order("a sure loss after a release", 2.0, 1e-5, (), (_FIRST, _SURE)),
    Order(
        "a plan beside a commitment that fills the budget",
        *(1.05, 1e-4, ((_PAPER, 400),), ((_PAPER, 1), (_CALM, 1))),
    ),
    Order(
        "a unit that a run chooses, beside an answer in another",
        *(0.3, 1e-4, ()),
        (
            (replace(_ADDED, part=f"trained:{_DIGEST}"), 400),
            (replace(_ANSWER, part=f"held-out:{_DIGEST}"), 1),
        ),
    ),
    Order("a unit that a run chooses", 0.3, 1e-4, (), ((_ADDED, 400),)),
)


def attack_orders(make_ledger: MakeLedger = Ledger, rounds: int = 12) -> Cases:
    """Ask for each of `ORDERS`, and for random ones in so many ledgers."""
    with _folder() as folder:
        cases = [
            _ordered(make_ledger, folder / f"{number}.sqlite", order)
            for number, order in enumerate(ORDERS)
        ]
        cases += [
            _random(make_ledger, folder / f"random{seed}.sqlite", seed)
            for seed in range(rounds)
        ]
    return Cases("orders of charges", cases)


def _ordered(make_ledger: MakeLedger, path: Path, order: Order) -> Case:
    book = make_ledger(path, order.limit, order.delta)
    book.commit(order.committed, "run")
    admitted = [_is_admitted(book, *charge) for charge in order.charges]
    if all(admitted):
        return Case(order.name, "admitted", f"more than epsilon {order.limit:g}")
    return Case(order.name, "refused")


def _random(make_ledger: MakeLedger, path: Path, seed: int) -> Case:
    """Commit to something, or not, and charge at random until little is left."""
    rng = np.random.default_rng(seed)
    limit, delta = float(rng.uniform(0.5, 3.0)), float(10.0 ** rng.uniform(-6, -3))
    plans = (_PAPER, _ADDED, _ANSWER, _CALM, replace(_PAPER, noise_multiplier=3.0))
    book, name = make_ledger(path, limit, delta), f"random order {seed}"
    if rng.random() < 0.5:
        book.commit([(plans[i], int(rng.integers(1, 300))) for i in (0, 2)], "run")
    charged: list[tuple[PrivacyPlan, int]] = []
    for _ in range(8):
        charge = plans[rng.integers(len(plans))], int(rng.integers(1, 150))
        if _is_admitted(book, *charge):
            charged.append(charge)
            broken = _objection(book, charged, limit)
            if broken:
                return Case(name, "admitted", broken)
    return Case(name, "within the limit")


def _objection(
    book: Ledger, charged: Sequence[tuple[PrivacyPlan, int]], limit: float
) -> str:
    """Say what is wrong with what a ledger says of its charges; empty if nothing is."""
    found = book.epsilon()
    # What was fixed beforehand, and stopped here, costs no more than what was chosen.
    least = accountant.compute_epsilon(charged, book.delta, "replace-one")
    if not least <= found <= limit:
        return f"epsilon is {found}, at least {least} and at most {limit}"
    return ""


def _is_admitted(book: Ledger, plan: PrivacyPlan, steps: int) -> bool:
    try:
        book.charge(plan, steps, "run")
    except BudgetExhausted:
        return False
    return True


@contextmanager
def _folder() -> Iterator[Path]:
    """Make a folder for ledgers that nobody has to be told of."""
    makers = [logging.getLogger(name) for name in (database.__name__, _LEDGER)]
    before = [logger.disabled for logger in makers]
    for logger in makers:
        logger.disabled = True
    try:
        with tempfile.TemporaryDirectory(prefix="safedshb-") as folder:
            yield Path(folder)
    finally:
        for logger, was in zip(makers, before, strict=True):
            logger.disabled = was


_LEDGER = "flwr_safedshb.privacy.ledger.ledger"
