"""Ask a ledger and a policy for everything odd that a run's config could ask for.

Whoever writes a run's config chooses the numbers of its plan and its budget, and may
choose the next charge by what was released. The promise under test:

- what is accepted has an epsilon that is a finite number within the budget, and not
  below what the very first step costs an honest accountant;
- a ledger that has accepted something odd still refuses what is too much;
- no sequence of commitments and charges that is admitted costs more than the limit, in
  the ledger's unit.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
from scipy.stats import norm

from flwr_safedshb.audit.outcomes import Outcome, Outcomes
from flwr_safedshb.audit.target_node import temporary_ledgers
from flwr_safedshb.privacy.accounting import accountant
from flwr_safedshb.privacy.ledger.ledger import BudgetExhausted, Ledger, LedgerError
from flwr_safedshb.privacy.plan import PrivacyPlan
from flwr_safedshb.privacy.policy import NodePolicy, get_limits
from flwr_safedshb.privacy.samplers import load_samplers

MAX_EPSILON, DELTA = 0.5, 1e-6
# Refused by every ledger with that budget: one step of it costs more than 40.
TOO_MUCH = PrivacyPlan(1.0, 0.1, 8, 8)

_SMALL = (5e-324, 1e-310, 1e-160, 1e-30, 1e-12, 1e-9, 1e-6, 1e-3)
_LARGE = (1e3, 1e6, 1e9, 1e12, 1e30, 1e160, 1.7e308, math.inf)
_NO_NUMBERS = (True, False, "1", None, Decimal(1), 1j, [1.0], math.nan)
_NUMBERS = (0.0, -0.0, -1.0, -math.inf, 1.0, 1, 10**400, Fraction(1, 3))
_NUMPY = (np.float32(1.0), np.float16(6e-8))
ODD_VALUES: tuple[object, ...] = (*_SMALL, *_LARGE, *_NO_NUMBERS, *_NUMBERS, *_NUMPY)
PlanRequest = tuple[dict[str, object], object]  # the fields of a plan, and steps
MakeLedger = Callable[[Path, float, float], Ledger]


def odd_plans() -> Iterator[PlanRequest]:
    """Return the fields of plans that are odd in one number, and odd steps."""
    good: dict[str, object] = {
        "clip_norm": 1.0,
        "noise_multiplier": 1.0,
        "batch_size": 25,
        "num_examples": 2763,
    }
    for sampling in load_samplers():
        for name, value in itertools.product(good, ODD_VALUES):
            yield {**good, "sampling": sampling, name: value}, 1
        for value in (*_SMALL, *_LARGE):  # and with every example in the batch
            whole = {"batch_size": 8, "num_examples": 8, "noise_multiplier": value}
            yield {**good, **whole, "sampling": sampling}, 1
    for steps in (*ODD_VALUES, 2**63, 10**9, 10**12):
        yield good, steps


def request_odd_plans(
    make_ledger: MakeLedger = Ledger, requests: Iterable[PlanRequest] | None = None
) -> Outcomes:
    """Charge fresh ledgers for plans, by default for all of `odd_plans`."""
    with temporary_ledgers() as folder:
        return Outcomes(
            [
                _charge(
                    make_ledger(folder / f"{number}.sqlite", MAX_EPSILON, DELTA),
                    *request,
                )
                for number, request in enumerate(requests or odd_plans())
            ]
        )


def _charge(ledger: Ledger, fields: dict[str, object], steps: object) -> Outcome:
    """Charge a plan, and look at what the ledger is afterwards."""
    words = ", ".join(f"{name}={value!r}" for name, value in fields.items())
    request = f"{words}, steps={steps!r}"
    try:
        plan = PrivacyPlan(**fields)  # type: ignore[arg-type]  # that is the attack
    except ValueError:
        return Outcome(request, "no plan")
    except Exception as error:
        return Outcome(request, "raised", f"no plan, but {type(error).__name__}")
    result = "charged"
    try:
        ledger.charge(plan, steps)  # type: ignore[arg-type]
    except (BudgetExhausted, ValueError):
        result = "refused"
    except Exception as error:
        return Outcome(request, "raised", f"no refusal, but {type(error).__name__}")
    spent = ledger.epsilon()
    if not 0.0 <= spent <= MAX_EPSILON:
        return Outcome(request, result, f"epsilon is {spent}")
    if result == "charged" and not spent >= least_epsilon(plan, DELTA):
        return Outcome(request, result, f"epsilon is {spent}, below one step's")
    if _is_admitted(ledger, TOO_MUCH, 1, run=""):
        return Outcome(request, result, "the ledger accepts anything afterwards")
    return Outcome(request, result)


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
    present = (1 - rate) * without + rate * norm.sf(thresholds - shift)
    kept = present > delta
    if not kept.any():
        return 0.0
    return max(0.0, float(np.log((present[kept] - delta) / without[kept]).max()))


# The greatest value that a rule must stay below to mean something, where it is finite.
RULES = dict.fromkeys(get_limits(), math.inf) | {
    "delta": 1.0,
    "max-sampling-rate": math.nextafter(1.0, 2.0),
}


def request_odd_limits(make_ledger: MakeLedger = Ledger) -> Outcomes:
    """Ask for ledgers with odd budgets, and for policies with odd rules."""
    with temporary_ledgers() as folder:
        cases = [
            _open_ledger(make_ledger, folder / f"{number}.sqlite", name, value)
            for number, (name, value) in enumerate(
                itertools.product(("max_epsilon", "delta"), ODD_VALUES)
            )
        ]
    # None is how a rule is left out, and no value of a config.
    values = [value for value in ODD_VALUES if value is not None]
    cases += [_make_policy(rule, value) for rule in RULES for value in values]
    return Outcomes(cases)


def _open_ledger(
    make_ledger: MakeLedger, path: Path, name: str, value: object
) -> Outcome:
    request = f"Ledger({name}={value!r})"
    limits = {"max_epsilon": MAX_EPSILON, "delta": DELTA, name: value}
    try:
        ledger = make_ledger(path, *limits.values())  # type: ignore[arg-type]
    except (ValueError, LedgerError):
        return Outcome(request, "no ledger")
    except Exception as error:
        return Outcome(request, "raised", f"no ledger, but {type(error).__name__}")
    sound = 0 < ledger.max_epsilon < math.inf and 0 < ledger.delta < 1
    broken = (
        "" if sound and not isinstance(value, bool) else "the budget makes no sense"
    )
    return Outcome(request, "opened", broken)


def _make_policy(rule: str, value: object) -> Outcome:
    request = f"{rule}={value!r}"
    try:
        policy = NodePolicy.from_config({rule: value})  # type: ignore[dict-item]
    except ValueError:
        return Outcome(request, "no policy")
    except Exception as error:
        return Outcome(request, "raised", f"no policy, but {type(error).__name__}")
    found = getattr(policy, rule.replace("-", "_"))
    sound = found is not None and not isinstance(found, bool)
    broken = "" if sound and 0 < found < RULES[rule] else "the rule makes no sense"
    return Outcome(request, "accepted", broken)


Charges = tuple[tuple[PrivacyPlan, int], ...]
_PAPER = PrivacyPlan(1.0, 1.0, 25, 2763)
_ADD_REMOVE = replace(_PAPER, sampling="poisson", adjacency="add-remove")
_ANSWER = PrivacyPlan(1.0, 50.0, 100, 100, sampling="whole")
_CALM = PrivacyPlan(1.0, 20.0, 10, 10, sampling="whole")
_DIGEST = "0" * 16
# After one release either of two others, by its outcome: at epsilon = 2, delta is 1.9
# times what each path alone has by its composed privacy loss distribution.
_FIRST = (PrivacyPlan(1.0, 2.5, 10, 10, sampling="whole"), 1)
_RARE = (PrivacyPlan(1.0, 0.25, 1, 10**5), 15)
_SURE = (PrivacyPlan(1.0, 40.0, 10, 10, sampling="whole"), 146)


@dataclass(frozen=True)
class ChargeOrder:
    """Charges that must not all be admitted after a commitment.

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
    ChargeOrder("a rare loss after a release", 2.0, 1e-5, (), (_FIRST, _RARE)),
    ChargeOrder("a sure loss after a release", 2.0, 1e-5, (), (_FIRST, _SURE)),
    ChargeOrder(
        "a plan beside a commitment that fills the budget",
        limit=1.05,
        delta=1e-4,
        committed=((_PAPER, 400),),
        charges=((_PAPER, 1), (_CALM, 1)),
    ),
    ChargeOrder(
        "a unit that a run chooses, beside an answer in another",
        limit=0.3,
        delta=1e-4,
        committed=(),
        charges=(
            (replace(_ADD_REMOVE, part=f"trained:{_DIGEST}"), 400),
            (replace(_ANSWER, part=f"held-out:{_DIGEST}"), 1),
        ),
    ),
    ChargeOrder("a unit that a run chooses", 0.3, 1e-4, (), ((_ADD_REMOVE, 400),)),
)


def request_orders(make_ledger: MakeLedger = Ledger, rounds: int = 12) -> Outcomes:
    """Ask for each of `ORDERS`, and for random ones in so many ledgers."""
    with temporary_ledgers() as folder:
        cases = []
        for number, order in enumerate(ORDERS):
            path = folder / f"{number}.sqlite"
            ledger = make_ledger(path, order.limit, order.delta)
            ledger.commit(order.committed, "run")
            admitted = [_is_admitted(ledger, *charge) for charge in order.charges]
            broken = f"more than epsilon {order.limit:g}" if all(admitted) else ""
            result = "admitted" if broken else "refused"
            cases.append(Outcome(order.name, result, broken))
        for seed in range(rounds):
            path = folder / f"random{seed}.sqlite"
            cases.append(_request_randomly(make_ledger, path, seed))
    return Outcomes(cases)


def _request_randomly(make_ledger: MakeLedger, path: Path, seed: int) -> Outcome:
    """Commit to something, or not, and charge at random until little is left."""
    rng = np.random.default_rng(seed)
    limit, delta = float(rng.uniform(0.5, 3.0)), float(10.0 ** rng.uniform(-6, -3))
    plans = (_PAPER, _ADD_REMOVE, _ANSWER, _CALM, replace(_PAPER, noise_multiplier=3.0))
    ledger, name = make_ledger(path, limit, delta), f"random order {seed}"
    if rng.random() < 0.5:
        ledger.commit([(plans[i], int(rng.integers(1, 300))) for i in (0, 2)], "run")
    charged: list[tuple[PrivacyPlan, int]] = []
    for _ in range(8):
        charge = plans[rng.integers(len(plans))], int(rng.integers(1, 150))
        if not _is_admitted(ledger, *charge):
            continue
        charged.append(charge)
        found = ledger.epsilon()
        # Charges fixed beforehand cost no more than the same ones chosen adaptively.
        least = accountant.compute_epsilon(charged, ledger.delta, "replace-one")
        if not least <= found <= limit:
            broken = f"epsilon is {found}, at least {least} and at most {limit}"
            return Outcome(name, "admitted", broken)
    return Outcome(name, "within the limit")


def _is_admitted(
    ledger: Ledger, plan: PrivacyPlan, steps: int, run: str = "run"
) -> bool:
    try:
        ledger.charge(plan, steps, run)
    except BudgetExhausted:
        return False
    return True
