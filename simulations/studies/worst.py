"""Settings against the worst attack: ``python -m simulations.study worst``.

A sweep over rules, numbers of adversaries, noise, shares of the labels, schedules,
learning rates and momentums on the paper's task, each under every attack; for each
federation the setting is chosen whose worst attack does least. Both models that a run
may return are judged, the last and the average of the last half, and `attack=lookahead`
aims at either. By default: which attack is the worst for SMEA, from no momentum to the
paper's, with the paper's schedule and with full batches?
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from flwr_safedshb.privacy.plan import PrivacyPlan
from simulations.command import Parser, at_least, between
from simulations.config import SettingsError
from simulations.results.comparison import ATTACK_WORDS
from simulations.results.schema import RunRecord
from simulations.results.tables import Table
from simulations.study import Case, Runs, Section, Study, grid

# Whose worst is meant to be the worst there is, and others to hold it against.
WORST = ("strongest", "target", "lookahead", "lookahead-average")
ATTACKS = {
    **{name: f"attack={name}" for name in ATTACK_WORDS},
    "lookahead": "attack=lookahead +attack.output=last",
    "lookahead-average": "attack=lookahead +attack.output=average",
}
WORDS = {**ATTACK_WORDS, "lookahead-average": "lookahead, at the average"}
# Of the paper's task: examples, delta, and the schedule that the noise is counted in.
EXAMPLES, DELTA, PAPER_BATCH, PAPER_STEPS = 11_055, 1e-4, 25, 400
SCHEDULES = ("paper", "full batch")
FULL_BATCH_RATE = 73.5
# An attack beats another if its loss is higher by more than so many standard errors.
ERRORS = 2.0
# What is chosen before a training, and what nobody chooses.
CHOSEN = ("rule", "rate", "momentum", "schedule", "returned")
FEDERATION = ("nodes", "adversaries", "noise", "shares")
Labels = tuple[str, ...]
# Test losses, a row for each setting, by attack, then by seed.
Losses = Mapping[Labels, Mapping[str, Sequence[float]]]


def add_options(parser: Parser) -> None:
    """Add the values of each axis."""
    whole, some = at_least(1), between(0.0, 1e6)
    parser.add_argument("--rules", nargs="+", default=["smea"], help="aggregation=...")
    parser.add_argument(
        "--attacks", nargs="+", choices=[*ATTACKS], default=["foe", *WORST]
    )
    parser.add_argument("--nodes", type=whole, default=7)
    parser.add_argument("--malicious", nargs="+", type=whole, default=[3])
    parser.add_argument(
        "--noises",
        nargs="+",
        type=some,
        default=[1.0],
        help="multipliers of the paper's schedule; another has the same epsilon",
    )
    parser.add_argument(
        "--alphas", nargs="+", type=float, default=[0.0], help="of Dirichlet; 0: iid"
    )
    parser.add_argument(
        "--schedules", nargs="+", choices=SCHEDULES, default=[*SCHEDULES]
    )
    parser.add_argument(
        "--rates", nargs="+", type=some, default=[1.0], help="times the schedule's own"
    )
    parser.add_argument(
        "--momentums",
        nargs="+",
        type=float,
        default=[0.0, 0.5, 0.8, 0.9, 0.95, 0.99],
    )


def make_cases(args: Namespace) -> Iterable[Case]:
    """Yield all combinations of the settings with all attacks."""
    if 2 * max(args.malicious) >= args.nodes:
        raise SettingsError("--malicious must be less than half of --nodes")
    shares = {
        f"Dirichlet {alpha:g}": f"split=dirichlet split.alpha={alpha:g}"
        if alpha
        else "split=iid"
        for alpha in args.alphas
    }
    for f in args.malicious:
        for schedule in args.schedules:
            size, rate = EXAMPLES // (args.nodes - f), 1.0
            if schedule != "paper":
                rate = FULL_BATCH_RATE
            yield from grid(
                *("experiment=paper", "engine=batched", "output=average"),
                f"num_nodes={args.nodes}",
                f"num_malicious_nodes={f}",
                rule={rule: f"aggregation={rule}" for rule in args.rules},
                adversaries={f"{f}": ""},
                nodes={f"{args.nodes}": ""},
                noise={f"{s:g}": _spend(schedule, size, s) for s in args.noises},
                shares={
                    "iid" if a == "Dirichlet 0" else a: v for a, v in shares.items()
                },
                schedule={schedule: ""},
                rate={
                    f"{x:g}": f"server_learning_rate={x * rate:g}" for x in args.rates
                },
                momentum={f"{x:g}": f"momentum={x:g}" for x in args.momentums},
                attack={attack: ATTACKS[attack] for attack in args.attacks},
            )


def _spend(schedule: str, size: int, noise: float) -> str:
    """Return the overrides of a schedule that spends what the paper's does."""
    if schedule == "paper":
        return f"privacy.plan.noise_multiplier={noise:g}"
    spent = PrivacyPlan(1.0, noise, PAPER_BATCH, size).epsilon(PAPER_STEPS, DELTA)
    return (
        f"privacy.target_epsilon={spent:.6g} privacy.plan.batch_size={size} "
        "privacy.plan.clip_norm=0.15 steps=60"
    )


def final_losses(runs: Runs[RunRecord]) -> Losses:
    """Return test losses of the last model and of the average, by seed."""
    found: dict[Labels, dict[str, list[float]]] = {}
    for case, run in runs.items():
        for returned, loss in (
            ("last", run["evaluations"]["test_loss"][-1]),
            ("average", run["returned"]["test_loss"]),
        ):
            labels = {**case.labels, "returned": returned}
            setting = tuple(labels[axis] for axis in (*CHOSEN, *FEDERATION))
            by_attack = found.setdefault(setting, {})
            by_attack.setdefault(case.labels["attack"], []).append(loss)
    return found


def stronger_attacks(by_attack: Mapping[str, Sequence[float]]) -> list[str]:
    """Return the attacks that leave a clearly higher loss than the worst is to."""
    known = {attack: by_attack[attack] for attack in WORST if attack in by_attack}
    if not known:
        return []
    most = by_attack[worst_attack(known)[1]]
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


def describe(setting: Labels) -> list[str]:
    """Return the cells that name a setting."""
    rule, rate, momentum, schedule, returned, nodes, f, noise, shares = setting
    federation = f"f = {f} of {nodes}, noise {noise}, {shares}"
    own = "" if rate == "1" else f", rate x {rate}"
    return [rule, federation, f"{schedule}{own}", momentum, returned]


HEADS = ("rule", "federation", "schedule", "beta", "returned")


def report(runs: Runs[RunRecord]) -> Iterator[Section]:
    """Yield losses under all attacks, and which setting to choose."""
    found, attacks = final_losses(runs), runs.labels("attack")
    rows, stronger = [], []
    for setting, by_attack in found.items():
        name, worst = describe(setting), worst_attack(by_attack)[1]
        cells = [
            f"**{np.mean(by_attack[a]):.3f}**"
            if a == worst
            else f"{np.mean(by_attack[a]):.3f}"
            for a in attacks
        ]
        rows.append([*name, *cells])
        more = stronger_attacks(by_attack)
        stronger += [f"{', '.join(name)}: {WORDS[a]}" for a in more]
    told = "; ".join(stronger) or "none"
    yield Section(
        "Losses under every attack",
        f"Test loss of the last model and of the average, means of seeds {runs.seeds}; "
        "the worst is bold.",
        Table([*HEADS, *(WORDS[a] for a in attacks)], rows),
        notes=f"Of {len(found)} rows, these leave a loss above that of the worst of "
        f"{', '.join(WORDS[a] for a in WORST if a in attacks)} by more than "
        f"{ERRORS:g} standard errors: {told}.",
    )
    best = []
    for setting in choose_settings(found):
        loss, attack = worst_attack(found[setting])
        best.append([*describe(setting), WORDS[attack], f"{loss:.3f}"])
    yield Section(
        "The setting whose worst attack does least",
        "For each federation.",
        Table([*HEADS, "worst attack", "loss"], best),
    )


study = Study(
    "worst",
    "Safe-DSHB against the worst attack",
    "Which rule, schedule, learning rate and momentum keep most under the attack that "
    "is worst for them?",
    make_cases,
    seeds=(11, 12, 13),
    report=report,
    page="docs/robustness.md",
    add_options=add_options,
)
