"""Refusals that name the argument, its value and its bound."""

import math


def positive(**values: float) -> None:
    """Refuse values that are not finite or not above 0."""
    for name, value in values.items():
        if not 0.0 < value < math.inf:
            raise ValueError(f"{name}={value} must be finite and above 0")


def not_negative(**values: float) -> None:
    """Refuse values that are not finite or below 0."""
    for name, value in values.items():
        if not 0.0 <= value < math.inf:
            raise ValueError(f"{name}={value} must be finite and at least 0")


def probability(**values: float) -> None:
    """Refuse values outside (0, 1)."""
    for name, value in values.items():
        if not 0.0 < value < 1.0:
            raise ValueError(f"{name}={value} must lie in (0, 1)")


def batch(b: int, m: int) -> None:
    """Refuse a batch of b that cannot be drawn from m examples."""
    positive(b=b, m=m)
    if b > m:
        raise ValueError(f"b={b} must be at most m={m}; lower it or add examples")
