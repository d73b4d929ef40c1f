"""What is run beyond the paper: five parts, each a question of its own."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from simulations.config import composed
from simulations.data.files import fashion_mnist

ATTACKS = ("alie", "foe", "sign-flip", "label-flip", "mimic-shift", "strongest")
UNHARMED = "unharmed"
FEW = ("smea", "filter", "average")
EVERY = (
    "smea",
    "filter",
    "caf",
    "mda",
    "krum",
    "multi-krum",
    "trimmed-mean",
    "median",
    "geometric-median",
    "nnm",
    "bucketing",
    "centred-clipping",
    "arc",
    "static-clipping",
    "average",
)
# Adversaries among clients, from a tenth to three sevenths of them.
FRACTIONS = ((1, 10), (2, 10), (3, 10), (4, 10), (3, 7))


@dataclass(frozen=True)
class Part:
    """Rules against attacks in some settings.

    Attributes
    ----------
    title, question : str
    overrides : tuple of str
        Of all runs.
    rules : tuple of str
        Names of ``conf/aggregation``.
    attacks : tuple of str
    search : tuple of str
        Overrides of attacked runs: how much the adversaries search.
    settings : mapping of words to overrides
        Panels are attacks times these.
    """

    title: str
    question: str
    overrides: tuple[str, ...]
    rules: tuple[str, ...] = FEW
    attacks: tuple[str, ...] = ATTACKS
    search: tuple[str, ...] = ()
    settings: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: {"": ()})


PARTS = {
    "rules": Part(
        "Other rules on the same momentums",
        "The paper's task at moderate privacy, 3 adversaries among 7 clients: what do "
        "the rules that everybody knows do with the very same messages? (The trimmed "
        "mean of 7 less 2 x 3 values is the median.)",
        ("experiment=paper", "privacy=moderate"),
        rules=(
            "smea",
            "filter",
            "average",
            "krum",
            "multi-krum",
            "trimmed-mean",
            "median",
            "geometric-median",
        ),
    ),
    "fractions": Part(
        "Every rule, as adversaries grow in number",
        "The paper's task at low privacy, 200 steps, under the strongest attack that "
        "the adversaries find for each rule; clients that are alike, and clients who "
        "share each label by a Dirichlet distribution with alpha = 1.",
        ("experiment=paper", "steps=200"),
        search=("+attack.places=2",),
        rules=EVERY,
        attacks=("strongest",),
        settings={
            f"f = {f} of {n}, {words}": (
                f"num_nodes={n}",
                f"num_malicious_nodes={f}",
                split,
            )
            for words, split in (("iid", "split=iid"), ("unlike", "split=dirichlet"))
            for f, n in FRACTIONS
        },
    ),
    "heterogeneity": Part(
        "Clients that differ",
        "The paper's task at low privacy, 2 adversaries among 10 clients, each label "
        "shared out by a Dirichlet distribution: small alpha, very different clients.",
        ("experiment=heterogeneous",),
        rules=("smea", "filter"),
        attacks=("alie", "label-flip", "strongest"),
        settings={f"alpha = {a}": (f"split.alpha={a}",) for a in (0.1, 1, 10)},
    ),
    "large": Part(
        "A larger federation",
        "The paper's task at moderate privacy, 10 adversaries among 50 clients, 100 "
        "steps. SMEA looks for the best of 10^10 subsets.",
        ("experiment=large",),
    ),
    "network": Part(
        "A network",
        "Fashion-MNIST, a convolutional network with 26,090 weights, 3 adversaries "
        "among 10 clients, 100 steps at low privacy.",
        ("experiment=fashion",),
    ),
}


@dataclass(frozen=True)
class Case:
    """One run; `attack` is None where nobody attacks."""

    part: str
    setting: str
    method: str
    attack: str | None
    seed: int

    @property
    def name(self) -> str:
        """Name of the run's file, without suffix."""
        setting = self.setting.replace(" = ", "").replace(", ", "-").replace(" ", "-")
        parts = (self.part, setting, self.method, self.attack, f"seed{self.seed}")
        return "_".join(part for part in parts if part)

    @property
    def overrides(self) -> list[str]:
        """What makes the run of the packaged configuration."""
        part = PARTS[self.part]
        chosen = [*part.overrides, *part.settings[self.setting], f"seed={self.seed}"]
        if self.part == "network" and (folder := fashion_mnist()) is not None:
            chosen.append(f"data.path={folder}")
        if self.attack is None:
            return _unharmed(chosen)
        attack = [f"attack={self.attack}", *part.search]
        return [*chosen, f"aggregation={self.method}", *attack]


def _unharmed(chosen: Sequence[str]) -> list[str]:
    """Return the run of the honest clients alone, averaged."""
    cfg = composed(shlex.join(chosen))
    counts = ("num_nodes=", "num_malicious_nodes=")
    kept = [override for override in chosen if not override.startswith(counts)]
    honest = f"num_nodes={cfg.num_nodes - cfg.num_malicious_nodes}"
    alone = [honest, "num_malicious_nodes=0", "attack=none"]
    return [*kept, "aggregation=average", *alone]


def cases(names: Sequence[str], seeds: Sequence[int]) -> Iterator[Case]:
    """Yield the runs of some parts."""
    for name in names:
        part = PARTS[name]
        for seed in seeds:
            for setting in part.settings:
                yield Case(name, setting, UNHARMED, None, seed)
                for attack in part.attacks:
                    for rule in part.rules:
                        yield Case(name, setting, rule, attack, seed)
