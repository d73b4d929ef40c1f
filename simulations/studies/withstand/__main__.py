"""Prediction against outcome: ``python -m simulations.studies.withstand``.

`safedshb plan` predicts whether a training withstands colluders, from n, f, the noise
and the gradient at the first model. Here eighty federations are trained on the paper's
task with SMEA, under the strongest attack and without one, and the outcome is held
against the prediction: a training withstands if at least half of the progress that the
honest clients make alone stays. Resumable.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown

from simulations.command import complaining
from simulations.results.publish import publish
from simulations.results.schema import RunRecord
from simulations.results.sweep import conduct, sweep_parser
from simulations.studies.withstand.cases import FEDERATIONS, Case, cases, settings
from simulations.studies.withstand.outcome import Outcome, markdown, outcomes

SEEDS = (1,)


@complaining
def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing, then print predictions and outcomes."""
    parser = sweep_parser(__doc__, "outputs/withstand", SEEDS)
    sizes = sorted({n for n, _ in FEDERATIONS})
    parser.add_argument(
        "--nodes", nargs="+", type=int, choices=sizes, default=sizes, help="all"
    )
    args = parser.parse_args(argv)
    chosen = [setting for setting in settings() if setting.n in args.nodes]
    finish = partial(conclude, args.output, args.page, args.set)
    return conduct(args, cases(chosen, args.seeds), finish, "withstand")


def conclude(
    folder: Path,
    page: Path | None,
    more: Sequence[str],
    console: Console,
    runs: Mapping[Case, RunRecord],
) -> None:
    """Print and write the table."""
    found = outcomes(runs, more)
    text = markdown(found)
    (folder / "results.md").write_text(text)
    content = [_plain(one) for one in found]
    (folder / "results.json").write_text(json.dumps(content, indent=2) + "\n")
    console.print(Markdown(text))
    console.print(f"Tables and runs are in {folder}")
    if page is not None:
        publish(page, "withstand", text)


def _plain(one: Outcome) -> dict[str, object]:
    plan = one.predicted
    return {
        **vars(one.setting),
        "radius": plan.radius,
        "swing": plan.swing,
        "gradient": plan.spec.gradient,
        "losses": [one.first, one.unharmed, one.attacked],
        "withstood": one.withstood,
        "predicted": plan.withstands,
    }


if __name__ == "__main__":
    raise SystemExit(main())
