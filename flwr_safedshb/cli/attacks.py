"""List the attacks that a simulation can give to adversaries.

Hostile clients first see what the honest ones send, and then choose what they send
themselves. To attack a Flower strategy, give an attack to `AdversarialGrid`. In the
experiments of the repository write `attack=alie`.

For example:
  safedshb attacks
  safedshb attacks --json         with the options and their defaults
"""

from __future__ import annotations

import argparse
import inspect
import json
from collections.abc import Iterator
from dataclasses import dataclass, fields

from flwr_safedshb.cli._listing import find_classes, print_table


@dataclass(frozen=True)
class AttackRow:
    """What the list shows about one attack."""

    attack: str
    on: str
    knows_rule: bool
    options: dict[str, object]
    summary: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--json", action="store_true", help="for a program to read")


def run(arguments: argparse.Namespace) -> int:
    """Print the list."""
    rows = list(describe_attacks())
    if arguments.json:
        print(json.dumps([vars(row) for row in rows], indent=2))
        return 0
    print_table(
        "Attacks, all with sight of what honest clients send",
        ("attack", "on", "knows the rule", "what it does"),
        [
            (f"{row.attack}()", row.on, "yes" if row.knows_rule else "no", row.summary)
            for row in rows
        ],
    )
    return 0


def describe_attacks() -> Iterator[AttackRow]:
    """Yield a row for every attack in `flwr_safedshb.attacks`."""
    from flwr_safedshb import attacks
    from flwr_safedshb.attacks import Attack
    from flwr_safedshb.attacks.collusion import ColludingAttack
    from flwr_safedshb.attacks.optimized import SearchedAttack

    for kind in find_classes(attacks, Attack):  # type: ignore[type-abstract]
        yield AttackRow(
            attack=kind.__name__,
            on="vectors" if kind.replaces_vectors else "data",
            knows_rule=issubclass(kind, SearchedAttack | ColludingAttack),
            options={f.name: f.default for f in fields(kind) if f.repr},
            summary=inspect.cleandoc(kind.__doc__ or "").partition("\n")[0],
        )
