"""What rules, outputs and schedules keep of a training under their worst attacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from simulations.results.schema import RunRecord
from simulations.results.summary import late, table
from simulations.studies.better.cases import SCHEDULES, Case, Setting

Runs = Mapping[Case, RunRecord]


@dataclass(frozen=True)
class Method:
    """What is tried: its runs, and whether the last model or the mean is returned."""

    words: str
    rule: str
    attacks: tuple[str, ...]
    schedule: str = ""
    averaged: bool = False

    def loss(self, runs: Runs, setting: Setting) -> tuple[float, float] | None:
        """Return loss and accuracy under its worst attack, means over the seeds."""
        found = []
        for attack in self.attacks:
            mine = [
                run
                for case, run in runs.items()
                if (case.setting, case.rule, case.attack, case.schedule)
                == (setting, self.rule, attack, self.schedule)
            ]
            if not mine:
                return None
            found.append(_measured(mine, self.averaged))
        return max(found)


NO_ATTACK = Method("no attack", "", ("",))
_ANY, _MEAN = ("strongest", "tireless"), ("strongest", "tireless", "aimed")
RULES = (
    Method("SMEA", "SMEA", _ANY),
    Method("min-max point", "min-max", _ANY),
    Method("SMEA, screened", "SMEA", ("screened",)),
    Method("SMEA, averaged", "SMEA", _MEAN, averaged=True),
)
SPENT = (
    RULES[0],
    *(Method(name, "SMEA", _ANY, name) for name in SCHEDULES if name),
    Method("batch 400, averaged", "SMEA", _MEAN, "batch 400", averaged=True),
)


def _measured(runs: Sequence[RunRecord], averaged: bool) -> tuple[float, float]:
    if averaged:
        losses = [run["returned"]["test_loss"] for run in runs]
        accuracies = [run["returned"]["accuracy"] for run in runs]
        return float(np.mean(losses)), float(np.mean(accuracies))
    loss, accuracy = (late(runs, it).mean() for it in ("test_loss", "accuracy"))
    return float(loss), float(accuracy)


def first_loss(runs: Runs) -> float:
    """Return the loss before the first step."""
    return float(np.mean([r["evaluations"]["test_loss"][0] for r in runs.values()]))


def markdown(runs: Runs) -> str:
    """Return both tables, and what each method keeps."""
    seeds = sorted({case.seed for case in runs})
    told = (
        "Loss / accuracy on the test set under the worst of the attacks that know the "
        f"method, seeds {seeds}: means over the last quarter of the steps, or of the "
        "mean of all models where it says averaged."
    )
    return "\n".join(
        [told, "", *_compared(runs, RULES), "", *_compared(runs, SPENT), ""]
    )


def _compared(runs: Runs, methods: Sequence[Method]) -> list[str]:
    """Return a table with a row for each setting, then what each method keeps."""
    first, rows = first_loss(runs), []
    kept: dict[str, list[tuple[float, float]]] = {it.words: [] for it in methods}
    for it in dict.fromkeys(case.setting for case in runs):
        alone = NO_ATTACK.loss(runs, it)
        found = [method.loss(runs, it) for method in methods]
        if alone is None or found[0] is None or found[1] is None:
            continue
        cells = ["" if one is None else f"{one[0]:.3f} / {one[1]:.3f}" for one in found]
        heads = [f"{it.n}, {it.f}", f"{it.noise:g}", f"{it.momentum:g}"]
        heads += [f"{it.epsilon:.3g}", f"{alone[0]:.3f} / {alone[1]:.3f}"]
        rows.append([*heads, *cells])
        for method, one in zip(methods, found, strict=True):
            if one is not None:
                both = np.array([one[0], found[0][0]])
                own, plain = (first - both) / (first - alone[0])
                kept[method.words].append((own, plain))
    heads = ["n, f", "noise", "beta", "epsilon", NO_ATTACK.words, *kept]
    return [*table(heads, rows), "", *table(["", *_KEPT], _shares(kept))]


_KEPT = ("progress kept, mean", "of SMEA there", "half or more", "more than SMEA")


def _shares(kept: Mapping[str, Sequence[tuple[float, float]]]) -> list[list[str]]:
    """Return for each method how much of the progress stays, of SMEA's beside it."""
    rows = []
    for words, pairs in kept.items():
        if pairs:
            own, other = np.array(pairs).T
            means = [f"{share.clip(0, 1).mean():.0%}" for share in (own, other)]
            counts = [np.sum(own >= 0.5), np.sum(own > other)]
            rows.append([words, *means, *(f"{k} of {len(own)}" for k in counts)])
    return rows
