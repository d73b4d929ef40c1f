"""The ranges of numbers that can be accounted for, without a slow import.

The author of a run's config chooses these numbers. Outside of the ranges below a
computation could overflow, and an overflow must never look like a small epsilon. So
values out of range are refused at the entrance, and every intermediate result that is
not finite counts as infinite.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real


@dataclass(frozen=True)
class NumberRange:
    """The least and the greatest value of a number, and the remedy for others."""

    least: float
    greatest: float
    remedy: str

    def contains(self, number: float) -> bool:
        """Return whether a number is in the range; NaN is in none."""
        return self.least <= number <= self.greatest

    def check(self, name: str, value: object) -> float:
        """Return the number as a float, or refuse it."""
        if isinstance(value, bool) or not isinstance(value, Real):
            raise ValueError(f"{name}={value!r} must be a number; {self.remedy}")
        try:
            number = float(value)
        except OverflowError:  # a huge integer or fraction has no float
            number = math.inf
        # The float is compared, because the float is kept.
        if not self.contains(number):
            raise ValueError(
                f"{name}={shorten_value(value)} must lie in "
                f"[{self.least:g}, {self.greatest:g}]; {self.remedy}"
            )
        return number


def shorten_value(value: object, length: int = 60) -> str:
    """Return a number, or another value's repr, cut to a length that fits an error."""
    try:
        # The repr of numpy's numbers names their type.
        text = str(value) if isinstance(value, Real) else repr(value)
    except ValueError:  # more digits than Python prints
        return "a huge number"
    return text if len(text) <= length else f"{text[:length]}..."


NOISE_MULTIPLIER = NumberRange(1e-6, 1e6, "use 0 for a run without privacy")
CLIP_NORM = NumberRange(
    1e-9, 1e9, "scale the loss, so that its gradients have a norm of about 1"
)
# A larger delta would allow a client to publish one example in ten.
DELTA = NumberRange(1e-12, 0.1, "a value well below 1/num_examples is usual")
EPSILON = NumberRange(
    math.ulp(0.0), 1e12, "a budget is a number, and one above 10 protects little"
)
SAMPLING_RATE = NumberRange(1e-12, 1.0, "it is the share of the examples in a batch")

# More examples than any client holds; b/m is then not below the least sampling rate.
MAX_EXAMPLES = 10**12
# More steps, over all runs, than any client takes.
MAX_STEPS = 10**9


def check_delta(delta: float) -> float:
    """Return a delta that can be accounted for, or refuse it."""
    return DELTA.check("delta", delta)


def check_steps(steps: int) -> int:
    """Return a number of steps (T) that can be accounted for, or refuse it."""
    if isinstance(steps, bool) or not isinstance(steps, Integral):
        raise ValueError(f"steps={steps!r} must be an integer")
    if not 0 <= steps <= MAX_STEPS:
        raise ValueError(f"steps={shorten_value(steps)} must lie in [0, {MAX_STEPS}]")
    return int(steps)
