"""Say what to expect of a federation before it trains: verdict, epsilon, noise.

Give a target epsilon, and the least noise that meets it is found; or give the noise
multiplier. The setting of the paper's experiments:

  safedshb plan -n 7 -f 3 -m 2763 -d 69 -b 25 -C 1 -T 400 --delta 1e-4 -s 1
  safedshb plan -n 10 -f 2 -m 5000 -d 1000 -b 50 -T 500 --delta 1e-6 --epsilon 1 --json

It prints a verdict, then the numbers. --theory adds the bounds on the error that are
proved, and what each proof needs: the lower bound of Allouah et al. (ICML 2023), and
ours for SMEA (flwr_safedshb.theory). --evaluations 10 adds what ten private answers of
every node about the model cost and how precise they are; --held-out 100 asks them about
examples set aside.

The exit code is 1 if the training has no chance against its noise. The command reads no
data. G says how much honest clients' gradients differ: measure it
on public or made-up data with flwr_safedshb.heterogeneity.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import MISSING, asdict, fields
from typing import TYPE_CHECKING

from flwr_safedshb.cli._forecast import (
    Alternatives,
    EvaluationForecast,
    FederationSpec,
    Forecast,
    epsilon_by_sampling,
    forecast,
    forecast_evaluations,
    list_alternatives,
    to_json,
)
from flwr_safedshb.cli._plan_theory import print_theory
from flwr_safedshb.privacy.samplers import load_samplers
from flwr_safedshb.theory.resilience import (
    DOES_NOT_PAY,
    LOST_RATIO,
    LOST_REACH,
    PAYS,
    SAFE_RATIO,
    SAFE_REACH,
    attack_ratios,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def describe_verdicts(now: Forecast) -> list[str]:
    """Return what to expect of the training, one sentence or two each, worst first."""
    return [_describe_training(now), _describe_withstanding(now), _describe_gain(now)]


def _describe_training(now: Forecast) -> str:
    """Say whether the training has a chance against its noise."""
    found = now.training
    color = {"will not train": "red", "may not train": "yellow"}.get(found.verdict)
    words, colon, rest = str(found).partition(":")
    style = "bold" if color is None else f"bold {color}"
    return f"[bold]Noise:[/bold] [{style}]{words}[/]{colon}{rest}"


def _describe_withstanding(now: Forecast) -> str:
    """Say whether the training will withstand its attackers."""
    spec = now.spec
    if spec.f == 0:
        return (
            "[bold]Attackers:[/bold] none is withstood. With f = 0 a single hostile "
            "client can ruin the model; set -f."
        )
    if spec.signal is None or spec.distance is None:
        proof = "proved, with probability 0.95"
        if spec.b < spec.m:
            proof += ", but for the chance of the batches"
        return (
            f"[bold]Attackers:[/bold] no {spec.f} of {spec.n} move an aggregate "
            f"farther than {now.push:.3g} from the honest mean in the whole run "
            f"({proof}). Give --signal and --distance, which "
            "safedshb tune measures on public or made-up data, to learn whether the "
            "training will withstand them."
        )
    ratio, reach = attack_ratios(now.push, spec.signal, spec.distance, spec.path)
    color = {"will withstand": "green", "will not withstand": "red"}.get(
        str(now.verdict), "yellow"
    )
    return (
        f"[bold]Attackers:[/bold] [bold {color}]{now.verdict}[/] (half of the progress "
        f"stays under {spec.f} of {spec.n} who push in every step): a push is at most "
        f"{ratio:.3g} times the signal (safe up to {SAFE_RATIO:g}, lost from "
        f"{LOST_RATIO:g}), and pushes could carry the model {reach:.3g} times the way "
        f"that it has to go (safe up to {SAFE_REACH:g}, lost from {LOST_REACH:g}). An "
        "estimate; the robustness page says how often it was right."
    )


def _describe_gain(now: Forecast) -> str:
    """Say whether a federation under attack is better than a client alone."""
    gain = now.gain_over_alone
    if gain is None:
        return "[bold]Better than alone?[/bold] yes, if nobody is hostile."
    answer = "likely" if gain >= PAYS else "unlikely" if gain <= DOES_NOT_PAY else None
    return (
        f"[bold]Better than alone?[/bold] [bold]{answer or 'cannot say'}[/bold]: "
        f"alone at the same epsilon, a client's own noise does {gain:.2g} times the "
        f"harm that attackers do here (likely from {PAYS:g}, unlikely up to "
        f"{DOES_NOT_PAY:g}). A client with plenty of data needs nobody: there it pays "
        "little in any case."
    )


def print_numbers(console: Console, now: Forecast) -> None:
    """Print the setting, and what it costs."""
    from rich import box
    from rich.table import Table

    spec, plan = now.spec, now.plan
    console.print(
        f"\nn = {spec.n} clients, f = {spec.f} hostile, m = {spec.m} examples each, "
        f"d = {spec.d} weights, batches of b = {spec.b} ({spec.sampling}), "
        f"C = {spec.clip_norm:g}, T = {spec.steps} steps, momentum {spec.momentum:g}"
    )
    table = Table(box=box.SIMPLE, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right")
    table.add_column()
    table.add_row(
        "epsilon",
        _format_epsilon(now.epsilon),
        f"of one example at delta {spec.delta:g}, over all steps",
    )
    for sampling, epsilon in epsilon_by_sampling(now).items():
        if sampling != spec.sampling:
            with_other = f"with {sampling} batches and the same noise"
            table.add_row("", _format_epsilon(epsilon), with_other)
    table.add_row(
        "noise multiplier",
        f"{plan.noise_multiplier:.4g}",
        "noise in units of 2C/b, the most that one example can change",
    )
    table.add_row("noise", f"{plan.noise_std:.4g}", "its deviation in each weight")
    table.add_row("", f"{now.momentum_noise_std:.4g}", "what momentum leaves of it")
    table.add_row(
        "kappa", f"{now.kappa:.4g}", "of SMEA: how far f clients can move a step"
    )
    table.add_row(
        "radius", f"{now.radius:.3g}", "attackers cannot reverse longer gradients"
    )
    console.print(table)


def _make_what_if_table(now: Forecast, others: Alternatives) -> Table:
    from rich import box
    from rich.table import Table

    title = "What one change would do (the noise follows, at the same epsilon)"
    table = Table(title=title, box=box.SIMPLE, title_justify="left")
    table.add_column("change")
    for column in ("epsilon", "noise", "kappa", "error*", "radius"):
        table.add_column(column, justify="right")
    table.add_column("attackers" if now.verdict else "")
    for change, then in others:
        table.add_row(
            change,
            _format_epsilon(then.epsilon),
            f"{then.plan.noise_std:.4g}",
            f"{then.kappa:.4g}",
            f"x {then.upper.combined / now.upper.combined:.3g}",
            f"{then.radius:.3g}",
            then.verdict or "",
        )
    table.caption = "* the proved bound on the squared error of one step of SMEA"
    table.caption_justify = "left"
    return table


def _format_epsilon(epsilon: float) -> str:
    return f"{epsilon:.3f}" if epsilon >= 0.1 else f"{epsilon:.3g}"


def _make_evaluations_table(evaluations: Sequence[EvaluationForecast]) -> Table:
    from rich import box
    from rich.table import Table

    first = evaluations[0]
    title = f"{first.count} private answers about {first.examples} examples of a node"
    table = Table(title=title, box=box.SIMPLE, title_justify="left")
    for column in ("noise", "epsilon, with training", "deviation", "wider by**"):
        table.add_column(column, justify="right")
    for one in evaluations:
        table.add_row(
            f"{one.noise_multiplier:.3g}",
            f"{one.epsilon:.4g}",
            f"± {one.deviation:.3g}",
            f"± {one.reach:.3g}",
        )
    caption = (
        "** The server's 95 % interval for the honest nodes' median accuracy is wider "
        "by this on each side than what nodes report, whatever f nodes say. Every node "
        "counts once: it is not the accuracy over all examples."
    )
    if first.open_to_liars:
        caption += " With f >= n/3 liars alone can move either end to 0 or 1."
    table.caption = caption
    table.caption_justify = "left"
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
        "--decay",
        choices=["constant", "linear"],
        default="constant",
        help="of the learning rate, to 0 where linear (constant)",
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
    parser.add_argument(
        "--theory", action="store_true", help="print the bounds on the error, too"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the forecast; return 1 if the training has no chance."""
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
        code = int(now.training.verdict == "will not train")
    if arguments.json:
        found = {**to_json(now, others), "evaluations": [*map(asdict, evaluations)]}
        print(json.dumps(found, indent=2, allow_nan=False))
        return code
    console = Console(highlight=False)
    for verdict in describe_verdicts(now):
        console.print(verdict)
    print_numbers(console, now)
    console.print(_make_what_if_table(now, others))
    if evaluations:
        console.print(_make_evaluations_table(evaluations))
    if arguments.theory:
        print_theory(console, now)
    else:
        console.print("--theory: the bounds on the error, and what their proofs need.")
    return code
