"""List the aggregation rules, and what each one proves.

The f hostile clients can move the result away from the mean of the n - f others. The
squared distance is at most kappa times how much those others differ, measured as

  one direction    the largest eigenvalue of their covariance: the smallest measure
  all directions   the trace of their covariance: up to n - f - 1 times as much
  your bound       a bound on that eigenvalue, which you give to Filter

So compare a kappa for all directions by the number in brackets, which is for one. A
rule without a number has no proof. No rule can have a kappa below f/(n-2f). The proofs
are in flwr_safedshb.theory; the paper is Allouah et al., ICML 2023.

For example:
  safedshb rules                  for 7 clients, 3 of them hostile
  safedshb rules --n 50 --f 10 --d 20
  safedshb rules --json           kappa is null where nothing is proven
"""

from __future__ import annotations

import argparse
import inspect
import json
from collections.abc import Iterator
from dataclasses import dataclass

from flwr_safedshb.cli._listing import find_classes, print_table

_KINDS = ("spectral", "spectral bound", "variance", None)
_UNITS = {
    "spectral": "one direction",
    "spectral bound": "your bound",
    "variance": "all directions",
    None: "-",
}


@dataclass(frozen=True)
class RuleRow:
    """What the list shows about one rule."""

    rule: str
    kappa: float | None
    notion: str | None
    spectral_kappa: float | None
    paper_kappa: float | None
    needs: str
    summary: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--n", type=int, default=7, help="n, the number of clients (7)")
    parser.add_argument(
        "--f", type=int, default=3, help="f, how many of them may be hostile (3)"
    )
    parser.add_argument("--d", type=int, help="d, trained weights (many)")
    parser.add_argument("--json", action="store_true", help="for a program to read")


def run(arguments: argparse.Namespace) -> int:
    """Print the list, the strongest proofs first."""
    rows = sorted(
        describe_rules(arguments.n, arguments.f, arguments.d),
        key=lambda row: (_KINDS.index(row.notion), row.kappa or 0.0, row.rule),
    )
    if arguments.json:
        print(json.dumps([vars(row) for row in rows], indent=2))
    else:
        title = (
            f"Aggregation rules, n = {arguments.n} clients, f = {arguments.f} hostile"
        )
        heads = ("rule", "kappa", "spread in", "what it returns")
        print_table(title, heads, [_format_row(row) for row in rows], number="kappa")
    return 0


def _format_row(row: RuleRow) -> tuple[str, ...]:
    kappa = "-" if row.kappa is None else f"{row.kappa:.4g}"
    units = _UNITS[row.notion]
    if row.notion == "variance":
        units += f" (one: {row.spectral_kappa:.4g})"
    summary = row.summary
    if row.paper_kappa is not None:
        summary += f" The paper's kappa: {row.paper_kappa:.4g}."
    return (row.rule, kappa, units, summary)


def describe_rules(n: int, f: int, d: int | None = None) -> Iterator[RuleRow]:
    """Yield a row for every rule in `flwr_safedshb.aggregation`."""
    from flwr_safedshb import aggregation
    from flwr_safedshb.aggregation import Filter, GramRule, Rule, TrimmedMean
    from flwr_safedshb.theory import check_num_malicious, kappa_spectral

    check_num_malicious(n, f)
    rules = [
        kind(*[TrimmedMean()] * ("rule" in inspect.signature(kind).parameters))
        for kind in find_classes(aggregation, Rule)  # type: ignore[type-abstract]
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
        yield RuleRow(
            rule=f"{type(rule).__name__}({argument})",
            kappa=kappa,
            notion=None if kappa is None else notion,
            spectral_kappa=spectral,
            paper_kappa=rule.paper_kappa(n, f),
            needs="inner products" if isinstance(rule, GramRule) else "coordinates",
            summary=inspect.cleandoc(rule.__doc__ or "").partition("\n")[0],
        )
