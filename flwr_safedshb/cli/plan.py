"""Forecast a federation: noise, epsilon, kappa, which cost dominates, what would help.

Give a target epsilon, and the least noise that meets it is calibrated; or give the
noise multiplier. The paper's setting:

  safedshb plan -n 7 -f 3 -m 2763 -d 69 -b 25 -C 1 -T 400 --delta 1e-4 -s 1
  safedshb plan -n 10 -f 2 -m 5000 -d 1000 -b 50 -T 500 --delta 1e-6 --epsilon 1 --json

With --evaluations 10 it also says what ten private answers of every node about the
model cost, and how precise they are; with --held-out 100 about examples set aside.

Nothing here looks at data; G, how far honest clients' gradients are apart, is yours to
say (flwr_safedshb.heterogeneity measures it on public or simulated data). The lower
bound is that of Allouah et al., ICML 2023, whose conditions most settings break: each
is named. The bound for SMEA is ours, see flwr_safedshb.theory.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import MISSING, asdict, fields
from typing import TYPE_CHECKING

from flwr_safedshb.cli._forecast import (
    Alternatives,
    EvaluationForecast,
    FederationSpec,
    Forecast,
    epsilon_by_sampling,
    find_violations,
    forecast,
    forecast_evaluations,
    list_alternatives,
    list_kappas,
    to_json,
    violations_by_term,
)
from flwr_safedshb.privacy.samplers import load_samplers
from flwr_safedshb.theory.resilience import MARGIN

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_CAUSES = {
    "privacy": "privacy: noise in d coordinates",
    "both": "both: what hides in the noise",
    "robustness": "robustness: what hides in G",
}


def print_forecast(console: Console, now: Forecast, others: Alternatives) -> None:
    """Print a forecast for people."""
    spec = now.spec
    console.print(
        f"n = {spec.n} clients, f = {spec.f} hostile, m = {spec.m} examples each, "
        f"d = {spec.d}, b = {spec.b}, C = {spec.clip_norm:g}, T = {spec.steps}, "
        f"delta = {spec.delta:g}, {spec.sampling} batches, momentum {spec.momentum:g}"
    )
    console.print(
        f"\n[bold]Noise[/bold] sigma_DP = {now.plan.noise_std:.4g} in every coordinate "
        f"(noise multiplier {now.plan.noise_multiplier:.4g}); "
        f"{now.momentum_noise_std:.4g} in a momentum"
    )
    console.print("[bold]Privacy[/bold] at that noise, replace-one, PLD accountant:")
    for sampling, epsilon in epsilon_by_sampling(now).items():
        mark = "  <- this plan" if sampling == spec.sampling else ""
        console.print(
            f"  epsilon = {_format_epsilon(epsilon)} with {sampling} batches{mark}"
        )
    known = list_kappas(spec)
    console.print(
        f"[bold]Robustness[/bold] kappa = {known['smea']:.4g} for SMEA (the paper: "
        f"{known['smea_paper']:.4g}), {known['filter']:.4g} for Filter with a bound "
        f"(the paper: {known['filter_paper']:.4g}); no rule is below "
        f"{known['lower_bound']:.4g}"
    )
    console.print(
        "[bold]Room[/bold] noise alone lets honest momentums differ by up to "
        f"{math.sqrt(now.noise_spread):.3g} along one direction. At a model that stays "
        "put, adversaries can turn a step uphill on average only where the gradient is "
        f"shorter than [bold]{now.radius:.3g}[/bold] (proved; the trilemma page says "
        "how near attacks come). No such bound is proved for a whole training: with "
        "momentum it can swing uphill elsewhere, even without adversaries"
    )
    if spec.gradient is not None:
        console.print(_describe_withstanding(now, spec.gradient))
    console.print(_make_trilemma_table(now))
    console.print(_describe_dominance(now))
    _print_violations(console, now)
    console.print(_make_what_if_table(now, others))


def _describe_withstanding(now: Forecast, gradient: float) -> str:
    """Describe whether the training is likely to withstand colluders."""
    likely = "likely" if now.withstands else "not likely"
    return (
        f"[bold]Withstands?[/bold] [bold]{likely}[/bold] that half of its progress or "
        "more stays under colluders who push in every step: they reach about "
        f"{now.radius * now.swing / MARGIN:.3g}, and the gradient is {gradient:.3g} at "
        "first (an estimate that was fitted on one task, and is wrong more often on "
        "others; see the robustness page)"
    )


def _print_violations(console: Console, now: Forecast) -> None:
    """Print which terms of the lower bound are proven here, and what others lack."""
    lacking = violations_by_term(now)
    proven = [term for term, violated in lacking.items() if not violated]
    console.print(
        "Of the lower bound (*), proven in this setting: "
        f"[bold]{', '.join(proven) or 'no term'}[/bold]."
    )
    named: set[str] = set()
    for term, violated in lacking.items():
        if violated:
            console.print(f"  [yellow]not {term}:[/yellow] {'; '.join(violated)}.")
            named.update(violated)
    rest = [violated for violated in find_violations(now) if violated not in named]
    if rest:
        console.print(f"  [yellow]not the whole:[/yellow] {'; '.join(rest)}.")


def _make_trilemma_table(now: Forecast) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(
        title="Where error comes from",
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
    table.add_row("chance of the batches", "", f"{now.upper.sampling:.3g}")
    table.add_row("together", f"{now.lower.total:.3g}", f"{now.upper.combined:.3g}")
    table.caption = (
        "* no less than this, the squared error of a mean after T steps; constants and "
        "logarithms are left out: compare, do not quote\n"
        "** proved: no more than this, the squared error of one step's aggregate of "
        "momentums at a model that stays put; the roots of the terms add up"
    )
    return table


def _describe_dominance(now: Forecast) -> str:
    lower, spec = now.lower, now.spec
    factor = (
        f"{lower.dominance:.3g} times the next"
        if lower.dominance < math.inf
        else "alone"
    )
    text = f"[bold]{lower.dominant}[/bold] dominates, {factor}."
    if spec.f > 0 and lower.dominant != "robustness":
        even = math.sqrt(max(lower.privacy, lower.both) * spec.n / spec.f)
        text += f" Robustness takes over once honest gradients differ by G > {even:.2g}"
        text += "." if spec.heterogeneity else " (you gave no --heterogeneity)."
    return text


def _make_what_if_table(now: Forecast, others: Alternatives) -> Table:
    from rich import box
    from rich.table import Table

    title = "What if (at the same epsilon, with noise to match)"
    table = Table(title=title, box=box.SIMPLE, title_justify="left")
    table.add_column("change")
    for column in ("epsilon", "sigma_DP", "kappa", "any*", "SMEA**", "radius"):
        table.add_column(column, justify="right")
    for change, then in others:
        table.add_row(
            change,
            _format_epsilon(then.epsilon),
            f"{then.plan.noise_std:.4g}",
            f"{then.kappa:.4g}",
            f"x {then.lower.total / now.lower.total:.3g}",
            f"x {then.upper.combined / now.upper.combined:.3g}",
            f"{then.radius:.3g}",
        )
    return table


def _format_epsilon(epsilon: float) -> str:
    return f"{epsilon:.3f}" if epsilon >= 0.1 else f"{epsilon:.3g}"


def _make_evaluations_table(evaluations: Sequence[EvaluationForecast]) -> Table:
    from rich import box
    from rich.table import Table

    first = evaluations[0]
    title = f"{first.count} private answers about {first.examples} examples of a node"
    table = Table(title=title, box=box.SIMPLE, title_justify="left")
    for column in ("noise", "epsilon, steps included", "deviation", "reach***"):
        table.add_column(column, justify="right")
    for one in evaluations:
        table.add_row(
            f"{one.noise_multiplier:.3g}",
            f"{one.epsilon:.4g}",
            f"± {one.deviation:.3g}",
            f"± {one.reach:.3g}",
        )
    caption = (
        "*** the server's interval for the honest nodes' median accuracy goes so far "
        "beyond what nodes report; 95 %, whatever f nodes say. Every node counts once: "
        "it is not the accuracy over all examples"
    )
    if first.open_to_liars:
        caption += ". f >= n/3: liars alone can take either end of it to 0 or 1"
    table.caption = caption
    return table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    for each in fields(FederationSpec):
        if each.metadata:
            is_required = each.default is MISSING
            parser.add_argument(
                *each.metadata["flags"],
                dest=each.name,
                type=int if each.type == "int" else float,
                required=is_required,
                default=None if is_required else each.default,
                help=each.metadata["help"],
            )
    noise = parser.add_mutually_exclusive_group(required=True)
    noise.add_argument("--epsilon", type=float, help="target that noise is made for")
    noise.add_argument(
        "-s", "--noise-multiplier", type=float, help="sigma_DP in units of 2C/b"
    )
    parser.add_argument(
        "--sampling", choices=list(load_samplers()), default="fixed", help="(fixed)"
    )
    parser.add_argument(
        "--evaluations",
        type=int,
        help="k, private answers of every node about the model: their cost, and how "
        "precise they are",
    )
    parser.add_argument(
        "--held-out",
        type=int,
        default=0,
        help="examples beside the m that answer and never train (0: the m do both)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the forecast."""
    from rich.console import Console

    given = vars(arguments)
    spec = FederationSpec(
        **{each.name: given[each.name] for each in fields(FederationSpec)}
    )
    with Console(stderr=True).status("Accounting"):
        now = forecast(spec)
        others = [(change, forecast(then)) for change, then in list_alternatives(now)]
        evaluations = []
        if arguments.evaluations is not None:
            count, held_out = arguments.evaluations, arguments.held_out
            evaluations = forecast_evaluations(now, count, held_out)
    if arguments.json:
        found = {**to_json(now, others), "evaluations": [*map(asdict, evaluations)]}
        print(json.dumps(found, indent=2, allow_nan=False))
    else:
        console = Console(highlight=False)
        print_forecast(console, now, others)
        if evaluations:
            console.print(_make_evaluations_table(evaluations))
    return 0
