"""Adversaries who behave well until it counts.

A run that returns the mean of its last models forgets what was done to the earlier
ones. So these spend nothing of the trust that a rule may have in them before: they copy
honest clients, and attack in the steps that count.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from flwr_safedshb.aggregation.rule import FloatArray
from flwr_safedshb.attacks import Attack
from flwr_safedshb.attacks.base import Aggregate


@dataclass(frozen=True)
class Sleeper(Attack):
    """Send what honest clients send for some rounds, and then another attack.

    Attributes
    ----------
    asleep : int
        Rounds.
    awake : Attack
    """

    asleep: int
    awake: Attack
    _rounds: list[None] = field(default_factory=list, compare=False, repr=False)

    def craft_vectors(
        self, honest: FloatArray, f: int, rng: np.random.Generator, aggregate: Aggregate
    ) -> FloatArray:
        """Return copies of honest vectors, or what the other attack returns."""
        self._rounds.append(None)
        if len(self._rounds) <= self.asleep:
            return honest[np.arange(f) % len(honest)]
        return self.awake.craft_vectors(honest, f, rng, aggregate)
