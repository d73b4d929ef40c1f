"""Hold epsilon against another computation: ``-m simulations.studies.accounting``.

Over samplers, sampling rates from 1e-4 to 1, up to 300,000 steps and delta from 1e-5 to
the least that is accepted, the accounted epsilon must never be below the exact one of
`exact`, and within 2 % of it where delta is at least 1e-7. Where that integral does not
converge (examples that are hardly ever drawn), epsilon must not be below that of one
step, which is exact too and never more than that of many.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from flwr_safedshb.privacy.accounting import accountant, ranges
from flwr_safedshb.privacy.plan import PrivacyPlan
from flwr_safedshb.privacy.samplers import Adjacency
from simulations.studies.accounting.exact import Kind, exact_epsilon

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


@dataclass(frozen=True)
class Comparison:
    """Epsilons of one setting.

    Attributes
    ----------
    accounted, quick : float
        What the product says, and its quick bound.
    exact : float or None
        By another computation; None where it does not converge.
    least : float
        A lower bound by another computation; ``exact`` where that is known.
    """

    plan: PrivacyPlan
    steps: int
    delta: float
    accounted: float
    quick: float
    exact: float | None
    least: float

    @property
    def ratio(self) -> float:
        """Return the accounted epsilon over the exact one, or the lower bound."""
        if self.least == 0:
            return 1.0 if self.accounted == 0 or self.exact is None else math.inf
        return self.accounted / self.least

    @property
    def holds(self) -> bool:
        """Whether the epsilon is an upper bound, and a tight one where it must be."""
        tight = self.exact is not None and self.delta >= TIGHT_FROM
        largest = TIGHT if tight else math.inf
        return 1.0 <= self.ratio <= largest and self.accounted <= self.quick


def settings() -> Iterable[tuple[PrivacyPlan, int, float]]:
    """Yield all settings, with noise for an epsilon around each of the targets."""
    for (sampling, adjacency), batch, steps, delta, target in product(
        KINDS, BATCHES, STEPS, DELTAS, TARGETS
    ):
        spread = batch / EXAMPLES * math.sqrt(2 * steps * math.log(1 / delta))
        noise = max(0.8, spread / target)
        yield (
            PrivacyPlan(1.0, noise, batch, EXAMPLES, sampling, adjacency),
            steps,
            delta,
        )


def compare(plan: PrivacyPlan, steps: int, delta: float) -> Comparison:
    """Compute an epsilon in both ways."""
    kinds = KINDS[plan.sampling, plan.adjacency]

    def largest(steps: int) -> float:
        numbers = plan.noise_multiplier, plan.sampling_rate, steps, delta
        return max(exact_epsilon(kind, *numbers) for kind in kinds)

    try:
        exact = largest(steps)
    except ArithmeticError:
        exact = None
    return Comparison(
        plan,
        steps,
        delta,
        accountant.compute_epsilon([(plan, steps)], delta),
        accountant.bound_epsilon([(plan, steps)], delta),
        exact,
        largest(1) if exact is None else exact,
    )


def table(found: Sequence[Comparison]) -> Table:
    """Show the least and the greatest ratio, by sampler and delta."""
    table = Table(title=f"Accounted over exact epsilon, {len(found)} settings")
    table.add_column("mechanism")
    for column in ("delta", "exact", "least", "greatest", "quick", "one step"):
        table.add_column(column, justify="right")
    for (sampling, adjacency), delta in product(KINDS, DELTAS):
        mine = [
            one
            for one in found
            if (one.plan.sampling, one.plan.adjacency) == (sampling, adjacency)
            and one.delta == delta
        ]
        known = [one for one in mine if one.exact is not None]
        if not known:
            continue
        quick = [one.quick / one.exact for one in known if one.exact]
        table.add_row(
            f"{sampling}, {adjacency}",
            f"{delta:g}",
            str(len(known)),
            f"{min(one.ratio for one in known):.7f}",
            f"{max(one.ratio for one in known):.7f}",
            f"<= {max(quick, default=1.0):.2f}",
            str(len(mine) - len(known)),
        )
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare; 1 if an epsilon is too small, or larger than it need be."""
    parser = argparse.ArgumentParser(prog="python -m simulations.studies.accounting")
    parser.add_argument("--every", type=int, default=1, help="one setting of so many")
    parser.add_argument("--output", type=Path, default=Path("outputs/accounting.json"))
    options = parser.parse_args(arguments)
    chosen = list(settings())[:: options.every]
    console = Console()
    rows = track(chosen, "Comparing", console=Console(stderr=True))
    found = [compare(*setting) for setting in rows]
    console.print(table(found))
    options.output.parent.mkdir(parents=True, exist_ok=True)
    report = [{**asdict(one), "ratio": one.ratio, "holds": one.holds} for one in found]
    options.output.write_text(json.dumps(report, indent=2) + "\n")
    for one in found:
        if not one.holds:
            console.print(f"[bold red]WRONG[/bold red] {one}, ratio {one.ratio:.9f}")
    return 0 if all(one.holds for one in found) else 1


if __name__ == "__main__":
    sys.exit(main())
