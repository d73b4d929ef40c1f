"""What an attack by single requests found: one case for each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One request, and what came of it.

    Attributes
    ----------
    request : str
    outcome : str
        Such as "refused" or "answered".
    broken : str
        Which promise it breaks, or empty.
    """

    request: str
    outcome: str
    broken: str = ""


@dataclass(frozen=True)
class Cases:
    """All requests of one kind.

    Attributes
    ----------
    kind : str
    cases : sequence of Case
    """

    kind: str
    cases: Sequence[Case]

    @property
    def broken(self) -> list[Case]:
        """Those that break a promise."""
        return [case for case in self.cases if case.broken]

    @property
    def holds(self) -> bool:
        """Whether all promises were kept."""
        return not self.broken

    def outcomes(self) -> dict[str, int]:
        """Return how often each outcome came."""
        found: dict[str, int] = {}
        for case in self.cases:
            found[case.outcome] = found.get(case.outcome, 0) + 1
        return dict(sorted(found.items()))

    def to_dict(self) -> dict[str, object]:
        """Return what a report holds of it."""
        return {
            "kind": self.kind,
            "requests": len(self.cases),
            "outcomes": self.outcomes(),
            "broken": [vars(case) for case in self.broken],
            "holds": self.holds,
        }
