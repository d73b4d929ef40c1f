"""An error by its causes: privacy, robustness, both together, and chance."""

import math
from dataclasses import dataclass
from typing import Literal

Term = Literal["privacy", "both", "robustness"]


@dataclass(frozen=True)
class Trilemma:
    """An error by its causes.

    Attributes
    ----------
    privacy : float
        What noise costs without adversaries; grows with the dimension.
    both : float
        What adversaries hide in the noise beyond that.
    robustness : float
        What adversaries hide among honest clients that differ.
    sampling : float
        What the choice of batches adds; no part of the trilemma, and 0 where all
        examples are used.
    """

    privacy: float
    both: float
    robustness: float
    sampling: float = 0.0

    @property
    def terms(self) -> dict[Term, float]:
        """The three of the trilemma by name."""
        return {
            "privacy": self.privacy,
            "both": self.both,
            "robustness": self.robustness,
        }

    @property
    def dominant(self) -> Term:
        """The largest; of equal ones the first."""
        terms = self.terms
        return max(terms, key=lambda name: terms[name])

    @property
    def dominance(self) -> float:
        """How many times the second largest the largest is."""
        *_, second, first = sorted(self.terms.values())
        return first / second if second > 0.0 else math.inf

    @property
    def total(self) -> float:
        """The sum."""
        return self.privacy + self.both + self.robustness + self.sampling

    @property
    def combined(self) -> float:
        """The square of the sum of the roots: of errors that may point the same way."""
        causes = (*self.terms.values(), self.sampling)
        return sum(map(math.sqrt, causes)) ** 2
