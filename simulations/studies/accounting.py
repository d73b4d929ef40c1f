"""Hold epsilon against another computation: ``python -m simulations.study accounting``.

Over samplers, sampling rates from 1e-4 to 1, up to 300,000 steps and delta from 1e-5 to
the least that is accepted, the accounted epsilon must never be below the exact one of
`exact_epsilon`, and within 2 % of it where delta is at least 1e-7. Where that integral
does not converge (examples that are hardly ever drawn), epsilon must not be below that
of one step, which is exact too and never more than that of many.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import Any

from flwr_safedshb.privacy.accounting import accountant, ranges
from flwr_safedshb.privacy.plan import PrivacyPlan
from flwr_safedshb.privacy.samplers import Adjacency
from simulations.exact_epsilon import Kind, exact_epsilon
from simulations.results.tables import Table
from simulations.study import Runs, Section, Study, grid

EXAMPLES = 10_000
BATCHES = (1, 10, 100, 1_000, 5_000, 10_000)
STEPS = (1, 100, 1_000, 30_000, 300_000)
DELTAS = (1e-5, 1e-7, 1e-9, ranges.DELTA.least)
TARGETS = (0.3, 3.0)
KINDS: dict[tuple[str, Adjacency], tuple[Kind, ...]] = {
    ("fixed", "replace-one"): ("fixed",),
    ("poisson", "replace-one"): ("poisson-replace",),
    ("poisson", "add-remove"): ("poisson-remove", "poisson-add"),
}
# How far above the exact figure an epsilon may be, for the deltas that people use.
TIGHT, TIGHT_FROM = 1.02, 1e-7


def make_plan(
    sampling: str,
    adjacency: Adjacency,
    batch: int,
    steps: int,
    delta: float,
    target: float,
) -> PrivacyPlan:
    """Return a plan with noise for an epsilon around a target."""
    spread = batch / EXAMPLES * math.sqrt(2 * steps * math.log(1 / delta))
    noise = max(0.8, spread / target)
    return PrivacyPlan(1.0, noise, batch, EXAMPLES, sampling, adjacency)


def compare(
    sampling: str,
    adjacency: Adjacency,
    batch: int,
    steps: int,
    delta: float,
    target: float,
) -> dict[str, object]:
    """Compute an epsilon in both ways, and say whether the accounted one holds.

    Returns
    -------
    dict
        ``accounted`` and ``quick``, what the product says and its quick bound;
        ``exact``, by another computation, None where it does not converge; ``least``, a
        lower bound by another computation, ``exact`` where that is known; ``ratio``,
        the accounted epsilon over ``least``.
    """
    plan = make_plan(sampling, adjacency, batch, steps, delta, target)
    kinds = KINDS[plan.sampling, plan.adjacency]

    def largest(steps: int) -> float:
        numbers = plan.noise_multiplier, plan.sampling_rate, steps, delta
        return max(exact_epsilon(kind, *numbers) for kind in kinds)

    try:
        exact = largest(steps)
    except ArithmeticError:
        exact = None
    accounted = accountant.compute_epsilon([(plan, steps)], delta)
    quick = accountant.bound_epsilon([(plan, steps)], delta)
    least = largest(1) if exact is None else exact
    if least == 0:
        ratio = 1.0 if accounted == 0 or exact is None else math.inf
    else:
        ratio = accounted / least
    most = TIGHT if exact is not None and delta >= TIGHT_FROM else math.inf
    return {
        "accounted": accounted,
        "quick": quick,
        "exact": exact,
        "least": least,
        "ratio": ratio,
        "holds": 1.0 <= ratio <= most and accounted <= quick,
    }


def report(runs: Runs[Any]) -> Iterator[Section]:
    """Yield the least and the greatest ratio, by sampler and delta."""
    rows = []
    for (mechanism, by_kind), delta in product(
        runs.by("mechanism").items(), runs.labels("delta")
    ):
        mine = [run["metrics"] for run in by_kind.where(delta=delta).values()]
        known = [one for one in mine if one["exact"] is not None]
        if known:
            ratios = [one["ratio"] for one in known]
            quick = [one["quick"] / one["exact"] for one in known if one["exact"]]
            cells = [f"{min(ratios):.7f}", f"{max(ratios):.7f}"]
            cells += [f"<= {max(quick, default=1.0):.2f}", str(len(mine) - len(known))]
            rows.append([mechanism, delta, str(len(known)), *cells])
    heads = ["mechanism", "delta", "exact", "least", "greatest", "quick", "one step"]
    wrong = [case.name for case, run in runs.items() if not run["metrics"]["holds"]]
    yield Section(
        f"Accounted over exact epsilon, {len(runs)} settings",
        table=Table(heads, rows),
        notes=f"**Wrong:** {', '.join(wrong)}." if wrong else "",
    )


def is_any_wrong(runs: Runs[Any]) -> bool:
    """Return True if an epsilon is too small, or larger than it need be."""
    return not all(run["metrics"]["holds"] for run in runs.values())


study = Study(
    "accounting",
    "Epsilon held against another computation",
    "Is the accounted epsilon an upper bound, and a tight one?",
    grid(
        mechanism={
            f"{sampling}, {adjacency}": f"sampling={sampling} adjacency={adjacency}"
            for sampling, adjacency in KINDS
        },
        batch=BATCHES,
        steps=STEPS,
        delta={f"{delta:g}": f"delta={delta!r}" for delta in DELTAS},
        target=TARGETS,
    ),
    seeds=(0,),
    report=report,
    measure=compare,
    failed=is_any_wrong,
)
