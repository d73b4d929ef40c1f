"""Private evaluation, attacked: ``python -m simulations.studies.answers``.

Three questions. Does the interval that the server states hold, with liars among the
nodes? Is the epsilon of training and answers together what another accountant says? And
does an attacker who knows everything but one example learn more from answers than is
accounted for, or from answers with a planted defect, so that the attack is worth its
name?
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown

from simulations.command import Parser, at_least, complaining, prepare_file
from simulations.results.publish import check_page, publish
from simulations.studies.answers.attack import DELTA, MECHANISMS, Attacked, attacked
from simulations.studies.answers.coverage import (
    LIARS,
    LIES,
    NODES,
    NOISE,
    SIZES,
    Composition,
    Coverage,
    composition,
    coverage,
)


def markdown(
    covered: Sequence[Coverage],
    composed: Sequence[Composition],
    attacks: Sequence[Attacked],
) -> str:
    """Return three tables."""
    held = sum(each.held for each in covered) / sum(each.trials for each in covered)
    lines = [
        f"The interval held in {100 * held:.1f} % of "
        f"{sum(each.trials for each in covered)} evaluations: {NODES} nodes, "
        f"{LIARS} of them liars, the others with {', '.join(map(str, SIZES))} examples "
        f"and accuracies that differ, noise {NOISE:g}. The pooled accuracy, which it "
        "is not about, was inside less often.\n",
        "| what liars say | held | pooled accuracy inside | mean width "
        "| mean error of the median |",
        "|---|---|---|---|---|",
        *(
            f"| {c.lie} | {c.held} of {c.trials} | {c.pooled} of {c.trials} "
            f"| {c.width:.3f} | {c.error:.3f} |"
            for c in covered
        ),
        "\nEpsilon at delta = 1e-5 of Poisson steps (m = 1000, b = 25, noise 1) and "
        "answers about all 1000 examples (noise 30), replace-one:\n",
        "| steps | answers | ours | dp_accounting |",
        "|---|---|---|---|",
        *(
            f"| {c.steps} | {c.answers} | {c.ours:.4f} | {c.theirs:.4f} |"
            for c in composed
        ),
        f"\nOne answer with noise 1, attacked, at delta = {DELTA:g} (bound from below, "
        "99.9 % sure):\n",
        "| mechanism | by class | measured | accounted | verdict |",
        "|---|---|---|---|---|",
        *(
            f"| {a.mechanism} | {'yes' if a.per_class else 'no'} | >= {a.measured:.3f} "
            f"| <= {a.accounted:.3f} | {'holds' if a.holds else 'caught'} |"
            for a in attacks
        ),
    ]
    return "\n".join(lines)


@complaining
def main(argv: Sequence[str] | None = None) -> int:
    """Ask all three questions; 1 if an answer is not what it should be."""
    parser = Parser(prog="python -m simulations.studies.answers")
    parser.add_argument("--evaluations", type=at_least(6), default=1000)
    parser.add_argument("--trials", type=at_least(100), default=6000)
    parser.add_argument("--seed", type=at_least(0), default=1)
    parser.add_argument("--output", type=Path, default=Path("outputs/answers.json"))
    parser.add_argument("--page", type=Path)
    args = parser.parse_args(argv)
    prepare_file(args.output)
    if args.page is not None:
        check_page(args.page, "answers")
    logging.getLogger("flwr").setLevel(logging.WARNING)  # a line for each answer
    each = math.ceil(args.evaluations / len(LIES))
    covered = [coverage(lie, each, args.seed + i) for i, lie in enumerate(LIES)]
    composed = [composition(400, k) for k in (0, 1, 10, 40)]
    attacks = [
        attacked(name, per_class, args.trials, args.seed)
        for name in MECHANISMS
        for per_class in ((False, True) if name == "as it is" else (False,))
    ]
    text = markdown(covered, composed, attacks)
    Console().print(Markdown(text))
    told = {
        "coverage": [vars(one) for one in covered],
        "composition": [vars(one) for one in composed],
        "attacks": [vars(one) for one in attacks],
    }
    args.output.write_text(json.dumps(told, indent=2) + "\n")
    if args.page is not None:
        publish(args.page, "answers", text)
    good = sum(c.held for c in covered) >= 0.95 * sum(c.trials for c in covered)
    good &= all(abs(c.ours - c.theirs) <= 0.01 * c.theirs for c in composed)
    good &= all(a.holds == (a.mechanism == "as it is") for a in attacks)
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
