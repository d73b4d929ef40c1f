"""Which runs answer what a federation asks: three parts, each a table of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from simulations.data.files import fashion_mnist

FASHION = "Fashion-MNIST"
NOBODY = "nobody"
ATTACK_WORDS = {
    NOBODY: "nobody",
    "alie": "ALIE",
    "foe": "FOE",
    "mimic-shift": "a shifted copy of a client",
    "strongest": "the strongest that we ship",
    "drift": "the same push in every step",
    "sleeper": "the same push, in the last half alone",
}
Overrides = tuple[str, ...]
_UNEQUAL = ("experiment=paper", "split=unequal", "privacy.target_epsilon=2")


@dataclass(frozen=True)
class Part:
    """Rows of settings and attacks, against columns of what is compared.

    Attributes
    ----------
    title, question : str
    rows : mapping of words to overrides
    attacks : tuple of str
        Each row once for every one of them.
    columns : mapping of words to overrides
    """

    title: str
    question: str
    rows: Mapping[str, Overrides]
    attacks: tuple[str, ...]
    columns: Mapping[str, Overrides]


PARTS = {
    "local-steps": Part(
        "Fewer rounds",
        "The same T private steps of every node, and so the same epsilon, in T/K "
        "rounds. The paper's task (T = 400, 3 adversaries among 7); nodes that hold "
        "different shares of the labels (alpha = 1, 2 among 10); a network on "
        "Fashion-MNIST (T = 100, 3 among 10).",
        {
            "paper, low privacy": ("experiment=paper", "privacy=low"),
            "paper, high privacy": ("experiment=paper", "privacy=high"),
            "heterogeneous": ("experiment=heterogeneous",),
            FASHION: ("experiment=fashion",),
        },
        (NOBODY, "foe", "mimic-shift"),
        {f"K = {k}": (f"local_steps={k}",) for k in (1, 2, 5, 10)},
    ),
    "average": Part(
        "The mean of the last half",
        "The paper's task, 3 adversaries among 7: the last model, and the mean of the "
        "last 200, of the same runs. The last two attacks aim at the mean: pushes the "
        "same way do not even out, and sleepers attack only models that count.",
        {"low privacy": ("privacy=low",), "high privacy": ("privacy=high",)},
        ("foe", "alie", "mimic-shift", "strongest", "drift", "sleeper"),
        {
            rule: ("experiment=paper", f"aggregation={rule}", "output=average")
            for rule in ("smea", "filter")
        },
    ),
    "unequal": Part(
        "Unequal nodes",
        "The paper's task, honest nodes with 50, 500, 500, 5000 and 5000 examples, "
        "each with the noise that leaves it at epsilon 2, and one adversary; and the "
        "same without the small node.",
        {
            "with the small node": ("num_nodes=6", *_UNEQUAL),
            "without it": (
                "num_nodes=5",
                *_UNEQUAL,
                "split.sizes=[500,500,5000,5000]",
            ),
        },
        (NOBODY, "foe", "mimic-shift"),
        {
            rule: ("num_malicious_nodes=1", f"aggregation={rule}")
            for rule in ("smea", "filter", "geometric-median", "average")
        },
    ),
}


@dataclass(frozen=True)
class Case:
    """One run: where it stands in the table of its part, and its seed."""

    part: str
    row: str
    attack: str
    column: str
    seed: int

    @property
    def name(self) -> str:
        """Name of the run's file, without suffix."""
        words = (self.part, self.row, self.attack, self.column, f"seed{self.seed}")
        joined = "_".join(words).lower()
        return "".join(c if c.isalnum() or c in "_-" else "-" for c in joined)

    @property
    def overrides(self) -> list[str]:
        """What makes the run of the packaged configuration."""
        part = PARTS[self.part]
        chosen = [*part.rows[self.row], *part.columns[self.column]]
        attack = "none" if self.attack == NOBODY else self.attack
        chosen += [f"attack={attack}", f"seed={self.seed}"]
        if self.part == "unequal" and self.attack == NOBODY:
            # Nobody is hostile, but the server expects one: the sizes are the honest's.
            chosen = [_one_less(each) for each in chosen]
        if self.row == FASHION and (folder := fashion_mnist()) is not None:
            chosen.append(f"data.path={folder}")
        return chosen


def _one_less(override: str) -> str:
    name, _, value = override.partition("=")
    return f"{name}={int(value) - 1}" if name == "num_nodes" else override


def cases(names: Sequence[str], seeds: Sequence[int]) -> Iterator[Case]:
    """Yield the runs of some parts, the seeds one after the other."""
    there = fashion_mnist() is not None
    for seed in seeds:
        for name in names:
            part = PARTS[name]
            for row in part.rows:
                if row == FASHION and not there:
                    continue
                for attack in part.attacks:
                    for column in part.columns:
                        yield Case(name, row, attack, column, seed)
