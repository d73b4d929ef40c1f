"""Settings against the worst attack: ``python -m simulations.study worst``.

A sweep over rules, numbers of adversaries, noise, shares of the labels, learning rates
and momentums on the paper's task, each under every attack, with heatmaps; for each
federation the setting is chosen whose worst attack does least. By default: is strongest
the worst of all attacks, for four rules at three privacy levels?
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from simulations.command import Parser, at_least, between
from simulations.config import SettingsError
from simulations.results import plots
from simulations.results.comparison import ATTACK_WORDS
from simulations.results.schema import RunRecord
from simulations.results.statistics import late
from simulations.results.tables import Table
from simulations.study import Case, Runs, Section, Study, grid

RULES = ("smea", "filter", "trimmed-mean", "geometric-median")
# An attack beats another if its loss is higher by more than so many standard errors.
ERRORS = 2.0
# What is chosen before a training, and what nobody chooses.
CHOSEN = ("rule", "rate", "momentum")
FEDERATION = ("nodes", "adversaries", "noise", "shares")
Labels = tuple[str, ...]
# Late training losses, a row for each setting, by attack, then by seed.
Losses = Mapping[Labels, Mapping[str, Sequence[float]]]


def add_options(parser: Parser) -> None:
    """Add the values of each axis."""
    whole, some = at_least(1), between(0.0, 1e6)
    parser.add_argument("--rules", nargs="+", default=RULES, help="aggregation=...")
    parser.add_argument(
        "--attacks", nargs="+", choices=[*ATTACK_WORDS], default=[*ATTACK_WORDS]
    )
    parser.add_argument("--nodes", type=whole, default=7)
    parser.add_argument("--malicious", nargs="+", type=whole, default=[3])
    parser.add_argument("--noises", nargs="+", type=some, default=[1.0, 2.0, 3.0])
    parser.add_argument(
        "--alphas", nargs="+", type=float, default=[0.0], help="of Dirichlet; 0: iid"
    )
    parser.add_argument("--rates", nargs="+", type=some, default=[1.0])
    parser.add_argument("--momentums", nargs="+", type=float, default=[0.99])


def make_cases(args: Namespace) -> Iterable[Case]:
    """Return all combinations of the settings with all attacks."""
    if 2 * max(args.malicious) >= args.nodes:
        raise SettingsError("--malicious must be less than half of --nodes")

    def axis(key: str, values: Sequence[float]) -> dict[str, str]:
        return {f"{value:g}": f"{key}={value:g}" for value in values}

    shares = {
        f"Dirichlet {alpha:g}": f"split=dirichlet split.alpha={alpha:g}"
        if alpha
        else "split=iid"
        for alpha in args.alphas
    }
    return grid(
        "experiment=paper",
        rule={rule: f"aggregation={rule}" for rule in args.rules},
        adversaries=axis("num_malicious_nodes", args.malicious),
        nodes=axis("num_nodes", [args.nodes]),
        noise=axis("privacy.plan.noise_multiplier", args.noises),
        shares={"iid" if k == "Dirichlet 0" else k: v for k, v in shares.items()},
        rate=axis("server_learning_rate", args.rates),
        momentum=axis("momentum", args.momentums),
        attack=args.attacks,
    )


def late_losses(runs: Runs[RunRecord]) -> Losses:
    """Return training losses over the last quarter of the steps, by seed."""
    found: dict[Labels, dict[str, list[float]]] = {}
    for case, run in runs.items():
        setting = tuple(case.labels[axis] for axis in (*CHOSEN, *FEDERATION))
        by_attack = found.setdefault(setting, {})
        value = float(late([run], "training_loss")[0])
        by_attack.setdefault(case.labels["attack"], []).append(value)
    return found


def stronger_attacks(by_attack: Mapping[str, Sequence[float]]) -> list[str]:
    """Return the attacks that leave a clearly higher loss than the strongest does."""
    most = by_attack.get("strongest")
    if most is None:
        return []
    found = []
    for attack, values in by_attack.items():
        apart = float(np.mean(values) - np.mean(most))
        # Seeds are the same for all attacks, so that differences are what varies.
        gaps = np.asarray(values) - np.asarray(most)
        error = gaps.std(ddof=1) / np.sqrt(len(gaps)) if len(gaps) > 1 else 0.0
        if apart > ERRORS * error and apart > 1e-3:
            found.append(attack)
    return found


def worst_attack(by_attack: Mapping[str, Sequence[float]]) -> tuple[float, str]:
    """Return the highest loss that an attack leaves, and that attack."""
    return max((float(np.mean(v)), attack) for attack, v in by_attack.items())


def choose_settings(found: Losses) -> list[Labels]:
    """Return, for each federation, the setting whose worst attack does least."""
    best: dict[Labels, Labels] = {}
    for setting in sorted(found, key=lambda one: worst_attack(found[one])[0]):
        best.setdefault(setting[len(CHOSEN) :], setting)
    return [setting for setting in found if setting in best.values()]


def describe(setting: Labels) -> str:
    """Return a setting in words, its rule left out."""
    _, rate, momentum, nodes, f, noise, shares = setting
    return (
        f"f = {f} of {nodes}, noise {noise}, {shares}, rate {rate}, momentum {momentum}"
    )


def report(runs: Runs[RunRecord]) -> Iterator[Section]:
    """Yield heatmaps and losses of all settings, and which setting to choose."""
    found, attacks = late_losses(runs), runs.labels("attack")
    words = [ATTACK_WORDS[attack] for attack in attacks]
    rows, stronger, maps = [], [], {}
    for setting, by_attack in found.items():
        cells = [f"{np.mean(by_attack[a]):.3f}" for a in attacks]
        name, worst = describe(setting), worst_attack(by_attack)[1]
        rows.append([setting[0], name, *cells, ATTACK_WORDS[worst]])
        more = stronger_attacks(by_attack)
        stronger += [f"{setting[0]}, {name}: {ATTACK_WORDS[a]}" for a in more]
    for rule in runs.labels("rule"):
        mine = {it: losses for it, losses in found.items() if it[0] == rule}
        values = np.array([[np.mean(v[a]) for a in attacks] for v in mine.values()])
        names = [describe(it) for it in mine]
        title = f"{rule}: training loss"
        maps[title] = plots.heatmap(values, names, words, title)
    best = []
    for setting in choose_settings(found):
        loss, attack = worst_attack(found[setting])
        best.append(
            [setting[0], describe(setting), ATTACK_WORDS[attack], f"{loss:.3f}"]
        )
    yield Section(
        "The setting whose worst attack does least",
        "For each federation.",
        Table(["rule", "setting", "worst attack", "loss"], best),
    )
    told = "; ".join(stronger) or "none"
    yield Section(
        "Losses under every attack",
        "Training loss, mean over the last quarter of the steps, seeds "
        f"{runs.seeds}: a model with momentum swings, and where the last step catches "
        "it is chance.",
        Table(["rule", "setting", *words, "worst"], rows),
        figures=maps,
        notes=""
        if "strongest" not in attacks
        else f"Of {len(found) * (len(attacks) - 1)} pairs of setting and other attack, "
        "these leave a loss above that of strongest by more than "
        f"{ERRORS:g} standard errors: {told}.",
    )


study = Study(
    "worst",
    "Safe-DSHB against the worst attack",
    "Which rule, learning rate and momentum keep most under the attack that is worst "
    "for them?",
    make_cases,
    seeds=(1, 2, 3, 4, 5),
    report=report,
    page="docs/robustness.md",
    add_options=add_options,
)
