"""Settings against the worst attack: ``python -m simulations.studies.worst``.

A sweep over rules, numbers of adversaries, noise, shares of the labels, learning rates
and momentums on the paper's task, each under every attack, with heatmaps; for each
federation the setting is chosen whose worst attack does least. By default: is strongest
the worst of all attacks, for four rules at three privacy levels? Resumable, and on a
Ray cluster with --cluster.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown

from simulations.command import at_least, between, complaining
from simulations.config import SettingsError
from simulations.results import plots
from simulations.results.publish import publish
from simulations.results.sweep import conduct, sweep_parser
from simulations.studies.worst.cases import ATTACKS, RULES, SEEDS, cases, settings
from simulations.studies.worst.summary import Runs, heatmaps, markdown, report


@complaining
def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing, then draw and tabulate all of it."""
    parser = sweep_parser(__doc__, "outputs/worst", SEEDS)
    whole, some = at_least(1), between(0.0, 1e6)
    parser.add_argument("--rules", nargs="+", default=RULES, help="aggregation=...")
    parser.add_argument("--attacks", nargs="+", choices=ATTACKS, default=ATTACKS)
    parser.add_argument("--nodes", type=whole, default=7)
    parser.add_argument("--malicious", nargs="+", type=whole, default=[3])
    parser.add_argument("--noises", nargs="+", type=some, default=[1.0, 2.0, 3.0])
    parser.add_argument(
        "--alphas", nargs="+", type=float, default=[0.0], help="of Dirichlet; 0: iid"
    )
    parser.add_argument("--rates", nargs="+", type=some, default=[1.0])
    parser.add_argument("--momentums", nargs="+", type=float, default=[0.99])
    args = parser.parse_args(argv)
    if 2 * max(args.malicious) >= args.nodes:
        raise SettingsError("--malicious must be less than half of --nodes")
    grid = settings(
        args.rules,
        args.malicious,
        args.nodes,
        args.noises,
        args.alphas,
        args.rates,
        args.momentums,
    )
    finish = partial(conclude, args.output, args.page)
    return conduct(args, cases(grid, args.attacks, args.seeds), finish, "worst")


def conclude(folder: Path, page: Path | None, console: Console, runs: Runs) -> None:
    """Draw and tabulate all runs."""
    for rule, figure in heatmaps(runs).items():
        plots.save(figure, folder / "figures" / rule)
    text = markdown(runs)
    (folder / "results.md").write_text(text)
    (folder / "report.html").write_text(report(runs))
    console.print(Markdown(text))
    console.print(f"Heatmaps, tables and runs are in {folder}")
    if page is not None:
        publish(page, "worst", text)


if __name__ == "__main__":
    raise SystemExit(main())
