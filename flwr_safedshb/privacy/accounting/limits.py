"""What can be accounted for; kept apart because the accountants are slow to import."""

from __future__ import annotations

from numbers import Integral

# Below it the rounding of the Fourier transforms would be part of the answer.
MIN_DELTA = 1e-12


def checked_steps(steps: int) -> int:
    """Return a count of steps (T), or say what is wrong with it."""
    if isinstance(steps, bool) or not isinstance(steps, Integral) or steps < 0:
        raise ValueError(f"steps={steps!r} must be an integer of at least 0")
    return int(steps)


def checked_delta(delta: float) -> float:
    """Return a delta that can be accounted for, or say what is wrong with it."""
    if not MIN_DELTA <= delta < 1:
        raise ValueError(
            f"delta={delta} must lie in [{MIN_DELTA:g}, 1); "
            "a value well below 1/num_examples is usual"
        )
    return float(delta)
