"""The samplers with a published bound: fixed-size, Poisson, and all examples."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from flwr_safedshb.privacy.samplers import (
    DominatingPair,
    GroupPair,
    MixturePair,
    Sampler,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from dp_accounting import DpEvent, NeighboringRelation

    from flwr_safedshb.privacy.plan import PrivacyPlan
    from flwr_safedshb.privacy.randomness.noise import Randomness


class Fixed(Sampler):
    """b of the m examples without replacement, all subsets equally likely (the paper).

    The canary takes the place of an example with the opposite contribution.
    """

    name = "fixed"
    description = "fixed-size sampling without replacement"
    canary_background = -1.0

    def draw(self, plan: PrivacyPlan, randomness: Randomness) -> npt.NDArray[np.int64]:
        """Draw b distinct examples."""
        return randomness.subset(plan.num_examples, plan.batch_size)

    def dominating_pairs(self, plan: PrivacyPlan) -> tuple[DominatingPair, ...]:
        """Bound one step under replace-one, in units of 2C/b.

        With N = N(0, s^2) and M = (1-q) N(0, s^2) + q N(1, s^2), one step is dominated
        by H_{e^eps}(M || N) for eps >= 0 and H_{e^eps}(N || M) for eps < 0 (Zhu, Dong,
        Wang, "Optimal Accounting of Differential Privacy via Characteristic Function",
        AISTATS 2022). Either pair alone belongs to one ordered pair of datasets, and
        composes to less than the truth. The second is mirrored at 0, so that its loss
        increases.
        """
        rate, std = plan.sampling_rate, plan.noise_multiplier
        without = ((1.0, 0.0),)
        above = MixturePair(((1 - rate, 0.0), (rate, 1.0)), without, std)
        below = MixturePair(without, ((1 - rate, 0.0), (rate, -1.0)), std)
        return (DominatingPair(above, below),)

    def group_pairs(self, plan: PrivacyPlan, group: int) -> tuple[GroupPair, ...]:
        """Bound one step about a group: of its examples, j are in the batch."""
        from scipy.stats import hypergeom

        most = range(min(group, plan.batch_size) + 1)
        drawn = hypergeom(plan.num_examples, group, plan.batch_size)
        weights = tuple(float(drawn.pmf(j)) for j in most)
        return (GroupPair(weights, plan.noise_multiplier),)

    def dp_event(self, plan: PrivacyPlan) -> tuple[DpEvent, NeighboringRelation]:
        """Describe one step; its multiplier is noise over sensitivity, as a plan's."""
        import dp_accounting as dp

        noise = dp.GaussianDpEvent(plan.noise_multiplier)
        event = dp.SampledWithoutReplacementDpEvent(
            plan.num_examples, plan.batch_size, noise
        )
        return event, dp.NeighboringRelation.REPLACE_ONE


class Poisson(Sampler):
    """Each example independently with probability b/m; the batch may be empty."""

    name = "poisson"
    description = "Poisson sampling"
    adjacencies = ("replace-one", "add-remove")
    canary_background = 0.0  # otherwise their random number would add noise

    def draw(self, plan: PrivacyPlan, randomness: Randomness) -> npt.NDArray[np.int64]:
        """Toss a coin for every example."""
        return randomness.poisson_subset(plan.num_examples, plan.sampling_rate)

    def padded_size(self, plan: PrivacyPlan) -> int:
        """Return a size that one batch in 2^90 exceeds, by Bernstein's inequality.

        An example moves a sum by at most C/b only where its place is there without it.
        """
        rare = 90 * math.log(2.0)
        above = rare / 3 + math.sqrt((rare / 3) ** 2 + 2 * rare * plan.batch_size)
        return min(plan.num_examples, plan.batch_size + math.ceil(above))

    def dominating_pairs(self, plan: PrivacyPlan) -> tuple[DominatingPair, ...]:
        """Bound one step, in units of C/b.

        An example that is in the batch moves the mean by up to C/b; one that replaces
        it, by as much the other way. Added and removed examples are two ordered pairs.
        """
        rate, std = plan.sampling_rate, _noise_in_clips(plan)
        without = ((1.0, 0.0),)
        one, other = (((1 - rate, 0.0), (rate, mean)) for mean in (1.0, -1.0))
        if plan.adjacency == "replace-one":
            pairs = [MixturePair(one, other, std)]
        else:
            pairs = [MixturePair(one, without, std), MixturePair(without, other, std)]
        return tuple(DominatingPair(pair, pair) for pair in pairs)

    def group_pairs(self, plan: PrivacyPlan, group: int) -> tuple[DominatingPair, ...]:
        """Bound one step about a group, of which j are in the batch, in units of C/b.

        Given j and i of them, the means are at most j + i apart (j, for a group that is
        left out). The mass of each pair (j, i) can be shared out so that both mixtures
        have the ratio of their densities at one point, whatever that is, because the
        ratio of N(j) and N(-i) is a function of j times one of i. So no divergence is
        larger than that of examples which all pull one way.
        """
        from scipy.stats import binom

        std, drawn = _noise_in_clips(plan), binom(group, plan.sampling_rate)
        weights = [(float(drawn.pmf(j)), float(j)) for j in range(group + 1)]
        one = tuple(weights)
        other = tuple((weight, -mean) for weight, mean in weights)
        without = ((1.0, 0.0),)
        if plan.adjacency == "replace-one":
            pairs = [MixturePair(one, other, std)]
        else:
            pairs = [MixturePair(one, without, std), MixturePair(without, other, std)]
        return tuple(DominatingPair(pair, pair) for pair in pairs)

    def dp_event(self, plan: PrivacyPlan) -> tuple[DpEvent, NeighboringRelation]:
        """Describe one step.

        The Renyi accountant has no event for Poisson sampling under replace-one; that
        of fixed-size batches bounds it, since its divergence is computed for any
        batches that coincide without the example and lie within 2C/b with it.
        """
        import dp_accounting as dp

        if plan.adjacency == "replace-one":
            return Fixed().dp_event(replace(plan, sampling=Fixed.name))
        noise = dp.GaussianDpEvent(_noise_in_clips(plan))
        event = dp.PoissonSampledDpEvent(plan.sampling_rate, noise)
        return event, dp.NeighboringRelation.ADD_OR_REMOVE_ONE


def _noise_in_clips(plan: PrivacyPlan) -> float:
    """Return the noise in units of C/b: the only conversion between the two units.

    A plan's multiplier counts in 2C/b, the replace-one sensitivity of a fixed-size
    batch.
    """
    return 2.0 * plan.noise_multiplier


class Whole(Sampler):
    """All m examples, as in an evaluation: only the noise hides anybody."""

    name = "whole"
    description = "all examples, without sampling"
    canary_background = -1.0

    def check(self, plan: PrivacyPlan) -> None:
        """Raise a ValueError if a batch is not all of the data."""
        super().check(plan)
        if plan.batch_size != plan.num_examples:
            raise ValueError(
                f"batch_size={plan.batch_size} must be num_examples="
                f"{plan.num_examples} for sampling='whole', which takes all examples"
            )

    def draw(self, plan: PrivacyPlan, randomness: Randomness) -> npt.NDArray[np.int64]:
        """Return all examples."""
        import numpy as np  # here, so that --help does not wait for it

        return np.arange(plan.num_examples)

    def dominating_pairs(self, plan: PrivacyPlan) -> tuple[DominatingPair, ...]:
        """Bound one release: the Gaussian mechanism, whose sensitivity is the unit."""
        return self.group_pairs(plan, 1)

    def group_pairs(self, plan: PrivacyPlan, group: int) -> tuple[DominatingPair, ...]:
        """Bound one release about a group: it moves by as many units."""
        moved = ((1.0, float(group)),)
        pair = MixturePair(moved, ((1.0, 0.0),), plan.noise_multiplier)
        return (DominatingPair(pair, pair),)

    def dp_event(self, plan: PrivacyPlan) -> tuple[DpEvent, NeighboringRelation]:
        """Describe one release."""
        import dp_accounting as dp

        noise = dp.GaussianDpEvent(plan.noise_multiplier)
        return noise, dp.NeighboringRelation.REPLACE_ONE
