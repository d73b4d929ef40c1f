"""The runs of the reproduction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

REGIMES = ("low", "moderate", "high")
PAPER_ATTACKS = ("alie", "foe", "sign-flip", "label-flip")
OWN_ATTACKS = ("mimic-shift", "strongest")
ATTACKS = PAPER_ATTACKS + OWN_ATTACKS
# The paper's two, then what it does not have.
PAPER_RULES = ("smea", "filter-literal")
OWN_RULES = ("filter",)
BENCHMARK = "dp-dsgd"
SEEDS = (1, 2, 3, 4, 5)


@dataclass(frozen=True)
class Case:
    """One run of the reproduction; `attack` is None for DP-DSGD."""

    regime: str
    method: str
    attack: str | None
    seed: int

    @property
    def name(self) -> str:
        """Name of the run's file, without suffix."""
        parts = (self.regime, self.method, self.attack, f"seed{self.seed}")
        return "_".join(part for part in parts if part)

    @property
    def overrides(self) -> list[str]:
        """What makes the run of the packaged configuration."""
        where = [f"privacy={self.regime}", f"seed={self.seed}"]
        if self.attack is None:
            return [f"experiment={BENCHMARK}", *where]
        attacked = [f"aggregation={self.method}", f"attack={self.attack}"]
        return ["experiment=paper", *attacked, *where]


def cases(
    regimes: Sequence[str] = REGIMES, seeds: Sequence[int] = SEEDS
) -> Iterator[Case]:
    """Yield all runs; the paper's come before those that it does not have."""
    everywhere = [(regime, seed) for regime in regimes for seed in seeds]
    for regime, seed in everywhere:
        yield Case(regime, BENCHMARK, None, seed)
        for attack in PAPER_ATTACKS:
            for rule in PAPER_RULES:
                yield Case(regime, rule, attack, seed)
    for regime, seed in everywhere:
        for attack in ATTACKS:
            for rule in (*PAPER_RULES, *OWN_RULES):
                if attack in OWN_ATTACKS or rule in OWN_RULES:
                    yield Case(regime, rule, attack, seed)
