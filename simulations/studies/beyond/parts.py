"""What is run beyond the paper: four parts, each a question of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from simulations.data.files import DEBIAN_FASHION_MNIST

ATTACKS = ("alie", "foe", "sign-flip", "label-flip")
UNHARMED = "unharmed"
FEW = ("smea", "filter", "average")
MISSING_DATA = (
    "Fashion-MNIST is not here: the part 'network' is left out. Install Debian's "
    "package dataset-fashion-mnist (apt-get install dataset-fashion-mnist), or put its "
    "four IDX files into the folder fashion-mnist under $SAFEDSHB_DATA."
)


@dataclass(frozen=True)
class Part:
    """Rules against attacks in some settings.

    Attributes
    ----------
    title, question : str
    overrides : tuple of str
        Of all runs.
    honest : int
        n - f: who trains where nobody attacks.
    rules : tuple of str
        Names of ``conf/aggregation``.
    attacks : tuple of str
    settings : mapping of words to overrides
        Panels are attacks times these.
    """

    title: str
    question: str
    overrides: tuple[str, ...]
    honest: int
    rules: tuple[str, ...] = FEW
    attacks: tuple[str, ...] = ATTACKS
    settings: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: {"": ()})


PARTS = {
    "rules": Part(
        "Other rules on the same momentums",
        "The paper's task at moderate privacy, 3 adversaries among 7 clients: what do "
        "the rules that everybody knows do with the very same messages? (The trimmed "
        "mean of 7 less 2 x 3 values is the median.)",
        ("experiment=paper", "privacy=moderate"),
        honest=4,
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
    "heterogeneity": Part(
        "Clients that differ",
        "The paper's task at low privacy, 2 adversaries among 10 clients, each label "
        "shared out by a Dirichlet distribution: small alpha, very different clients.",
        ("experiment=heterogeneous",),
        honest=8,
        rules=("smea", "filter"),
        attacks=("alie", "label-flip"),
        settings={f"alpha = {a}": (f"split.alpha={a}",) for a in (0.1, 1, 10)},
    ),
    "large": Part(
        "A larger federation",
        "The paper's task at moderate privacy, 10 adversaries among 50 clients, 100 "
        "steps. SMEA looks for the best of 10^10 subsets.",
        ("experiment=large",),
        honest=40,
    ),
    "network": Part(
        "A network",
        "Fashion-MNIST, a convolutional network with 26,090 weights, 3 adversaries "
        "among 10 clients, 100 steps at low privacy.",
        ("experiment=fashion",),
        honest=7,
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
        setting = self.setting.replace(" = ", "")
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
            nodes = [f"num_nodes={part.honest}", "num_malicious_nodes=0"]
            return [*chosen, "aggregation=average", "attack=none", *nodes]
        return [*chosen, f"aggregation={self.method}", f"attack={self.attack}"]


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


def fashion_mnist() -> Path | None:
    """Return the folder of Fashion-MNIST's files, if there is one."""
    folders = [Path(DEBIAN_FASHION_MNIST)]
    if "SAFEDSHB_DATA" in os.environ:
        folders.insert(0, Path(os.environ["SAFEDSHB_DATA"]) / "fashion-mnist")
    for folder in folders:
        if any(folder.glob("train-images-idx3-ubyte*")):
            return folder.absolute()
    return None
