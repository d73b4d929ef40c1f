"""The federations that are tried, and the runs of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

# Clients and adversaries: from a tenth to three sevenths of them.
FEDERATIONS = ((10, 1), (9, 1), (7, 1), (5, 1), (9, 2), (7, 2), (5, 2), (7, 3))
NOISES = (0.5, 1.0, 2.0, 4.0)
MOMENTUMS = (0.99, 0.95)
# Clients whose shares of the labels differ are tried with less noise.
ALPHA = 10.0
FEW_NOISES = (0.5, 1.0)


@dataclass(frozen=True)
class Setting:
    """A federation on the paper's task; `alpha` is None for shares at random."""

    n: int
    f: int
    noise: float
    momentum: float
    alpha: float | None = None

    @property
    def words(self) -> str:
        """Name of the setting."""
        alike = "" if self.alpha is None else f"-dirichlet{self.alpha:g}"
        return f"n{self.n}-f{self.f}-noise{self.noise:g}-beta{self.momentum:g}{alike}"

    @property
    def overrides(self) -> list[str]:
        """What makes both runs of the packaged configuration."""
        split = "iid" if self.alpha is None else "dirichlet"
        alpha = [] if self.alpha is None else [f"split.alpha={self.alpha:g}"]
        noise = f"privacy.plan.noise_multiplier={self.noise:g}"
        momentum = f"momentum={self.momentum:g}"
        return ["experiment=paper", f"split={split}", *alpha, noise, momentum]


@dataclass(frozen=True)
class Case:
    """A run of a setting: attacked, or of its honest clients alone."""

    setting: Setting
    attacked: bool
    seed: int

    @property
    def name(self) -> str:
        """Name of the run's file, without suffix."""
        how = "strongest" if self.attacked else "unharmed"
        return f"{self.setting.words}_{how}_seed{self.seed}"

    @property
    def overrides(self) -> list[str]:
        """What makes the run of the packaged configuration."""
        n, f = self.setting.n, self.setting.f
        if self.attacked:
            who = [f"num_nodes={n}", f"num_malicious_nodes={f}"]
            how = ["aggregation=smea", "attack=strongest"]
        else:
            who = [f"num_nodes={n - f}", "num_malicious_nodes=0"]
            how = ["aggregation=average", "attack=none"]
        return [*self.setting.overrides, *who, *how, f"seed={self.seed}"]


def settings() -> list[Setting]:
    """Return all settings, those that take longest first."""
    alike = [
        Setting(n, f, noise, momentum)
        for n, f in FEDERATIONS
        for noise in NOISES
        for momentum in MOMENTUMS
    ]
    differ = [
        Setting(n, f, noise, MOMENTUMS[0], ALPHA)
        for n, f in FEDERATIONS
        for noise in FEW_NOISES
    ]
    return sorted((*alike, *differ), key=lambda it: -it.n)


def cases(chosen: Sequence[Setting], seeds: Sequence[int]) -> Iterator[Case]:
    """Yield both runs of each setting and seed."""
    for setting in chosen:
        for seed in seeds:
            for attacked in (True, False):
                yield Case(setting, attacked, seed)
