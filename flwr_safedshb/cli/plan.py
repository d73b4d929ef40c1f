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
from dataclasses import asdict
from typing import TYPE_CHECKING

from flwr_safedshb.cli._answers import answers, answers_table
from flwr_safedshb.cli._forecast import (
    Forecast,
    Others,
    Setting,
    alternatives,
    as_json,
    by_sampling,
    by_term,
    forecast,
    kappas,
    violations,
)
from flwr_safedshb.privacy.samplers import load_samplers
from flwr_safedshb.theory.resilience import MARGIN

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

WORDS = {
    "privacy": "privacy: noise in d coordinates",
    "both": "both: what hides in the noise",
    "robustness": "robustness: what hides in G",
}


def show(console: Console, now: Forecast, others: Others) -> None:
    """Print everything for people."""
    it = now.setting
    console.print(
        f"n = {it.n} clients, f = {it.f} hostile, m = {it.m} examples each, "
        f"d = {it.d}, b = {it.b}, C = {it.clip_norm:g}, T = {it.steps}, "
        f"delta = {it.delta:g}, {it.sampling} batches, momentum {it.momentum:g}"
    )
    console.print(
        f"\n[bold]Noise[/bold] sigma_DP = {now.plan.noise_std:.4g} in every coordinate "
        f"(noise multiplier {now.plan.noise_multiplier:.4g}); "
        f"{now.momentum_noise_std:.4g} in a momentum"
    )
    console.print("[bold]Privacy[/bold] at that noise, replace-one, PLD accountant:")
    for sampling, epsilon in by_sampling(now).items():
        mark = "  <- this plan" if sampling == it.sampling else ""
        console.print(f"  epsilon = {_rounded(epsilon)} with {sampling} batches{mark}")
    known = kappas(it)
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
    if it.gradient is not None:
        console.print(_standing(now, it.gradient))
    console.print(_trilemma_table(now))
    console.print(_dominance(now))
    _show_standing(console, now)
    console.print(_what_if_table(now, others))


def _standing(now: Forecast, gradient: float) -> str:
    """Say whether the training is likely to withstand colluders."""
    likely = "likely" if now.withstands else "not likely"
    return (
        f"[bold]Withstands?[/bold] [bold]{likely}[/bold] that half of its progress or "
        "more stays under colluders who push in every step: they reach about "
        f"{now.radius * now.swing / MARGIN:.3g}, and the gradient is {gradient:.3g} at "
        "first (an estimate that was fitted on one task, and is wrong more often on "
        "others; see the robustness page)"
    )


def _show_standing(console: Console, now: Forecast) -> None:
    """Say which terms of the lower bound are proven here, and what is broken."""
    lacking = by_term(now)
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
    rest = [violated for violated in violations(now) if violated not in named]
    if rest:
        console.print(f"  [yellow]not the whole:[/yellow] {'; '.join(rest)}.")


def _trilemma_table(now: Forecast) -> Table:
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
        table.add_row(WORDS[name], f"{low:.3g}", f"{high:.3g}")
    table.add_row("chance of the batches", "", f"{now.upper.sampling:.3g}")
    table.add_row("together", f"{now.lower.total:.3g}", f"{now.upper.combined:.3g}")
    table.caption = (
        "* no less than this, the squared error of a mean after T steps; constants and "
        "logarithms are left out: compare, do not quote\n"
        "** proved: no more than this, the squared error of one step's aggregate of "
        "momentums at a model that stays put; the roots of the terms add up"
    )
    return table


def _dominance(now: Forecast) -> str:
    lower, it = now.lower, now.setting
    factor = (
        f"{lower.dominance:.3g} times the next"
        if lower.dominance < math.inf
        else "alone"
    )
    text = f"[bold]{lower.dominant}[/bold] dominates, {factor}."
    if it.f > 0 and lower.dominant != "robustness":
        even = math.sqrt(max(lower.privacy, lower.both) * it.n / it.f)
        text += f" Robustness takes over once honest gradients differ by G > {even:.2g}"
        text += "." if it.heterogeneity else " (you gave no --heterogeneity)."
    return text


def _what_if_table(now: Forecast, others: Others) -> Table:
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
            _rounded(then.epsilon),
            f"{then.plan.noise_std:.4g}",
            f"{then.kappa:.4g}",
            f"x {then.lower.total / now.lower.total:.3g}",
            f"x {then.upper.combined / now.upper.combined:.3g}",
            f"{then.radius:.3g}",
        )
    return table


def _rounded(epsilon: float) -> str:
    return f"{epsilon:.3f}" if epsilon >= 0.1 else f"{epsilon:.3g}"


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    whole: list[tuple[str, str, str]] = [
        ("-n", "--num-nodes", "n, clients"),
        ("-f", "--num-malicious-nodes", "f, clients that may be hostile; 2f < n"),
        ("-m", "--num-examples", "m, examples of each client"),
        ("-d", "--dimension", "d, parameters of the model"),
        ("-b", "--batch-size", "b, examples in a batch; at most m"),
        ("-T", "--steps", "T, steps of training"),
    ]
    for short, long, words in whole:
        parser.add_argument(short, long, type=int, required=True, help=words)
    parser.add_argument(
        "-C", "--clip-norm", type=float, default=1.0, help="C (default: 1)"
    )
    parser.add_argument("--delta", type=float, required=True)
    noise = parser.add_mutually_exclusive_group(required=True)
    noise.add_argument("--epsilon", type=float, help="target that noise is made for")
    noise.add_argument(
        "-s", "--noise-multiplier", type=float, help="sigma_DP in units of 2C/b"
    )
    parser.add_argument(
        "--sampling", choices=list(load_samplers()), default="fixed", help="(fixed)"
    )
    parser.add_argument(
        "-G",
        "--heterogeneity",
        type=float,
        default=0.0,
        help="G, root mean square distance of honest gradients from their mean (0)",
    )
    parser.add_argument(
        "--momentum",
        type=float,
        default=0.99,
        help="beta, which averages the noise of many steps (0.99, the strategy's)",
    )
    parser.add_argument(
        "--gradient-std",
        type=float,
        help="sigma, root mean square distance of the gradients of single examples "
        "from their client's (C, the most that clipping leaves)",
    )
    parser.add_argument(
        "--gradient",
        type=float,
        help="length of the gradient at the first model, to say if training withstands",
    )
    parser.add_argument(
        "--learning-rate", type=float, default=1.0, help="gamma, of the server (1)"
    )
    parser.add_argument(
        "--smoothness",
        type=float,
        default=0.0,
        help="L, curvature of the loss along its gradient (0: pushes do not add up)",
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

    setting = Setting(
        n=arguments.num_nodes,
        f=arguments.num_malicious_nodes,
        m=arguments.num_examples,
        d=arguments.dimension,
        b=arguments.batch_size,
        clip_norm=arguments.clip_norm,
        steps=arguments.steps,
        delta=arguments.delta,
        sampling=arguments.sampling,
        epsilon=arguments.epsilon,
        noise_multiplier=arguments.noise_multiplier,
        heterogeneity=arguments.heterogeneity,
        momentum=arguments.momentum,
        gradient_std=arguments.gradient_std,
        gradient=arguments.gradient,
        learning_rate=arguments.learning_rate,
        smoothness=arguments.smoothness,
    )
    with Console(stderr=True).status("Accounting"):
        now = forecast(setting)
        others = [(change, forecast(then)) for change, then in alternatives(now)]
        told = []
        if arguments.evaluations is not None:
            told = answers(now, arguments.evaluations, arguments.held_out)
    if arguments.json:
        forecasts = as_json(now, others) | {"evaluations": [asdict(a) for a in told]}
        print(json.dumps(forecasts, indent=2, allow_nan=False))
    else:
        console = Console(highlight=False)
        show(console, now, others)
        if told:
            console.print(answers_table(told))
    return 0
