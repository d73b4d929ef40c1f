"""What `safedshb plan --theory` prints: the bounds on the error, and what they need."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from flwr_safedshb.cli._forecast import (
    Forecast,
    find_violations,
    list_kappas,
    violations_by_term,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_CAUSES = {
    "privacy": "privacy: noise in d weights",
    "both": "both: attackers hide in the noise",
    "robustness": "robustness: they hide in G",
}


def print_theory(console: Console, now: Forecast) -> None:
    """Print the paper's lower bound, the bound for SMEA, and the constants of rules."""
    console.print(_make_bounds_table(now))
    console.print(_describe_dominance(now))
    _print_proven_terms(console, now)
    known = list_kappas(now.spec)
    console.print(
        "\n[bold]kappa[/bold], the constant of a rule's guarantee: SMEA "
        f"{known['smea']:.4g} (in the paper {known['smea_paper']:.4g}), Filter with a "
        f"bound {known['filter']:.4g} (in the paper {known['filter_paper']:.4g}). No "
        f"rule can have less than {known['lower_bound']:.4g}."
    )
    console.print(
        "[bold]Noise alone[/bold] makes honest momentums differ by up to "
        f"{math.sqrt(now.noise_spread):.3g} along one direction."
    )
    console.print(
        f"[bold]Attackers cannot reverse a gradient longer than {now.radius:.3g}[/bold]"
        ": at a model that stays put, no attack turns such a step uphill on average "
        "(proved). For a whole training no such bound is proved: momentum carries a "
        "model uphill at times, with attackers and without."
    )


def _make_bounds_table(now: Forecast) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(
        title="Squared error, by cause",
        box=box.SIMPLE,
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("cause")
    table.add_column("any algorithm*", justify="right")
    table.add_column("SMEA, one step**", justify="right")
    for (name, low), high in zip(
        now.lower.terms.items(), now.upper.terms.values(), strict=True
    ):
        table.add_row(_CAUSES[name], f"{low:.3g}", f"{high:.3g}")
    table.add_row("random batches", "", f"{now.upper.sampling:.3g}")
    table.add_row("together", f"{now.lower.total:.3g}", f"{now.upper.combined:.3g}")
    table.caption = (
        "* At least this, for the mean after T steps. Constants and logarithms are "
        "left out: compare rows, do not quote them.\n"
        "** At most this, for one step's aggregate of momentums at a model that stays "
        "put (proved). The square roots of the causes add up."
    )
    return table


def _describe_dominance(now: Forecast) -> str:
    """Say which cause is the largest, and from which G on robustness is."""
    lower, spec = now.lower, now.spec
    factor = (
        f"{lower.dominance:.3g} times the next"
        if lower.dominance < math.inf
        else "the only cause"
    )
    text = f"Any algorithm's largest cause: [bold]{lower.dominant}[/bold], {factor}."
    if spec.f > 0 and lower.dominant != "robustness":
        even = math.sqrt(max(lower.privacy, lower.both) * spec.n / spec.f)
        text += (
            f" Robustness is the largest once honest gradients differ by G > {even:.2g}"
        )
        text += "." if spec.heterogeneity else " (--heterogeneity; you gave none)."
    return text


def _print_proven_terms(console: Console, now: Forecast) -> None:
    """Print which causes of the lower bound are proven here, and what others need."""
    needs_by_term = violations_by_term(now)
    proven = [term for term, needs in needs_by_term.items() if not needs]
    console.print(
        "\nThe paper proves its lower bound (*) for some settings only. Proven for "
        f"yours: [bold]{', '.join(proven) or 'nothing'}[/bold]."
    )
    printed: set[str] = set()
    for term, needs in needs_by_term.items():
        if needs:
            console.print(f"  [yellow]{term}:[/yellow] {'; '.join(needs)}.")
            printed.update(needs)
    others = [need for need in find_violations(now) if need not in printed]
    if others:
        console.print(f"  [yellow]all three at once:[/yellow] {'; '.join(others)}.")
