"""A PLD accountant for Flower's own strategies with central differential privacy.

``DifferentialPrivacyServerSideFixedClipping(..., accountant=PLDAccountant(config))``
gives the epsilon of composed privacy loss distributions in place of Renyi's. The unit
is a client, not an example; the mathematics is the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, cast

from flwr.serverapp import (
    GaussianPrivacyEvent,
    PrivacyConfig,
    PrivacySpent,
    SamplingMethod,
)

from flwr_safedshb.privacy.accounting import accountant
from flwr_safedshb.privacy.accounting.ranges import DELTA
from flwr_safedshb.privacy.plan import PrivacyPlan

_METHOD = "pld"
# `get_delta` stops once its bracket is narrower than this ratio.
_PRECISION = 1.0 + 1e-3


class PLDAccountant:
    """Flower's `PrivacyAccountant` protocol, by composed privacy loss distributions.

    Parameters
    ----------
    config : PrivacyConfig
        The delta, the number of clients, how they are sampled, and a limit.
    """

    def __init__(self, config: PrivacyConfig) -> None:
        self._config = config
        self._releases: list[tuple[GaussianPrivacyEvent, int]] = []

    @property
    def config(self) -> PrivacyConfig:
        """Return the privacy configuration."""
        return self._config

    @property
    def num_releases(self) -> int:
        """Return the number of composed private releases."""
        return sum(count for _, count in self._releases)

    def compose(self, event: GaussianPrivacyEvent, count: int = 1) -> None:
        """Compose one or more identical privacy events."""
        self._make_plan(event)
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"count={count!r} must be an integer of at least 1")
        self._releases.append((event, count))

    def get_epsilon(self, delta: float) -> float:
        """Return cumulative epsilon at the supplied delta."""
        return self._compute_epsilon(self._releases, delta)

    def get_delta(self, epsilon: float) -> float:
        """Return a cumulative delta that holds at the supplied epsilon.

        It is found by bisection: at most a thousandth above the least one, never below
        1e-12, and 1 where the least one is above a tenth.
        """
        if not epsilon >= 0.0:
            raise ValueError(f"epsilon={epsilon} must be at least 0")
        if not self._releases:
            return 0.0
        low, high = DELTA.least, DELTA.greatest
        if self.get_epsilon(low) <= epsilon:
            return low
        if self.get_epsilon(high) > epsilon:
            return 1.0
        while high > low * _PRECISION:
            middle = math.sqrt(low * high)
            if self.get_epsilon(middle) <= epsilon:
                high = middle
            else:
                low = middle
        return high

    def get_privacy_spent(self, delta: float | None = None) -> PrivacySpent:
        """Return cumulative privacy expenditure."""
        delta = self._config.target_delta if delta is None else delta
        return PrivacySpent(self.get_epsilon(delta), delta, self.num_releases, _METHOD)

    def would_exceed(
        self,
        event: GaussianPrivacyEvent,
        max_epsilon: float | None = None,
        count: int = 1,
    ) -> bool:
        """Return whether composing an event would exceed an epsilon limit."""
        limit = self._config.max_epsilon if max_epsilon is None else max_epsilon
        if limit is None:
            raise ValueError("give max_epsilon here, or in the PrivacyConfig")
        ahead = [*self._releases, (event, count)]
        return self._compute_epsilon(ahead, self._config.target_delta) > limit

    def state_dict(self) -> dict[str, object]:
        """Return serializable accountant state."""
        releases = [{"event": asdict(e), "count": count} for e, count in self._releases]
        return {
            "backend": _METHOD,
            "config": self._write_config(),
            "releases": releases,
        }

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Restore serializable accountant state."""
        if (
            state.get("backend") != _METHOD
            or state.get("config") != self._write_config()
        ):
            raise ValueError(
                f"the state is of backend {state.get('backend')!r} and config "
                f"{state.get('config')}, not of {_METHOD!r} and {self._write_config()}"
            )
        restored = PLDAccountant(self._config)
        for release in cast(list[Mapping[str, Any]], state["releases"]):
            event = GaussianPrivacyEvent(**release["event"])
            restored.compose(event, release["count"])
        self._releases = restored._releases

    def _write_config(self) -> dict[str, object]:
        return {
            name: getattr(value, "value", value)
            for name, value in asdict(self._config).items()
        }

    def _compute_epsilon(
        self, releases: list[tuple[GaussianPrivacyEvent, int]], delta: float
    ) -> float:
        if not releases:
            return 0.0
        charges = [(self._make_plan(event), count) for event, count in releases]
        return accountant.compute_epsilon(charges, delta)

    def _make_plan(self, event: GaussianPrivacyEvent) -> PrivacyPlan:
        """Return the plan over examples that costs as much as an event over clients."""
        size = self._config.population_size
        if event.population_size != size:
            raise ValueError(
                f"the event's population_size={event.population_size} must be the "
                f"config's, {size}"
            )
        # Flower's multiplier is the noise in the sum of the clipped updates over C.
        # A plan's is the noise over 2C, whatever the sampler and the adjacency.
        noise = event.noise_multiplier / 2.0
        method = self._config.sampling_method
        if method is SamplingMethod.WITHOUT_REPLACEMENT:
            return PrivacyPlan(1.0, noise, event.sample_size, size, "fixed")
        if method is SamplingMethod.NO_AMPLIFICATION:
            # Flower takes the mean over a fixed number of replies: whoever leaves is
            # replaced, and the sum moves by 2C.
            return PrivacyPlan(1.0, noise, size, size, "whole")
        batch = event.sample_size
        return PrivacyPlan(1.0, noise, batch, size, "poisson", "add-remove")
