"""No sampling: every example takes part in every release, as in an evaluation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flwr_safedshb.privacy.samplers.base import Pair, Profile, Sampler

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from dp_accounting import DpEvent, NeighboringRelation

    from flwr_safedshb.privacy.plan import PrivacyPlan
    from flwr_safedshb.privacy.randomness.noise import Randomness


class Whole(Sampler):
    """All m examples; chance hides nobody, the noise alone does."""

    word = "whole"
    description = "all examples, without sampling"
    others = -1.0

    def check(self, plan: PrivacyPlan) -> None:
        """Refuse a batch that is not all of the data."""
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

    def profiles(self, plan: PrivacyPlan) -> tuple[Profile, ...]:
        """Bound one release: the Gaussian mechanism, whose sensitivity is the unit."""
        pair = Pair(((1.0, 1.0),), ((1.0, 0.0),), plan.noise_multiplier)
        return (Profile(pair, pair),)

    def event(self, plan: PrivacyPlan) -> tuple[DpEvent, NeighboringRelation]:
        """Describe one release."""
        import dp_accounting as dp

        noise = dp.GaussianDpEvent(plan.noise_multiplier)
        return noise, dp.NeighboringRelation.REPLACE_ONE
