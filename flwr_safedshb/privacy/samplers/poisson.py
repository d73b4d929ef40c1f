"""Poisson batches: every example is in with the same probability, independently."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from flwr_safedshb.privacy.samplers.base import Pair, Profile, Sampler
from flwr_safedshb.privacy.samplers.fixed import Fixed

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from dp_accounting import DpEvent, NeighboringRelation

    from flwr_safedshb.privacy.plan import PrivacyPlan
    from flwr_safedshb.privacy.randomness.noise import Randomness


class Poisson(Sampler):
    """Each example with probability b/m; the batch may be empty."""

    word = "poisson"
    description = "Poisson sampling"
    adjacencies = ("replace-one", "add-remove")
    others = 0.0  # lest their number add noise

    def draw(self, plan: PrivacyPlan, randomness: Randomness) -> npt.NDArray[np.int64]:
        """Toss a coin for every example."""
        return randomness.coins(plan.num_examples, plan.sampling_rate)

    def places(self, plan: PrivacyPlan) -> int:
        """Return a number that is exceeded once in 2^90 batches, by Bernstein's bound.

        An example moves a sum by C/b only where its place is there without it.
        """
        rare = 90 * math.log(2.0)
        above = rare / 3 + math.sqrt((rare / 3) ** 2 + 2 * rare * plan.batch_size)
        return min(plan.num_examples, plan.batch_size + math.ceil(above))

    def profiles(self, plan: PrivacyPlan) -> tuple[Profile, ...]:
        """Bound one step, in units of C/b.

        An example that is in the batch moves the mean by up to C/b; one that replaces
        it, by as much the other way. Added and removed examples are two ordered pairs.
        """
        rate, std = plan.sampling_rate, _noise(plan)
        out = ((1.0, 0.0),)
        one, other = (((1 - rate, 0.0), (rate, mean)) for mean in (1.0, -1.0))
        if plan.adjacency == "replace-one":
            pairs = [Pair(one, other, std)]
        else:
            pairs = [Pair(one, out, std), Pair(out, other, std)]
        return tuple(Profile(pair, pair) for pair in pairs)

    def event(self, plan: PrivacyPlan) -> tuple[DpEvent, NeighboringRelation]:
        """Describe one step.

        The Renyi accountant has no event for Poisson sampling under replace-one; that
        of fixed-size batches bounds it, since its divergence is computed for any
        batches that coincide without the example and lie within 2C/b with it.
        """
        import dp_accounting as dp

        if plan.adjacency == "replace-one":
            return Fixed().event(replace(plan, sampling=Fixed.word))
        noise = dp.GaussianDpEvent(_noise(plan))
        event = dp.PoissonSampledDpEvent(plan.sampling_rate, noise)
        return event, dp.NeighboringRelation.ADD_OR_REMOVE_ONE


def _noise(plan: PrivacyPlan) -> float:
    """Return the noise in units of C/b.

    A plan's multiplier counts in 2C/b, the replace-one sensitivity of a fixed-size
    batch. This function is the only place where the one unit becomes the other.
    """
    return 2.0 * plan.noise_multiplier
