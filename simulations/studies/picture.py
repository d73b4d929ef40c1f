"""The picture of the README: ``python -m simulations.study picture``.

The paper's task, one or three of seven clients hostile, every client with the same
privacy, under an attack of the paper and under the strongest that we ship; the only
things that differ are how many are hostile and what the server does with what it
receives. ``cp outputs/picture/figures/attack.png docs/images/`` puts it there.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from matplotlib.figure import Figure

from simulations.results import plots
from simulations.results.schema import RunRecord
from simulations.results.statistics import curve
from simulations.results.tables import Table
from simulations.study import Runs, Section, Study, grid

ATTACKS = {
    "FOE, an attack of the paper": "attack=foe",
    "the strongest attack that we ship": "attack=strongest",
}
METHODS = {
    "SMEA, 1 of 7 hostile": "aggregation=smea num_malicious_nodes=1",
    "SMEA, 3 of 7 hostile": "aggregation=smea",
    "averaging, 1 of 7 hostile": "aggregation=average num_malicious_nodes=1",
}
NO_ATTACK = {"averaging, nobody hostile": "experiment=dp-dsgd"}


def draw_picture(runs: Runs[RunRecord]) -> Figure:
    """Draw accuracy by step, a panel for each attack, mean and deviation over seeds."""
    content = {
        attack: {k: curve(v, "accuracy") for k, v in some.groups("method").items()}
        for attack, some in runs.by("attack").items()
    }
    figure = plots.panels(content, "accuracy")
    figure.axes[0].set_ylim(0.0, 1.0)
    said = [run["privacy"] for run in runs.values()]
    epsilons = sorted({f"{one['epsilon']:.2f}" for one in said})
    figure.suptitle(
        "Every honest client's examples are protected with epsilon = "
        f"{' or '.join(epsilons)} at delta = {said[0]['delta']:g}",
        fontsize=11,
    )
    return figure


def report(runs: Runs[RunRecord]) -> Iterator[Section]:
    """Yield the picture, and the last accuracies."""
    rows = [
        [
            attack,
            method,
            f"{np.mean([r['evaluations']['accuracy'][-1] for r in some]):.3f}",
        ]
        for attack, by_attack in runs.by("attack").items()
        for method, some in by_attack.groups("method").items()
    ]
    yield Section(
        "Accuracy after the last step",
        table=Table(["attack", "method", "accuracy"], rows),
        figures={"attack": draw_picture(runs)},
    )


study = Study(
    "picture",
    "Training under attack",
    "How accurate are SMEA and averaging when some of seven clients are hostile?",
    [
        *grid(attack={"": ""}, method=NO_ATTACK),
        *grid("experiment=paper", attack=ATTACKS, method=METHODS),
    ],
    seeds=(1, 2, 3, 4, 5),
    report=report,
)
