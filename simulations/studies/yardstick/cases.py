"""The runs of the yardstick, and what its paper reports.

Xiang, Wang, Lin, Wang: "Practical Differentially Private and Byzantine-resilient
Federated Learning", SIGMOD 2023, whose raw results are public.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from simulations.data.files import fashion_mnist

# Their epsilon, of Renyi accounting for Poisson batches and one example added or
# removed, and our noise multiplier for it: half of their noise, which counts in C/b.
NOISES = {0.125: 2.3054, 0.25: 1.2856, 0.5: 0.7592, 1.0: 0.5169, 2.0: 0.3961}
# Final test accuracies by epsilon: without an attack, and 13 adversaries among 33.
PUBLISHED = {
    "no attack": (0.703, 0.749, 0.775, 0.790, 0.800),
    "label flip": (0.705, 0.748, 0.776, 0.792, 0.801),
    'their "local" attack': (0.694, 0.735, 0.760, 0.775, 0.784),
}
# A search over thousands of candidates in every step is for small federations: here
# colluders consider the four honest clients that are nearest to where they want to go,
# and eight scales, in every fiftieth step; in between how far to go, the rest held.
_FEWER = [
    "+attack.places=4",
    "+attack.scales=[0.25,0.5,1.0,1.5,2.0,3.0,4.0,6.0]",
    "+attack.every=50",
]
ATTACKS: dict[str, list[str]] = {
    "no attack": ["attack=none", "num_nodes=20", "num_malicious_nodes=0"],
    "label flip": ["attack=label-flip"],
    "mimic-shift": ["attack=mimic-shift", *_FEWER],
    "strongest": ["attack=strongest", *_FEWER],
}
RULES = {"SMEA": "smea", "Filter": "filter"}
# Of the server at epsilon = 2; as in the paper it falls as the noise grows.
LEARNING_RATE = 0.5
SEEDS = (1, 2, 3)


@dataclass(frozen=True)
class Case:
    """One run; without an attack all rules are the average."""

    epsilon: float
    rule: str
    attack: str
    seed: int

    @property
    def name(self) -> str:
        """Name of the run's file, without suffix."""
        words = (f"epsilon{self.epsilon:g}", self.rule, self.attack, f"seed{self.seed}")
        return "_".join(word.replace(" ", "-") for word in words)

    @property
    def overrides(self) -> list[str]:
        """What makes the run of the packaged configuration."""
        noise = NOISES[self.epsilon]
        rate = LEARNING_RATE * NOISES[2.0] / noise
        rule = "average" if self.attack == "no attack" else RULES[self.rule]
        chosen = [
            "experiment=yardstick",
            f"aggregation={rule}",
            f"privacy.plan.noise_multiplier={noise:g}",
            f"server_learning_rate={rate:.4g}",
            f"seed={self.seed}",
            *ATTACKS[self.attack],
        ]
        folder = fashion_mnist()
        return chosen if folder is None else [*chosen, f"data.path={folder}"]


def cases(
    epsilons: Sequence[float],
    rules: Sequence[str],
    attacks: Sequence[str],
    seeds: Sequence[int],
) -> Iterator[Case]:
    """Yield the runs, the quick ones first, seed by seed."""
    for attack in attacks:
        for seed in seeds:
            for epsilon in epsilons:
                # Nobody attacks, so there is nothing for another rule to do.
                for rule in rules[:1] if attack == "no attack" else rules:
                    yield Case(epsilon, rule, attack, seed)
