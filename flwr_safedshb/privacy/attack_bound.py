"""What a privacy plan leaves to an attacker who tries to recognise one example."""

from __future__ import annotations

import math
from collections.abc import Sequence

from flwr_safedshb.privacy.accounting.accountant import compute_privacy_curve
from flwr_safedshb.privacy.plan import PrivacyPlan

# The deltas at which the privacy curve is read. Each gives a bound that holds for every
# attacker, so a finer grid could only lower the result.
_DELTAS = (
    *(10.0 ** (-step / 2) for step in range(3, 25)),
    *(step / 20 for step in range(1, 20)),
)


def bound_true_positive_rates(
    plan: PrivacyPlan, steps: int, false_positive_rates: Sequence[float]
) -> list[float]:
    """Bound how often an attacker recognises an example, for each rate of mistakes.

    The attacker sees all that a node sends in `steps` steps, and all of its examples
    but one, and tests whether that one is a given example x or another. If the run is
    (epsilon, delta)-differentially private, any such test has

        TPR <= e^epsilon FPR + delta,   1 - FPR <= e^epsilon (1 - TPR) + delta.

    The run is so for every delta, each with its own epsilon: the least bound counts.

    Parameters
    ----------
    plan : PrivacyPlan
    steps : int
    false_positive_rates : sequence of float
        FPR, each in [0, 1]: how often the test says x where it is another.

    Returns
    -------
    list of float
        The largest TPR: how often the test says x where it is x.
    """
    epsilons = compute_privacy_curve(plan, steps, _DELTAS)
    curve = [
        (math.exp(min(epsilon, 700.0)), delta)
        for epsilon, delta in zip(epsilons, _DELTAS, strict=True)
    ]
    return [
        min(
            1.0,
            *(min(r * fpr + d, 1.0 - (1.0 - d - fpr) / r) for r, d in curve),
        )
        for fpr in false_positive_rates
    ]
