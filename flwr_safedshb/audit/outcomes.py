"""What an attack by single requests found: one outcome for each request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """One request, and what came of it.

    Attributes
    ----------
    request : str
    result : str
        Such as "refused" or "answered".
    broken : str
        The promise that it breaks, or empty.
    """

    request: str
    result: str
    broken: str = ""


@dataclass(frozen=True)
class Outcomes:
    """The outcomes of all requests of one kind."""

    cases: Sequence[Outcome]

    @property
    def broken(self) -> list[Outcome]:
        """Those that break a promise."""
        return [case for case in self.cases if case.broken]

    def count_results(self) -> dict[str, int]:
        """Return how often each result came."""
        return dict(sorted(Counter(case.result for case in self.cases).items()))
