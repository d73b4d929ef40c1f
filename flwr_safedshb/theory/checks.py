"""Refusals that name the argument, its value and its bound."""

import math


def check_positive(**values: float) -> None:
    """Refuse values that are not finite or not above 0."""
    for name, value in values.items():
        if not 0.0 < value < math.inf:
            raise ValueError(f"{name}={value} must be finite and above 0")


def check_not_negative(**values: float) -> None:
    """Refuse values that are not finite or below 0."""
    for name, value in values.items():
        if not 0.0 <= value < math.inf:
            raise ValueError(f"{name}={value} must be finite and at least 0")


def check_delta(delta: float) -> None:
    """Refuse a delta outside (0, 1)."""
    if not 0.0 < delta < 1.0:
        raise ValueError(f"delta={delta} must lie in (0, 1)")


def check_momentum(momentum: float) -> None:
    """Refuse a beta outside [0, 1)."""
    if not 0.0 <= momentum < 1.0:
        raise ValueError(f"momentum={momentum} must lie in [0, 1)")


def check_batch(b: int, m: int) -> None:
    """Refuse a batch size b that m examples cannot fill."""
    check_positive(b=b, m=m)
    if b > m:
        raise ValueError(f"b={b} must be at most m={m}; lower it or add examples")
