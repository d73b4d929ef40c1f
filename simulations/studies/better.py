"""In search of a better rule: ``python -m simulations.study better``.

SMEA on the paper's task beside what might keep more of a training: the min-max point,
the mean of all models, screening of what nodes claim, and other ways to spend the same
epsilon. Each is attacked by colluders who know it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np

from flwr_safedshb.aggregation import SMEA, GramRule
from flwr_safedshb.aggregation.rule import FloatArray
from flwr_safedshb.attacks import Strongest
from flwr_safedshb.privacy.plan import PrivacyPlan
from flwr_safedshb.theory import heterogeneity
from simulations.attacks import Tireless
from simulations.results.schema import RunRecord
from simulations.results.statistics import late
from simulations.results.tables import Table
from simulations.rules import MinMaxPoint
from simulations.study import Case, Runs, Section, Study, grid

FEDERATIONS = ((7, 1), (7, 2), (7, 3), (10, 2))
NOISES = (1.0, 2.0, 3.0)
MOMENTUMS = (0.95, 0.99)
# Of the paper's task: all examples, the numbers of the model, and of a step.
EXAMPLES, DIMENSION, CLIP, BATCH, STEPS, DELTA = 11_055, 69, 1.0, 25, 400, 1e-4
RULES = {"SMEA": "", "min-max": "aggregation._target_=simulations.rules.MinMaxPoint"}
USUAL = "usual"
# Other ways to spend the same epsilon: batch, steps, learning rate.
SCHEDULES = {
    "batch 400": (400, STEPS, 1.0),
    "100 steps": (BATCH, 100, 2.0),
    "batch 400, 100 steps": (400, 100, 2.0),
    "rate 0.25": (BATCH, STEPS, 0.25),
}
AXES = ("federation", "noise", "momentum")
# What reach() tries: far is in units of an honest vector.
REACH_RULES: dict[str, SMEA | MinMaxPoint] = {"SMEA": SMEA(), "min-max": MinMaxPoint()}
REACH_SEEDS, REPETITIONS, FAR = 5, 20, 100.0


@cache
def epsilon_of(n: int, f: int, noise: float) -> float:
    """Return what the usual schedule costs a node."""
    plan = PrivacyPlan(CLIP, noise, BATCH, EXAMPLES // (n - f))
    return plan.epsilon(STEPS, DELTA)


def bound_claims(noise: float) -> float:
    """Return the longest gradient that a node may claim: its clip and its noise.

    Noise of deviation s is longer than s (sqrt(d) + 5.4) once in two million times.
    """
    noise_std = 2.0 * CLIP * noise / BATCH
    return CLIP + noise_std * (math.sqrt(DIMENSION) + 5.4)


def make_cases(n: int, f: int, noise: float, momentum: float) -> Iterator[Case]:
    """Yield the runs of a federation, its noise and its momentum.

    Rules are tried in all settings; outputs and screening with seven clients; schedules
    also with little or much noise alone.
    """
    target = "attack._target_=simulations.attacks."
    # Those who search in every step need not look along all rays so often.
    attacks = {
        "strongest": "+attack.every=4",
        "tireless": f"+attack.every=8 {target}Tireless",
        "aimed": f"+attack.every=8 {target}AimedAtMean",
        "screened": f"+attack.every=8 {target}Screened +attack.momentum={momentum:g} "
        f"+attack.bound={bound_claims(noise):.4g}",
    }
    schedules = {
        name: f"privacy.plan.batch_size={batch} steps={steps} "
        f"privacy.target_epsilon={epsilon_of(n, f, noise):.6g} "
        f"server_learning_rate={rate:g} evaluate_every={steps // 40}"
        for name, (batch, steps, rate) in SCHEDULES.items()
    }
    usual = {USUAL: f"privacy.plan.noise_multiplier={noise:g}"}
    common = ("experiment=paper", "split=iid", f"momentum={momentum:g}")
    setting = {
        "federation": {f"{n}, {f}": ""},
        "noise": {f"{noise:g}": ""},
        "momentum": {f"{momentum:g}": ""},
    }
    alone = f"num_nodes={n - f} num_malicious_nodes=0 attack=none aggregation=average"
    yield from grid(
        *common, **setting, schedule=usual, rule={"": ""}, attack={"no attack": alone}
    )

    def attacked(
        rules: Sequence[str], some: Sequence[str], spent: Mapping[str, str]
    ) -> list[Case]:
        return grid(
            *common,
            *(f"num_nodes={n}", f"num_malicious_nodes={f}", "aggregation=smea"),
            # The steps are the same, whether their last or their mean is returned.
            *("attack=strongest", "output=average"),
            **setting,
            schedule=spent,
            rule={rule: RULES[rule] for rule in rules},
            attack={attack: attacks[attack] for attack in some},
        )

    yield from attacked([*RULES], ["strongest", "tireless"], usual)
    if n != FEDERATIONS[0][0]:
        return
    yield from attacked(["SMEA"], ["aimed", "screened"], usual)
    if noise in (NOISES[0], NOISES[-1]):
        yield from attacked(["SMEA"], ["strongest", "tireless"], schedules)
        larger = {"batch 400": schedules["batch 400"]}
        yield from attacked(["SMEA"], ["aimed"], larger)


@dataclass(frozen=True)
class Method:
    """What is tried: its runs, and whether the last model or the mean is returned."""

    words: str
    rule: str
    attacks: tuple[str, ...]
    schedule: str = USUAL
    averaged: bool = False

    def measure(self, runs: Runs[RunRecord]) -> tuple[float, float] | None:
        """Return loss and accuracy under its worst attack, means over the seeds."""
        found = []
        for attack in self.attacks:
            mine = [
                run
                for case, run in runs.items()
                if [case.labels[k] for k in ("rule", "attack", "schedule")]
                == [self.rule, attack, self.schedule]
            ]
            if not mine:
                return None
            found.append(self._average(mine))
        return max(found)

    def _average(self, runs: Sequence[RunRecord]) -> tuple[float, float]:
        if self.averaged:
            returned = [run["returned"] for run in runs]
            losses = np.mean([one["test_loss"] for one in returned])
            return float(losses), float(np.mean([one["accuracy"] for one in returned]))
        loss, accuracy = (late(runs, it).mean() for it in ("test_loss", "accuracy"))
        return float(loss), float(accuracy)


NO_ATTACK = Method("no attack", "", ("no attack",))
_ANY, _MEAN = ("strongest", "tireless"), ("strongest", "tireless", "aimed")
OF_RULES = (
    Method("SMEA", "SMEA", _ANY),
    Method("min-max point", "min-max", _ANY),
    Method("SMEA, screened", "SMEA", ("screened",)),
    Method("SMEA, averaged", "SMEA", _MEAN, averaged=True),
)
OF_SCHEDULES = (
    OF_RULES[0],
    *(Method(name, "SMEA", _ANY, name) for name in SCHEDULES),
    Method("batch 400, averaged", "SMEA", _MEAN, "batch 400", averaged=True),
)


def compare(title: str, runs: Runs[RunRecord], methods: Sequence[Method]) -> Section:
    """Return a table with a row for each setting, and what each method keeps."""
    first = np.mean([run["evaluations"]["test_loss"][0] for run in runs.values()])
    rows: list[list[str]] = []
    kept: dict[str, list[tuple[float, float]]] = {it.words: [] for it in methods}
    for labels in dict.fromkeys(tuple(c.labels[a] for a in AXES) for c in runs):
        mine = runs.where(**dict(zip(AXES, labels, strict=True)))
        alone = NO_ATTACK.measure(mine)
        found = [method.measure(mine) for method in methods]
        if alone is None or found[0] is None or found[1] is None:
            continue
        cells = ["" if one is None else f"{one[0]:.3f} / {one[1]:.3f}" for one in found]
        n, f = map(int, labels[0].split(","))
        spent = f"{epsilon_of(n, f, float(labels[1])):.3g}"
        rows.append([*labels, spent, f"{alone[0]:.3f} / {alone[1]:.3f}", *cells])
        for method, one in zip(methods, found, strict=True):
            if one is not None:
                both = np.array([one[0], found[0][0]])
                own, plain = (first - both) / (first - alone[0])
                kept[method.words].append((own, plain))
    heads = ["n, f", "noise", "beta", "epsilon", NO_ATTACK.words, *kept]
    text = (
        "Loss / accuracy on the test set under the worst of the attacks that know the "
        f"method, seeds {runs.seeds}: means over the last quarter of the steps, or of "
        "the mean of all models where it says averaged."
    )
    return Section(title, text, Table(heads, rows), notes=_summarise(kept).markdown)


def _summarise(kept: Mapping[str, Sequence[tuple[float, float]]]) -> Table:
    """Return for each method how much of the progress stays, of SMEA's beside it."""
    rows = []
    for words, pairs in kept.items():
        if pairs:
            own, other = np.array(pairs).T
            means = [f"{share.clip(0, 1).mean():.0%}" for share in (own, other)]
            counts = [np.sum(own >= 0.5), np.sum(own > other)]
            rows.append([words, *means, *(f"{k} of {len(own)}" for k in counts)])
    heads = ["method", "progress kept, mean", "of SMEA there", "half or more"]
    return Table([*heads, "more than SMEA"], rows)


def reach(rule: GramRule, n: int, f: int, seed: int) -> tuple[float, float, float]:
    """Return how far a rule's output moves in one step, in roots of lambda.

    Honest vectors are noise alone. Along a given direction, by colluders who stand far
    away that way, by `Strongest`, and by `Tireless`.
    """
    rng = np.random.default_rng([seed, n, f])
    honest = rng.normal(size=(n - f, DIMENSION))
    direction = rng.normal(size=DIMENSION)
    direction /= np.linalg.norm(direction)
    mean, top = honest.mean(axis=0), heterogeneity(honest)[1]

    def moved(sent: FloatArray) -> float:
        out = rule(np.concatenate((honest, sent)), f)
        return float((out - mean) @ direction / top)

    far = np.tile(mean + FAR * np.sqrt(DIMENSION) * direction, (f, 1))
    tireless = Tireless(gradient=-direction)
    for _ in range(REPETITIONS):
        last = tireless.craft_vectors(honest, f, rng, rule)
    strongest = Strongest(gradient=-direction).craft_vectors(honest, f, rng, rule)
    return moved(far), moved(strongest), moved(last)


def tabulate_reach() -> Table:
    """Return what both rules let through, and what their constants allow."""
    rows = []
    for n, f in FEDERATIONS:
        cells = [f"{n}, {f}", f"{np.sqrt(f / (n - 2 * f)):.2f}"]
        for rule in REACH_RULES.values():
            found = [reach(rule, n, f, seed) for seed in range(REACH_SEEDS)]
            means = np.mean(found, axis=0)
            figures = np.round([*means, np.sqrt(rule.kappa(n, f))], 2)
            cells += [f"{abs(value):.2f}" for value in figures]
        rows.append(cells)
    heads = ["n, f", "√(f/(n-2f))"]
    for words in REACH_RULES:
        heads += [f"{words}: far away", "strongest", "tireless", "√κ"]
    return Table(heads, rows)


def report(runs: Runs[RunRecord]) -> Iterator[Section]:
    """Yield what one step lets through, and what rules and schedules keep."""
    text = "Where honest vectors are noise alone, in roots of their top eigenvalue."
    yield Section("How far one step goes", text, tabulate_reach())
    yield compare("Rules and outputs", runs, OF_RULES)
    yield compare("Ways to spend the same epsilon", runs, OF_SCHEDULES)


study = Study(
    "better",
    "In search of a better rule",
    "What keeps more of a training than SMEA, each attacked by colluders who know it?",
    [
        case
        for (n, f), noise, momentum in product(FEDERATIONS, NOISES, MOMENTUMS)
        for case in make_cases(n, f, noise, momentum)
    ],
    seeds=(1,),
    report=report,
    page="docs/robustness.md",
)
