"""What a check found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "warning", "failed"]


@dataclass(frozen=True)
class Check:
    """One line of the examination: what was looked at, and what was found."""

    name: str
    verdict: Verdict
    finding: str


def fit_to_join(checks: list[Check]) -> bool:
    """Whether nothing failed."""
    return all(check.verdict != "failed" for check in checks)
