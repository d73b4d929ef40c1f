"""Batches of a fixed size, drawn without replacement: what the paper does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flwr_safedshb.privacy.samplers.base import Pair, Profile, Sampler

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from dp_accounting import DpEvent, NeighboringRelation

    from flwr_safedshb.privacy.plan import PrivacyPlan
    from flwr_safedshb.privacy.randomness.noise import Randomness


class Fixed(Sampler):
    """b of the m examples, all subsets of that size equally likely."""

    word = "fixed"
    description = "fixed-size sampling without replacement"
    others = -1.0  # the example takes the place of an opposite one

    def draw(self, plan: PrivacyPlan, randomness: Randomness) -> npt.NDArray[np.int64]:
        """Draw b distinct examples."""
        return randomness.subset(plan.num_examples, plan.batch_size)

    def profiles(self, plan: PrivacyPlan) -> tuple[Profile, ...]:
        """Bound one step under replace-one, in units of 2C/b.

        With N = N(0, s^2) and M = (1-q) N(0, s^2) + q N(1, s^2), one step is dominated
        by H_{e^eps}(M || N) for eps >= 0 and H_{e^eps}(N || M) for eps < 0 (Zhu, Dong,
        Wang, "Optimal Accounting of Differential Privacy via Characteristic Function",
        AISTATS 2022). Either pair alone belongs to one ordered pair of datasets, and
        composes to less than the truth. The second is mirrored at 0, so that its loss
        increases.
        """
        rate, std = plan.sampling_rate, plan.noise_multiplier
        out = ((1.0, 0.0),)
        above = Pair(((1 - rate, 0.0), (rate, 1.0)), out, std)
        below = Pair(out, ((1 - rate, 0.0), (rate, -1.0)), std)
        return (Profile(above, below),)

    def event(self, plan: PrivacyPlan) -> tuple[DpEvent, NeighboringRelation]:
        """Describe one step; its multiplier is noise over sensitivity, as a plan's."""
        import dp_accounting as dp

        noise = dp.GaussianDpEvent(plan.noise_multiplier)
        event = dp.SampledWithoutReplacementDpEvent(
            plan.num_examples, plan.batch_size, noise
        )
        return event, dp.NeighboringRelation.REPLACE_ONE
