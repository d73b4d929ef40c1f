"""Draw the picture of the README: ``python -m simulations.studies.picture``.

The paper's task, one or three of seven clients hostile, every client with the same
privacy, under an attack of the paper and under the strongest that we ship; the only
things that differ are how many are hostile and what the server does with what it
receives.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from rich.progress import track

from simulations.command import Parser, at_least, complaining, prepare_picture
from simulations.engines import run
from simulations.results import record
from simulations.results.plots import Curve, panels
from simulations.results.schema import RunRecord

ATTACKS = {
    "FOE, an attack of the paper": "attack=foe",
    "the strongest attack that we ship": "attack=strongest",
}
UNHARMED = "averaging, nobody hostile"
METHODS = {
    UNHARMED: ["experiment=dp-dsgd"],
    "SMEA, 1 of 7 hostile": [
        "experiment=paper",
        "aggregation=smea",
        "num_malicious_nodes=1",
    ],
    "SMEA, 3 of 7 hostile": ["experiment=paper", "aggregation=smea"],
    "averaging, 1 of 7 hostile": [
        "experiment=paper",
        "aggregation=average",
        "num_malicious_nodes=1",
    ],
}


def overrides(method: str, attack: str, seed: int) -> list[str]:
    """Return the configuration of one run."""
    attacked = method != UNHARMED
    return [*METHODS[method], *[attack] * attacked, f"seed={seed}"]


def picture(runs: dict[str, dict[str, list[RunRecord]]]) -> Figure:
    """Draw accuracy by step, a panel for each attack, mean and deviation over seeds."""
    content = {
        attack: {
            method: Curve(
                np.array(records[0]["evaluations"]["step"], dtype=float),
                np.array([record["evaluations"]["accuracy"] for record in records]),
            )
            for method, records in methods.items()
        }
        for attack, methods in runs.items()
    }
    figure = panels(content, "accuracy")
    figure.axes[0].set_ylim(0.0, 1.0)
    said = [
        run["privacy"]
        for methods in runs.values()
        for records in methods.values()
        for run in records
    ]
    epsilons = sorted({f"{one['epsilon']:.2f}" for one in said})
    figure.suptitle(
        "Every honest client's examples are protected with epsilon = "
        f"{' or '.join(epsilons)} at delta = {said[0]['delta']:g}",
        fontsize=11,
    )
    return figure


@complaining
def main(arguments: Sequence[str] | None = None) -> int:
    """Run, and write the picture."""
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=at_least(1), default=5)
    parser.add_argument("--out", type=Path, default=Path("docs/images/attack.png"))
    options = parser.parse_args(arguments)
    prepare_picture(options.out)
    wanted = [
        (attack, method, overrides(method, ATTACKS[attack], seed))
        for attack in ATTACKS
        for method in METHODS
        for seed in range(1, options.seeds + 1)
    ]
    logging.getLogger("flwr").setLevel(logging.WARNING)
    runs: dict[str, dict[str, list[RunRecord]]] = {
        attack: {method: [] for method in METHODS} for attack in ATTACKS
    }
    for attack, method, chosen in track(wanted, "Running"):
        runs[attack][method].append(record.record(chosen, run(chosen), 0.0))
    for attack, methods in runs.items():
        for method, records in methods.items():
            last = np.mean([r["evaluations"]["accuracy"][-1] for r in records])
            print(f"{attack}; {method}: accuracy {last:.3f}")
    picture(runs).savefig(options.out, dpi=110)
    print(f"Written: {options.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
