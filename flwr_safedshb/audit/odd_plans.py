"""Asks a ledger and a policy for everything odd that a run's config could ask for.

Whoever writes a run's config chooses the numbers of its plan and its budget. Promised
is: what is accepted has an epsilon that is a finite number within the budget, and not
below what the very first step costs an honest accountant; and a ledger that has
accepted something odd still refuses what is too much.
"""

from __future__ import annotations

import itertools
import logging
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
from scipy.stats import norm

from flwr_safedshb.audit.outcomes import Case, Cases
from flwr_safedshb.privacy.ledger import database
from flwr_safedshb.privacy.ledger.ledger import BudgetExhausted, Ledger, LedgerError
from flwr_safedshb.privacy.plan import PrivacyPlan
from flwr_safedshb.privacy.policy import NodePolicy
from flwr_safedshb.privacy.samplers import load_samplers

MAX_EPSILON, DELTA = 0.5, 1e-6
# Refused by every ledger with that budget: one step of it costs more than 40.
TOO_MUCH = PrivacyPlan(1.0, 0.1, 8, 8)

_SMALL = (5e-324, 1e-310, 1e-160, 1e-30, 1e-12, 1e-9, 1e-6, 1e-3)
_LARGE = (1e3, 1e6, 1e9, 1e12, 1e30, 1e160, 1.7e308, math.inf)
NO_NUMBERS = (True, False, "1", None, Decimal(1), 1j, [1.0], math.nan)
NUMBERS = (0.0, -0.0, -1.0, -math.inf, 1.0, 1, 10**400, Fraction(1, 3))
ODD: tuple[object, ...] = (
    *_SMALL,
    *_LARGE,
    *NO_NUMBERS,
    *NUMBERS,
    np.float32(1.0),
    np.float16(6e-8),
)
Request = tuple[dict[str, object], object]  # the fields of a plan, and steps
MakeLedger = Callable[[Path, float, float], Ledger]


def attack_plans(
    make_ledger: MakeLedger = Ledger, requests: Iterable[Request] | None = None
) -> Cases:
    """Ask fresh ledgers for plans, by default for all of `odd_plans`."""
    cases = []
    with _folder() as folder:
        for number, (fields, steps) in enumerate(requests or odd_plans()):
            path = folder / f"{number}.sqlite"
            book = make_ledger(path, MAX_EPSILON, DELTA)
            cases.append(_charged(book, fields, steps))
    return Cases("plans of a run", cases)


@contextmanager
def _folder() -> Iterator[Path]:
    """Make a folder for ledgers that nobody has to be told of."""
    makers = logging.getLogger(database.__name__)
    makers.disabled = True
    try:
        with tempfile.TemporaryDirectory(prefix="safedshb-") as folder:
            yield Path(folder)
    finally:
        makers.disabled = False


def odd_plans() -> Iterator[Request]:
    """Return the fields of plans that are odd in one number, and odd steps."""
    usual: dict[str, object] = {
        "clip_norm": 1.0,
        "noise_multiplier": 1.0,
        "batch_size": 25,
        "num_examples": 2763,
    }
    for sampling in load_samplers():
        for name, value in itertools.product(usual, ODD):
            yield {**usual, "sampling": sampling, name: value}, 1
        for value in (*_SMALL, *_LARGE):  # and with every example in the batch
            whole = {"batch_size": 8, "num_examples": 8, "noise_multiplier": value}
            yield {**usual, **whole, "sampling": sampling}, 1
    for steps in (*ODD, 2**63, 10**9, 10**12):
        yield usual, steps


def _charged(book: Ledger, fields: dict[str, object], steps: object) -> Case:
    """Charge a plan, and look at what the ledger is afterwards."""
    words = ", ".join(f"{name}={value!r}" for name, value in fields.items())
    request = f"{words}, steps={steps!r}"
    try:
        plan = PrivacyPlan(**fields)  # type: ignore[arg-type]  # that is the attack
    except ValueError:
        return Case(request, "no plan")
    except Exception as error:
        return Case(request, "raised", f"no plan, but {type(error).__name__}")
    outcome = "charged"
    try:
        book.charge(plan, steps)  # type: ignore[arg-type]
    except (BudgetExhausted, ValueError):
        outcome = "refused"
    except Exception as error:
        return Case(request, "raised", f"no refusal, but {type(error).__name__}")
    spent = book.epsilon()
    if not 0.0 <= spent <= MAX_EPSILON:
        return Case(request, outcome, f"epsilon is {spent}")
    if outcome == "charged" and not spent >= least_epsilon(plan, DELTA):
        return Case(request, outcome, f"epsilon is {spent}, below one step's")
    try:
        book.charge(TOO_MUCH)
    except BudgetExhausted:
        return Case(request, outcome)
    return Case(request, outcome, "the ledger accepts anything afterwards")


def least_epsilon(plan: PrivacyPlan, delta: float) -> float:
    """Return an epsilon that one step has at least, without any accountant.

    An example that pushes the batch's sum as far as it can is in the batch with
    probability q = b/m. The half-line above a threshold then has probability
    P = (1-q) Q + q R with it and Q without it, and P <= e^epsilon Q + delta. The true
    epsilon is the largest that any event gives; this looks at half-lines only. Where
    the others are silent, as under Poisson sampling, the sum moves half as far as where
    the example takes the place of an opposite one.
    """
    if plan.noise_multiplier == 0:
        return math.inf
    rate = plan.sampling_rate
    shift = (1.0 - plan.sampler.canary_background) / 2.0 / plan.noise_multiplier
    # In units of the noise; beyond 37 deviations float64 has no probabilities left.
    thresholds = np.minimum(np.linspace(0.0, 37.0, 200), 37.0)
    without = norm.sf(thresholds)
    there = (1 - rate) * without + rate * norm.sf(thresholds - shift)
    kept = there > delta
    if not kept.any():
        return 0.0
    return max(0.0, float(np.log((there[kept] - delta) / without[kept]).max()))


def attack_limits(make_ledger: MakeLedger = Ledger) -> Cases:
    """Ask for ledgers with odd budgets, and for policies with odd rules."""
    cases = []
    with _folder() as folder:
        for number, (name, value) in enumerate(
            itertools.product(("max_epsilon", "delta"), ODD)
        ):
            limits = {"max_epsilon": MAX_EPSILON, "delta": DELTA, name: value}
            path = folder / f"{number}.sqlite"
            cases.append(_opened(make_ledger, path, name, limits))
    # None is how a rule is left out, and no value of a config.
    values = [value for value in ODD if value is not None]
    cases += [_ruled(rule, value) for rule in RULES for value in values]
    return Cases("budgets and rules", cases)


def _opened(
    make_ledger: MakeLedger, path: Path, name: str, limits: dict[str, object]
) -> Case:
    request = f"Ledger({name}={limits[name]!r})"
    try:
        book = make_ledger(path, limits["max_epsilon"], limits["delta"])  # type: ignore[arg-type]
    except (ValueError, LedgerError):
        return Case(request, "no ledger")
    except Exception as error:
        return Case(request, "raised", f"no ledger, but {type(error).__name__}")
    sound = 0 < book.max_epsilon < math.inf and 0 < book.delta < 1
    if not sound or isinstance(limits[name], bool):
        return Case(request, "opened", "the budget makes no sense")
    return Case(request, "opened")


# The greatest value of each rule that still means something.
RULES = {
    "max-epsilon": math.inf,
    "delta": 1.0,
    "min-noise-multiplier": math.inf,
    "max-clip-norm": math.inf,
    "max-sampling-rate": math.nextafter(1.0, 2.0),
}


def _ruled(rule: str, value: object) -> Case:
    request = f"{rule}={value!r}"
    try:
        policy = NodePolicy.from_config({rule: value})  # type: ignore[dict-item]
    except ValueError:
        return Case(request, "no policy")
    except Exception as error:
        return Case(request, "raised", f"no policy, but {type(error).__name__}")
    found = getattr(policy, rule.replace("-", "_"))
    if found is None or isinstance(found, bool) or not 0 < found < RULES[rule]:
        return Case(request, "accepted", "the rule makes no sense")
    return Case(request, "accepted")
