"""List the rules of the server, and what each one proves.

kappa is the proven constant of robust averaging: the squared distance between the
rule's output and the mean of any n - f vectors is at most kappa times the spread of
these. What "spread" is differs:

  spectral         largest eigenvalue of their covariance
  variance         trace of their covariance: up to n - f - 1 times the eigenvalue, so
                   that many times kappa is proven in the spectral sense
  spectral bound   a bound on that eigenvalue, which Filter has to be given

The paper is Allouah et al., ICML 2023; ours have proofs in flwr_safedshb.theory. No
rule is below f/(n-2f).

For example:
  safedshb rules                  at n = 7 clients, of which f = 3 are hostile
  safedshb rules --n 50 --f 10 --d 20
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
    spectral_kappa: float | None
    paper_kappa: float | None
    needs: str
    summary: str


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--n", type=int, default=7, help="clients (default: 7)")
    parser.add_argument("--f", type=int, default=3, help="hostile ones (default: 3)")
    parser.add_argument("--d", type=int, help="dimension (default: large)")
    parser.add_argument("--json", action="store_true", help="for a program to read")


def run(arguments: argparse.Namespace) -> int:
    """Print the list."""
    # What proves most comes first.
    rows = sorted(
        found(arguments.n, arguments.f, arguments.d),
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
                _units(row),
                row.summary + _paper(row),
            )
            for row in rows
        ],
        number="kappa",
    )
    return 0


def _units(row: Row) -> str:
    if row.notion == "variance":
        return f"variance (spectral: {row.spectral_kappa:.4g})"
    return row.notion or "-"


def _paper(row: Row) -> str:
    if row.paper_kappa is None:
        return ""
    return f" The paper's kappa: {row.paper_kappa:.4g}."


def found(n: int, f: int, d: int | None = None) -> Iterator[Row]:
    """Yield what there is to say of every rule in `flwr_safedshb.aggregation`."""
    from flwr_safedshb import aggregation
    from flwr_safedshb.aggregation import Filter, GramRule, Rule, TrimmedMean
    from flwr_safedshb.theory import check_num_malicious, kappa_spectral

    check_num_malicious(n, f)
    rules = [
        kind(*[TrimmedMean()] * ("rule" in inspect.signature(kind).parameters))
        for kind in listing.concrete(aggregation, Rule)  # type: ignore[type-abstract]
    ]
    # Filter proves one thing with a bound and another without.
    for rule in (*rules, Filter(spectral_bound=1.0)):
        kappa, notion = rule.kappa(n, f), rule.kappa_kind
        spectral = kappa if notion == "spectral" else None
        if kappa is not None and notion == "variance":
            spectral = kappa_spectral(kappa, n, f, d)
        argument = "spectral_bound" if notion == "spectral bound" else ""
        if (inner := getattr(rule, "rule", None)) is not None:
            argument = type(inner).__name__
        yield Row(
            rule=f"{type(rule).__name__}({argument})",
            kappa=kappa,
            notion=None if kappa is None else notion,
            spectral_kappa=spectral,
            paper_kappa=rule.paper_kappa(n, f),
            needs="inner products" if isinstance(rule, GramRule) else "coordinates",
            summary=inspect.cleandoc(rule.__doc__ or "").partition("\n")[0],
        )
