"""What private answers about a model cost a node, and how precise they are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import TYPE_CHECKING

from flwr_safedshb.cli._forecast import Forecast
from flwr_safedshb.privacy.plan import PrivacyPlan

if TYPE_CHECKING:
    from rich.table import Table

# Shares of the examples that noise in a right answer's share may be, one deviation.
_DEVIATIONS = (0.02, 0.05, 0.1, 0.2)
_SPLIT = "0" * 16


@dataclass(frozen=True)
class Answers:
    """Some answers of every node in a run.

    Attributes
    ----------
    count, examples : int
        How many, and about how many examples of a node.
    noise_multiplier : float
    epsilon : float
        Of the whole run, steps and answers.
    deviation : float
        Of the noise in a node's accuracy.
    reach : float
        By how much the server's interval goes beyond what nodes report, on each side.
    open_to_liars : bool
        Whether f >= n/3, so that liars alone can take its ends to 0 or 1.
    """

    count: int
    examples: int
    noise_multiplier: float
    epsilon: float
    deviation: float
    reach: float
    open_to_liars: bool


def answers(now: Forecast, count: int, held_out: int) -> list[Answers]:
    """Forecast answers about examples held out, or about all at several precisions.

    Examples that are held out, beside the m that train, may spend as much on answers as
    the others on steps.
    """
    it = now.setting
    if count < 1:
        raise ValueError(f"evaluations={count} must be at least 1")
    if held_out < 0:
        raise ValueError(f"held_out={held_out} must be at least 0")
    examples = held_out or it.m
    if held_out:
        plan = PrivacyPlan.calibrate(
            now.epsilon,
            it.delta,
            count,
            clip_norm=1.0,
            batch_size=held_out,
            num_examples=held_out,
            sampling="whole",
        )
        multipliers = [plan.noise_multiplier]
    else:
        multipliers = [d * examples / math.sqrt(2.0) for d in _DEVIATIONS]
    return [_answers(now, count, examples, noise, held_out) for noise in multipliers]


def _answers(
    now: Forecast, count: int, examples: int, noise: float, held_out: int
) -> Answers:
    from flwr_safedshb.privacy.accounting.accountant import compute_epsilon

    it = now.setting
    steps = now.plan
    second = PrivacyPlan(1.0, noise, examples, examples, sampling="whole")
    if held_out:
        steps = replace(steps, part=f"trained:{_SPLIT}")
        second = replace(second, part=f"held-out:{_SPLIT}")
    spent = compute_epsilon([(steps, it.steps), (second, count)], it.delta)
    deviation = math.sqrt(2.0) * noise / examples
    opened = it.f > 0 and 3 * it.f >= it.n
    z = NormalDist().inv_cdf(1.0 - 0.05 / (2 * (it.n - it.f)))
    return Answers(count, examples, noise, spent, deviation, z * deviation, opened)


def answers_table(told: Sequence[Answers]) -> Table:
    """Return the answers as a table for people."""
    from rich import box
    from rich.table import Table

    first = told[0]
    title = f"{first.count} private answers about {first.examples} examples of a node"
    table = Table(title=title, box=box.SIMPLE, title_justify="left")
    for column in ("noise", "epsilon, steps included", "deviation", "reach***"):
        table.add_column(column, justify="right")
    for one in told:
        table.add_row(
            f"{one.noise_multiplier:.3g}",
            f"{one.epsilon:.4g}",
            f"± {one.deviation:.3g}",
            f"± {one.reach:.3g}",
        )
    caption = (
        "*** the server's interval for the honest nodes' median accuracy goes so far "
        "beyond what nodes report; 95 %, whatever f nodes say. Every node counts once: "
        "it is not the accuracy over all examples"
    )
    if first.open_to_liars:
        caption += ". f >= n/3: liars alone can take either end of it to 0 or 1"
    table.caption = caption
    return table
