"""Which examples a step looks at (Alg. 1, line 4), drawn afresh in every step."""

from __future__ import annotations

from typing import assert_never

import numpy as np
import numpy.typing as npt

from flwr_safedshb.privacy.plan import PrivacyPlan
from flwr_safedshb.privacy.randomness.noise import Randomness


def sample(plan: PrivacyPlan, randomness: Randomness) -> npt.NDArray[np.int64]:
    """Draw one batch the way the plan's accountant assumes it is drawn.

    Returns
    -------
    ndarray of int64, shape (k,)
        Distinct indices in ``range(num_examples)``, in no particular order.
        ``fixed``: k = b, all subsets of that size equally likely. ``poisson``: every
        example is in with probability b/m, independently; k varies and may be 0.
    """
    match plan.sampling:
        case "fixed":
            return randomness.subset(plan.num_examples, plan.batch_size)
        case "poisson":
            return randomness.coins(plan.num_examples, plan.sampling_rate)
        case _:
            assert_never(plan.sampling)
