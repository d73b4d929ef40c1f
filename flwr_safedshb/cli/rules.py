"""List the rules of the server, and what each one proves.

kappa is the proven constant of robust averaging: the squared distance between the
rule's output and the mean of any n - f vectors is at most kappa times the spread of
these. What "spread" is differs, and decides more than kappa does:

  spectral         largest eigenvalue of their covariance
  variance         trace of their covariance: up to n - f - 1 times the eigenvalue
  spectral bound   a bound on that eigenvalue, which Filter has to be given

For example:
  safedshb rules                  at n = 7 clients, of which f = 3 are hostile
  safedshb rules --n 50 --f 10
  safedshb rules --json           kappa is null where nothing is proven
"""

from __future__ import annotations

import argparse
import inspect
import json
from collections.abc import Iterator
from dataclasses import dataclass

from flwr_safedshb.cli import _listing as listing

NOTIONS = ("spectral", "spectral bound", "variance", None)


@dataclass(frozen=True)
class Row:
    """What the list says of one rule."""

    rule: str
    kappa: float | None
    notion: str | None
    needs: str
    summary: str


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--n", type=int, default=7, help="clients (default: 7)")
    parser.add_argument("--f", type=int, default=3, help="hostile ones (default: 3)")
    parser.add_argument("--json", action="store_true", help="for a program to read")


def run(arguments: argparse.Namespace) -> int:
    """Print the list."""
    # What proves most comes first.
    rows = sorted(
        found(arguments.n, arguments.f),
        key=lambda row: (NOTIONS.index(row.notion), row.kappa or 0.0, row.rule),
    )
    if arguments.json:
        print(json.dumps([vars(row) for row in rows], indent=2))
        return 0
    listing.show(
        f"Aggregation rules, n = {arguments.n} clients, f = {arguments.f} hostile",
        ("rule", "kappa", "in units of", "what it returns"),
        [
            (
                row.rule,
                "-" if row.kappa is None else f"{row.kappa:.4g}",
                row.notion or "-",
                row.summary,
            )
            for row in rows
        ],
        number="kappa",
    )
    return 0


def found(n: int, f: int) -> Iterator[Row]:
    """Yield what there is to say of every rule in `flwr_safedshb.aggregation`."""
    from flwr_safedshb import aggregation
    from flwr_safedshb.aggregation import NNM, Filter, GramRule, Rule, TrimmedMean
    from flwr_safedshb.theory import check_num_malicious

    check_num_malicious(n, f)
    # Two rules say more with an argument than without.
    shown: dict[type, Rule] = {
        Filter: Filter(spectral_bound=1.0),
        NNM: NNM(TrimmedMean()),
    }
    for kind in listing.concrete(aggregation, Rule):  # type: ignore[type-abstract]
        rule = shown[kind] if kind in shown else kind()
        kappa = rule.kappa(n, f)
        yield Row(
            rule=f"NNM({type(rule.rule).__name__})"
            if isinstance(rule, NNM)
            else f"{kind.__name__}({'spectral_bound' if kind is Filter else ''})",
            kappa=kappa,
            notion=None if kappa is None else rule.notion,
            needs="inner products" if isinstance(rule, GramRule) else "coordinates",
            summary=inspect.cleandoc(kind.__doc__ or "").partition("\n")[0],
        )
