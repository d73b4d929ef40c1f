"""Say what an epsilon means: how often an attacker recognises one example.

For example:
  safedshb risk --epsilon 3 --delta 1e-5 -m 500 -T 60
  safedshb risk --epsilon 3 --delta 1e-5 -m 500 -T 60 --plot risk.png

The attacker sees everything that a node ever sends, and knows all of its examples but
one. He holds a candidate and says whether it is that one. No attacker, whatever he
computes, is right more often than the table says.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flwr_safedshb.privacy.plan import PrivacyPlan

# False positive rates of the table, and the epsilons beside the one that is asked for.
_RATES = (0.001, 0.01, 0.1)
_EPSILONS = (0.5, 1.0, 3.0, 8.0)
_NUM_POINTS = 60


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--epsilon", type=float, required=True, help="of the whole run")
    parser.add_argument("--delta", type=float, required=True, help="below 1/m")
    parser.add_argument(
        *("-m", "--num-examples"), type=int, required=True, help="of the node"
    )
    parser.add_argument(
        *("-T", "--steps"), type=int, required=True, help="of the training (rounds)"
    )
    parser.add_argument("--plot", type=Path, help="draw it into this PNG or SVG file")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the table, and draw the plot."""
    from flwr_safedshb.privacy.attack_bound import bound_true_positive_rates
    from flwr_safedshb.privacy.target import PrivacyTarget

    steps = arguments.steps
    plans = {
        epsilon: PrivacyTarget(epsilon, arguments.delta, steps).make_plan(
            arguments.num_examples
        )
        for epsilon in sorted({*_EPSILONS, arguments.epsilon})
    }
    found = {
        epsilon: bound_true_positive_rates(plan, steps, _RATES)
        for epsilon, plan in plans.items()
    }
    if arguments.plot is not None:
        _draw(arguments.plot, plans, steps, arguments.epsilon)
    if arguments.json:
        rows = [
            {
                "epsilon": epsilon,
                "noise_multiplier": plans[epsilon].noise_multiplier,
                "true_positive_rates": dict(zip(_RATES, rates, strict=True)),
            }
            for epsilon, rates in found.items()
        ]
        print(json.dumps(rows, indent=2))
        return 0
    from flwr_safedshb.cli._listing import print_table

    title = (
        "How often an attacker recognises one example at most, if he is wrong in "
        "0.1 %, 1 % or 10 % of other cases"
    )
    heads = ("epsilon", *(f"{100 * rate:g} % wrong" for rate in _RATES))
    rows_shown: list[tuple[str, ...]] = [
        ("0 (guessing)", *(f"{100 * rate:g} %" for rate in _RATES))
    ]
    for epsilon, rates in found.items():
        mark = " (yours)" if epsilon == arguments.epsilon else ""
        shown = [f"{100 * rate:.1f} %" for rate in rates]
        rows_shown.append((f"{epsilon:g}{mark}", *shown))
    print_table(title, heads, rows_shown)
    if arguments.plot is not None:
        print(arguments.plot)
    return 0


def _draw(path: Path, plans: dict[float, PrivacyPlan], steps: int, own: float) -> None:
    """Draw true positives by false positives, a line for each epsilon."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(
            f"--plot={path} needs matplotlib; pip install matplotlib"
        ) from error
    from flwr_safedshb.privacy.attack_bound import bound_true_positive_rates

    rates = [10.0 ** (-3 + 3 * i / (_NUM_POINTS - 1)) for i in range(_NUM_POINTS)]
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.subplots()
    for epsilon, plan in sorted(plans.items(), reverse=True):
        bounds = bound_true_positive_rates(plan, steps, rates)
        width = 2.5 if epsilon == own else 1.2
        axes.plot(rates, bounds, linewidth=width, label=f"epsilon {epsilon:g}")
    axes.plot(rates, rates, "k--", linewidth=1, label="guessing")
    axes.set_xscale("log")
    axes.set_xlabel("wrong: says yes although it is another example")
    axes.set_ylabel("right: says yes, and it is")
    axes.set_ylim(0, 1)
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", fontsize="small")
    figure.savefig(path, dpi=150)
