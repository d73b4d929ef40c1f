"""The outcomes of a series of requests to a node or a ledger."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """One request and its outcome.

    Attributes
    ----------
    request : str
    result : str
        Such as "refused" or "answered".
    broken : str
        The promise that was broken, or empty.
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
        """The outcomes that broke a promise."""
        return [case for case in self.cases if case.broken]

    def count_results(self) -> dict[str, int]:
        """Return how often each result occurred."""
        return dict(sorted(Counter(case.result for case in self.cases).items()))
