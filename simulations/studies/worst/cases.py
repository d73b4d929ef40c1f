"""A grid of settings on the paper's task, each under several attacks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from simulations.results.summary import ATTACK_WORDS

RULES = ("smea", "filter", "trimmed-mean", "geometric-median")
ATTACKS = tuple(ATTACK_WORDS)
SEEDS = (1, 2, 3, 4, 5)


@dataclass(frozen=True)
class Setting:
    """What is chosen before a training; `alpha` is 0 for shares at random."""

    rule: str
    malicious: int
    nodes: int
    noise: float
    alpha: float
    rate: float
    momentum: float

    @property
    def federation(self) -> tuple[int, int, float, float]:
        """What nobody chooses: who takes part, and what privacy they ask for."""
        return self.malicious, self.nodes, self.noise, self.alpha

    @property
    def words(self) -> str:
        """The setting in a table."""
        alike = "iid" if not self.alpha else f"Dirichlet {self.alpha:g}"
        return (
            f"f = {self.malicious} of {self.nodes}, noise {self.noise:g}, {alike}, "
            f"rate {self.rate:g}, momentum {self.momentum:g}"
        )


@dataclass(frozen=True)
class Case:
    """A run: a setting under an attack."""

    setting: Setting
    attack: str
    seed: int

    @property
    def name(self) -> str:
        """Name of the run's file, without suffix."""
        it = self.setting
        parts = [it.rule, f"f{it.malicious}of{it.nodes}", f"noise{it.noise:g}"]
        parts += [f"alpha{it.alpha:g}", f"rate{it.rate:g}", f"beta{it.momentum:g}"]
        return "_".join([*parts, self.attack, f"seed{self.seed}"])

    @property
    def overrides(self) -> list[str]:
        """What makes the run of the packaged configuration."""
        it = self.setting
        alpha = ["split=dirichlet", f"split.alpha={it.alpha:g}"]
        return [
            "experiment=paper",
            f"aggregation={it.rule}",
            f"attack={self.attack}",
            f"num_nodes={it.nodes}",
            f"num_malicious_nodes={it.malicious}",
            f"privacy.plan.noise_multiplier={it.noise:g}",
            f"server_learning_rate={it.rate:g}",
            f"momentum={it.momentum:g}",
            *(alpha if it.alpha else ["split=iid"]),
            f"seed={self.seed}",
        ]


def settings(
    rules: Sequence[str],
    malicious: Sequence[int],
    nodes: int,
    noises: Sequence[float],
    alphas: Sequence[float],
    rates: Sequence[float],
    momentums: Sequence[float],
) -> list[Setting]:
    """Return all combinations."""
    grid = product(rules, malicious, [nodes], noises, alphas, rates, momentums)
    return [Setting(*values) for values in grid]


def cases(
    chosen: Sequence[Setting], attacks: Sequence[str], seeds: Sequence[int]
) -> Iterator[Case]:
    """Yield all runs, seed by seed."""
    for seed in seeds:
        for setting in chosen:
            for attack in attacks:
                yield Case(setting, attack, seed)
