"""Schedules at equal epsilon, under the worst attack: ``... study schedules``.

The paper's task with the paper's schedule and with tuned ones, and larger federations
beside a client that trains alone at the same epsilon. The tuned schedules were found on
seeds 101 to 106 under the target attack and strongest, so the seeds here are new.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from matplotlib.figure import Figure

from simulations.results import plots
from simulations.results.comparison import ATTACK_WORDS
from simulations.results.schema import RunRecord
from simulations.results.statistics import MeanStd, curve, final, mean_std
from simulations.results.tables import Table
from simulations.study import Case, Runs, Section, Study, grid

EXAMPLES = 11_055
PAPER, TUNED, ALONE = "the paper's", "tuned", "a client alone"
# The attacks that do the most harm to some schedule; all of them attack one federation.
WORST = ("target", "strongest")


@dataclass(frozen=True)
class Federation:
    """A federation on the paper's task, and the schedule that was found for it.

    Attributes
    ----------
    n, f : int
    epsilon : float
        At delta 1e-4, by calibrated noise.
    schedule : tuple
        T, gamma, beta and C, full batches with a linear decay.
    compares : bool
        Whether the paper's schedule is tried as well.
    """

    n: int
    f: int
    epsilon: float
    schedule: tuple[int, float, float, float]
    compares: bool = False

    @property
    def m(self) -> int:
        """Examples of each honest client, who share all of them."""
        return EXAMPLES // (self.n - self.f)

    def __str__(self) -> str:
        return f"n = {self.n}, f = {self.f}, epsilon {self.epsilon:g}"


SHORT = (32, 270.0, 0.8, 0.19)
FEDERATIONS = (
    Federation(7, 3, 1.0, SHORT, compares=True),
    Federation(7, 2, 1.0, (49, 540.0, 0.84, 0.12)),
    Federation(7, 2, 0.3, (30, 570.0, 0.81, 0.085)),
    Federation(20, 4, 1.0, SHORT),
    Federation(20, 4, 3.0, SHORT),
    Federation(50, 5, 1.0, SHORT),
    Federation(50, 5, 3.0, SHORT),
)
# Found for clients alone, on the same seeds.
ALONE_SCHEDULE = (50, 110.0, 0.6, 0.12)


def describe_schedule(schedule: tuple[int, float, float, float], m: int) -> str:
    """Return the overrides of a schedule with full batches of m examples."""
    steps, rate, momentum, clip = schedule
    return (
        f"schedule=linear steps={steps} server_learning_rate={rate:g} "
        f"momentum={momentum:g} privacy.plan.clip_norm={clip:g} "
        f"privacy.plan.batch_size={m}"
    )


def make_cases() -> Iterator[Case]:
    """Yield every federation under attack, and one of its clients alone."""
    for one in FEDERATIONS:
        rule = "smea" if one.n < 20 else "filter"
        common = (
            "experiment=paper",
            "engine=batched",
            f"privacy.target_epsilon={one.epsilon:g}",
        )
        attacked = f"num_nodes={one.n} num_malicious_nodes={one.f} aggregation={rule} "
        schedules = {TUNED: f"output=average {describe_schedule(one.schedule, one.m)}"}
        if one.compares:
            schedules[PAPER] = "output=average"
        for name, text in schedules.items():
            every = name == TUNED and one is FEDERATIONS[0]
            # What is searched among many clients is searched anew every few steps.
            slow = "+attack.every=4" if one.n >= 20 else ""
            chosen = ATTACK_WORDS if every else WORST
            # The worst for an average of the paper's schedule, whose runs take long.
            chosen = WORST[:1] if name == PAPER else chosen
            attacks = {attack: f"attack={attack} {slow}" for attack in chosen}
            yield from grid(
                *common,
                federation={str(one): attacked},
                schedule={name: text},
                attack=attacks,
            )
        alone = (
            "num_nodes=1 num_malicious_nodes=0 aggregation=average attack=none "
            f"split=unequal split.sizes=[{one.m}] "
        )
        yield from grid(
            *common,
            federation={str(one): alone},
            schedule={ALONE: describe_schedule(ALONE_SCHEDULE, one.m)},
            attack={"none": ""},
        )


def last(runs: list[RunRecord]) -> MeanStd:
    """Return the accuracy after the last step."""
    return mean_std([run["evaluations"]["accuracy"][-1] for run in runs])


def find_worst(groups: dict[str, list[RunRecord]]) -> str:
    """Return the attack that leaves the lowest mean accuracy."""
    return min(groups, key=lambda attack: final(groups[attack]).mean)


def draw_schedules(runs: Runs[RunRecord]) -> Figure:
    """Draw the accuracy of both schedules under the target attack, by step."""
    first = runs.where(federation=str(FEDERATIONS[0]), attack=WORST[0])
    groups = first.groups("schedule")
    content = {
        f"{schedule} schedule": {"target attack": curve(groups[schedule], "accuracy")}
        for schedule in (PAPER, TUNED)
        if schedule in groups
    }
    figure = plots.panels(content, "accuracy")
    figure.axes[0].set_ylim(0.0, 1.0)
    return figure


def report(runs: Runs[RunRecord]) -> Iterator[Section]:
    """Yield the worst attack on each schedule, and whether federating pays."""
    rows, pays = [], []
    for federation, some in runs.by("federation").items():
        found = {}
        for schedule, its in some.by("schedule").items():
            groups = its.groups("attack")
            worst = groups[find_worst(groups)]
            found[schedule] = final(worst)
            if schedule != ALONE:
                shakiest = min((last(group) for group in groups.values()), key=_mean)
                loss = mean_std([run["returned"]["test_loss"] for run in worst])
                row = [find_worst(groups), f"{found[schedule]}", f"{shakiest}"]
                rows.append([federation, schedule, *row, f"{loss.mean:.3f}"])
        if {TUNED, ALONE} <= found.keys():
            gain = found[TUNED].mean - found[ALONE].mean
            answer = "yes" if gain > 0.0 else "**no**"
            both = [f"{found[TUNED]}", f"{found[ALONE]}"]
            pays.append([federation, *both, f"{gain:+.3f}", answer])
    heads = ["federation", "schedule", "worst attack", "accuracy", "last model", "loss"]
    yield Section(
        "Schedules under the worst attack",
        "Accuracy and loss of the model that is returned, the average of the last half "
        "of the models, under the attack that leaves the lowest mean accuracy; beside "
        "it the last model's under the attack that is the worst for that. Seeds: "
        f"{', '.join(map(str, runs.seeds))}.",
        Table(heads, rows),
        figures={"schedules": draw_schedules(runs)},
    )
    heads = ["federation", TUNED, ALONE, "gain", "does federating pay?"]
    yield Section(
        "A federation under attack, and a client alone",
        "The client alone has as many examples, the same epsilon, and a schedule that "
        "was found for it.",
        Table(heads, pays),
    )
    first = runs.where(federation=str(FEDERATIONS[0]), schedule=TUNED)
    rows = [
        [ATTACK_WORDS.get(attack, attack), f"{final(some)}", f"{last(some)}"]
        for attack, some in first.groups("attack").items()
    ]
    yield Section(
        "Every attack",
        f"{FEDERATIONS[0]}, the tuned schedule.",
        Table(["attack", "accuracy", "last model"], rows),
    )


def _mean(one: MeanStd) -> float:
    return one.mean


study = Study(
    "schedules",
    "Schedules at equal epsilon, under the worst attack",
    "Which schedule is left with the better model under its worst attack, and is that "
    "better than what a client reaches alone?",
    list(make_cases()),
    seeds=(1, 2, 3, 4, 5),
    report=report,
    page="docs/robustness.md",
)
