"""A public yardstick: ``python -m simulations.studies.yardstick``.

The one public table of private, robust training with its raw numbers (Xiang et al.,
SIGMOD 2023), run again with Safe-DSHB, and both side by side. Resumable.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown

from flwr_safedshb.privacy.plan import PrivacyPlan
from simulations.command import complaining
from simulations.data.files import MISSING_FASHION_MNIST, fashion_mnist
from simulations.results.publish import publish
from simulations.results.schema import RunRecord
from simulations.results.summary import final, table
from simulations.results.sweep import conduct, sweep_parser
from simulations.studies.yardstick.cases import (
    ATTACKS,
    NOISES,
    PUBLISHED,
    RULES,
    SEEDS,
    Case,
    cases,
)

Runs = Mapping[Case, RunRecord]
# Against what of the paper an attack of ours is held.
BESIDE = {
    "no attack": "no attack",
    "label flip": "label flip",
    "mimic-shift": 'their "local" attack',
    "strongest": 'their "local" attack',
}


@complaining
def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing, then print both tables."""
    parser = sweep_parser(__doc__, "outputs/yardstick", SEEDS)
    parser.add_argument(
        "--epsilons", nargs="+", type=float, choices=[*NOISES], default=[*NOISES]
    )
    parser.add_argument("--rules", nargs="+", choices=[*RULES], default=["SMEA"])
    parser.add_argument("--attacks", nargs="+", choices=[*ATTACKS], default=[*ATTACKS])
    args = parser.parse_args(argv)
    if fashion_mnist() is None:
        parser.error(MISSING_FASHION_MNIST)
    chosen = cases(args.epsilons, args.rules, args.attacks, args.seeds)
    finish = partial(conclude, args.output, args.page)
    return conduct(args, chosen, finish, "yardstick")


def conclude(folder: Path, page: Path | None, console: Console, runs: Runs) -> None:
    """Print and write the tables."""
    text = markdown(runs)
    (folder / "results.md").write_text(text)
    content = [
        {**vars(case), **vars(final(some))} for case, some in _by_seed(runs).items()
    ]
    (folder / "results.json").write_text(json.dumps(content, indent=2) + "\n")
    console.print(Markdown(text))
    console.print(f"Tables and runs are in {folder}")
    if page is not None:
        publish(page, "yardstick", text)


def _by_seed(runs: Runs) -> dict[Case, list[RunRecord]]:
    """Return the runs that differ in their seed alone, under their first."""
    found: dict[Case, list[RunRecord]] = {}
    for case, run in runs.items():
        key = next((k for k in found if _alike(k, case)), case)
        found.setdefault(key, []).append(run)
    return found


def _alike(one: Case, other: Case) -> bool:
    return (one.epsilon, one.rule, one.attack) == (
        other.epsilon,
        other.rule,
        other.attack,
    )


def markdown(runs: Runs) -> str:
    """Return the paper's figures, ours, and how far apart they are."""
    groups = _by_seed(runs)
    epsilons = sorted({case.epsilon for case in runs})
    places = {epsilon: i for i, epsilon in enumerate(NOISES)}
    rows = [
        ["Xiang et al.", attack, *(f"{values[places[e]]:.3f}" for e in epsilons)]
        for attack, values in PUBLISHED.items()
    ]
    for rule, attack in dict.fromkeys((case.rule, case.attack) for case in groups):
        cells = []
        for epsilon in epsilons:
            some = [
                v
                for k, v in groups.items()
                if _alike(k, Case(epsilon, rule, attack, 0))
            ]
            theirs = PUBLISHED[BESIDE[attack]][places[epsilon]]
            cells.append(_cell(some[0], theirs) if some else "-")
        who = "average" if attack == "no attack" else rule
        rows.append([f"Safe-DSHB, {who}", attack, *cells])
    heads = ["", "attack", *(f"epsilon = {epsilon:g}" for epsilon in epsilons)]
    seeds = sorted({case.seed for case in runs})
    lines = [
        f"Final test accuracy, seeds {', '.join(map(str, seeds))}; in brackets how "
        "far above or below the paper's figure under the same attack, or under its "
        'own worst ("local") for ours.',
        "",
    ]
    lines += [*table(heads, rows), "", *_units(epsilons)]
    return "\n".join([*lines, ""])


def _cell(runs: Sequence[RunRecord], theirs: float) -> str:
    found = final(runs)
    return f"{found} ({found.mean - theirs:+.3f})"


def _units(epsilons: Sequence[float]) -> list[str]:
    """Return epsilon in their unit and in ours."""
    rows = []
    for epsilon in epsilons:
        own = [
            PrivacyPlan(1.0, NOISES[epsilon], 16, 3000, "poisson", adjacency)
            for adjacency in ("add-remove", "replace-one")
        ]
        stated = [f"{plan.epsilon(1500, 1.497e-4):.3f}" for plan in own]
        rows.append([f"{epsilon:g}", f"{2 * NOISES[epsilon]:.3f}", *stated])
    heads = ["their epsilon", "noise in C/b", "ours, add-remove", "ours, replace-one"]
    words = "The same noise in both units, at delta = 1.497e-4 after 1,500 steps:"
    return [words, "", *table(heads, rows)]


if __name__ == "__main__":
    raise SystemExit(main())
