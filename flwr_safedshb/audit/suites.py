"""The audit's suites, in one table, and the loop that runs them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from flwr_safedshb.audit import epsilon_bound
from flwr_safedshb.audit.epsilon_bound import measure_epsilon
from flwr_safedshb.audit.label_inference import LabelGuesses, infer_labels
from flwr_safedshb.audit.ledger_requests import (
    request_odd_limits,
    request_odd_plans,
    request_orders,
)
from flwr_safedshb.audit.messages import send_odd_messages, send_to_bad_examples
from flwr_safedshb.audit.outcomes import Outcomes
from flwr_safedshb.audit.report import Report, Row, hash_code
from flwr_safedshb.audit.sensitivity_search import SearchResult, search_sensitivity
from flwr_safedshb.audit.target_model import TargetModel
from flwr_safedshb.audit.timing import MODELS, Timing, measure_times
from flwr_safedshb.audit.zoo import (
    layers,
    mixing,
    pretrained,
    raising,
    randomised,
    state,
)
from flwr_safedshb.privacy.randomness.noise import SecureRandomness, SeededRandomness

Advance = Callable[[int], object]  # tells the progress bar how much more is done
ZOO = tuple(
    target
    for room in (layers, pretrained, randomised, raising, mixing, state)
    for target in room.MODELS
)


@dataclass(frozen=True)
class Settings:
    """How much to try, and from which seed.

    Attributes
    ----------
    candidates : int
        Of each model, for each type of its weights.
    guesses : int
        Of labels, for each model that is accepted.
    rounds : int
        That a node is asked with each bad example; random orders of charges.
    steps : int
        That are timed, of each kind.
    trials : int
        Releases on each of two neighbouring datasets.
    delta, confidence : float
        Of the lower bound on epsilon.
    secure : bool
        Whether releases draw the deployment's randomness, which has no seed.
    seed : int
    """

    candidates: int = 1000
    guesses: int = 200
    rounds: int = 12
    steps: int = 200
    trials: int = 10_000
    delta: float = 0.05
    confidence: float = 0.999
    secure: bool = False
    seed: int = 1

    def __post_init__(self) -> None:
        least = {"candidates": 1, "guesses": 1, "rounds": 1, "steps": 1, "trials": 100}
        for name, bound in (*least.items(), ("seed", 0)):
            if getattr(self, name) < bound:
                value = getattr(self, name)
                raise ValueError(f"{name}={value} must be at least {bound}")
        for name in ("delta", "confidence"):
            value = getattr(self, name)
            if not 0 < value < 1:
                raise ValueError(f"{name}={value:g} must be above 0 and below 1")


@dataclass(frozen=True)
class Task:
    """A part of a suite, after which the report is saved."""

    name: str
    size: int
    run: Callable[[Advance], Iterable[Row]]


@dataclass(frozen=True)
class Suite:
    """A question about our privacy code, and how the audit answers it.

    Attributes
    ----------
    title : str
    unit : str
        What the trials are.
    columns : dict of str to callable
        How each figure is printed.
    uses : tuple of str
        The `Settings` on which the results depend.
    code : tuple of str
        Patterns of the modules on which the results depend.
    plan : callable (settings, only) -> iterator of Task
    """

    title: str
    unit: str
    columns: dict[str, Callable[[Any], str]]
    uses: tuple[str, ...]
    code: tuple[str, ...]
    plan: Callable[[Settings, Sequence[str]], Iterator[Task]]

    def state(self, settings: Settings) -> tuple[dict[str, object], str]:
        """Return what a row's `config` and `version` must be to count."""
        config = {name: getattr(settings, name) for name in self.uses}
        if config.get("secure"):
            config["seed"] = None
        return config, hash_code(self.code)

    @property
    def heads(self) -> tuple[str, ...]:
        """The heads of a printed table."""
        return "subject", "outcome", self.unit, *self.columns

    def cells(self, row: Row) -> tuple[str, ...]:
        """Return a row under these heads."""
        outcome = f"BROKEN: {row.broken}" if row.broken else row.outcome
        figures = (
            show(row.figures[name]) if name in row.figures else ""
            for name, show in self.columns.items()
        )
        trials = f"{row.trials:,}" if row.trials else ""
        return row.subject, outcome, trials, *figures


def plan_searches(settings: Settings, only: Sequence[str] = ()) -> Iterator[Task]:
    """Return a search for each model and type of weights.

    Parameters
    ----------
    settings : Settings
    only : sequence of str
        Parts of models' names; none for all.

    Raises
    ------
    ValueError
        If a part is in no name.
    """
    for part in only:
        if not any(part.lower() in target.name.lower() for target in ZOO):
            names = ", ".join(target.name for target in ZOO)
            raise ValueError(f"only={part!r} names no model; there are {names}")
    for target in ZOO:
        if only and not any(part.lower() in target.name.lower() for part in only):
            continue
        for dtype in target.dtypes:
            kind = str(dtype).removeprefix("torch.")
            name = target.name if kind == "float32" else f"{target.name}, {kind}"
            run = partial(_search_model, target, name, dtype, settings)
            yield Task(name, settings.candidates, run)


def _search_model(
    target: TargetModel,
    name: str,
    dtype: torch.dtype,
    settings: Settings,
    advance: Advance,
) -> Iterator[Row]:
    """Search, and then try to read labels with the worst that was found."""
    missing = pretrained.missing_packages() if target in pretrained.MODELS else []
    if missing:
        yield Row(name, f"left out: {', '.join(missing)} not installed", 0)
        return
    count, seed = settings.candidates, settings.seed
    result = search_sensitivity(target, count, seed, dtype=dtype, progress=advance)
    guesses = None
    if result.isolation and not result.raised:
        candidates = result.worst_candidates
        guesses = infer_labels(target, candidates, settings.guesses, seed)
    yield make_search_row(name, result, guesses)


def make_search_row(
    name: str, result: SearchResult, guesses: LabelGuesses | None
) -> Row:
    """Return the row of what a search found, and of the labels that were guessed."""
    if result.refusal:
        outcome = f"refused: {result.refusal}"
        return Row(name, outcome, result.candidates, broken=result.broken)
    figures: dict[str, float | str] = {
        "worst / C": result.removed,
        "worst / 2C": result.replaced,
    }
    broken = result.broken
    if guesses is not None:
        figures["labels"] = f"{guesses.right} of {guesses.guesses}"
        if not guesses.holds:
            broken = broken or "labels are read better than by chance"
    return Row(name, result.isolation, result.candidates, figures, broken)


def plan_requests(settings: Settings, only: Sequence[str] = ()) -> Iterator[Task]:
    """Return a task for each kind of odd request to a node or a ledger."""
    kinds: dict[str, Callable[[], Outcomes]] = {
        "messages of a server": send_odd_messages,
        "answers with one bad example": partial(send_to_bad_examples, settings.rounds),
        "budgets and rules": request_odd_limits,
        "plans of a run": request_odd_plans,
        "orders of charges": request_orders,
    }
    for kind, attack in kinds.items():
        yield Task(kind, 1, partial(_request, kind, attack))


def _request(
    kind: str, attack: Callable[[], Outcomes], advance: Advance
) -> Iterator[Row]:
    yield make_request_row(kind, attack())


def make_request_row(kind: str, outcomes: Outcomes) -> Row:
    """Return the row of what an attack by single requests found."""
    counts = outcomes.count_results().items()
    outcome = ", ".join(f"{count} {result}" for result, count in counts)
    broken = "; ".join(f"{case.request}: {case.broken}" for case in outcomes.broken)
    return Row(kind, outcome, len(outcomes.cases), broken=broken)


def plan_timing(settings: Settings, only: Sequence[str] = ()) -> Iterator[Task]:
    """Return a task for each model whose steps are timed."""
    for model in MODELS:
        yield Task(model, 1, partial(_time_model, model, settings.steps))


def _time_model(model: str, steps: int, advance: Advance) -> Iterator[Row]:
    for timing in measure_times(model, steps):
        yield make_timing_row(timing, steps)


def make_timing_row(timing: Timing, steps: int) -> Row:
    """Return the row of a comparison; what else a machine does decides no verdict."""
    figures: dict[str, float | str] = {
        "usual ms": timing.usual * 1e3,
        "one bad": timing.one,
        "half": timing.half,
        "CPU": timing.computed,
    }
    outcome = timing.isolation if timing.holds else f"FAR: {timing.isolation}"
    return Row(f"{timing.model}, {timing.kind}", outcome, steps, figures)


def plan_canaries(settings: Settings, only: Sequence[str] = ()) -> Iterator[Task]:
    """Return one task for all plans, whose releases share a stream of randomness."""
    size = 2 * settings.trials * len(epsilon_bound.PLANS)
    yield Task("one private step", size, partial(_measure_plans, settings))


def _measure_plans(settings: Settings, advance: Advance) -> Iterator[Row]:
    randomness = (
        SecureRandomness() if settings.secure else SeededRandomness(settings.seed)
    )
    delta, trials, confidence = settings.delta, settings.trials, settings.confidence
    for plan in epsilon_bound.PLANS:
        measured = measure_epsilon(plan, delta, trials, confidence, randomness, advance)
        accounted = plan.epsilon(1, delta)
        holds = measured <= accounted
        yield Row(
            f"{plan.sampling}, {plan.adjacency}, {plan.clipping}",
            "holds" if holds else "VIOLATED",
            trials,
            {"measured": measured, "accounted": accounted},
            "" if holds else "more is measured than accounted",
        )


def format_ratio(ratio: float) -> str:
    """Return a ratio to six places, cut off: it reads 1 only from 1 on."""
    return f"{ratio:.6g}" if ratio >= 1.0 else f"{int(ratio * 1e6) / 1e6:.6f}"


_CLIPPING = ("privacy/*.py", "privacy/clipping/*.py", "privacy/randomness/*.py")
_AUDIT = ("audit/**/*.py",)
SUITES: dict[str, Suite] = {
    "sensitivity": Suite(
        "Can one example move a clipped sum by more than the bound?",
        "candidates",
        {"worst / C": format_ratio, "worst / 2C": format_ratio, "labels": str},
        ("candidates", "guesses", "seed"),
        (*_CLIPPING, *_AUDIT),
        plan_searches,
    ),
    "messages": Suite(
        "Can a message, an example or an order of charges change what leaves a node?",
        "requests",
        {},
        ("rounds",),
        ("*.py", "algorithm/*.py", "privacy/**/*.py", *_AUDIT),
        plan_requests,
    ),
    "timing": Suite(
        "Does the time of a step depend on its examples? In units of the usual",
        "steps",
        {
            "usual ms": "{:.1f}".format,
            "one bad": "{:.2f}".format,
            "half": "{:.2f}".format,
            "CPU": "{:.2f}".format,
        },
        ("steps",),
        (*_CLIPPING, *_AUDIT),
        plan_timing,
    ),
    "epsilon": Suite(
        "Can neighbouring datasets be told apart better than epsilon allows?",
        "releases",
        {
            "measured": ">= {:.3f}".format,
            "accounted": "<= {:.3f}".format,
        },
        ("trials", "delta", "confidence", "secure", "seed"),
        ("privacy/**/*.py", *_AUDIT),
        plan_canaries,
    ),
}


def run_audit(
    settings: Settings,
    output: Path,
    suites: Sequence[str] = (),
    only: Sequence[str] = (),
) -> Report:
    """Run what a report has not, and save it after every task.

    Parameters
    ----------
    settings : Settings
    output : Path
        The report, JSON; rows as CSV lie beside it.
    suites : sequence of str
        Names in `SUITES`; none for all, or for the search alone if `only` is given.
    only : sequence of str
        Parts of models' names that the search is confined to.

    Returns
    -------
    Report
        The rows of these suites, and any that the file had of others.
    """
    chosen = suites or (["sensitivity"] if only else list(SUITES))
    for name in chosen:
        if name not in SUITES:
            raise ValueError(f"suite={name!r} must be one of {', '.join(SUITES)}")
    states = {name: suite.state(settings) for name, suite in SUITES.items()}

    def is_current(row: Row) -> bool:
        config, version = states[row.suite]
        # What other suites have found stays, if the code is still the same.
        return row.version == version and (
            row.suite not in chosen or row.config == config
        )

    report = Report.resume(output, is_current)
    tasks = [
        (name, task)
        for name in chosen
        for task in SUITES[name].plan(settings, only)
        if not report.has(name, task.name)
    ]
    report.save(output)  # refuses a bad path before hours of work
    with Progress(console=Console(stderr=True), transient=True) as progress:
        overall = progress.add_task("all", total=len(tasks))
        for name, task in tasks:
            bar = progress.add_task(f"{name}: {task.name}", total=task.size)
            start = time.monotonic()
            rows = list(task.run(partial(progress.advance, bar)))
            config, version = states[name]
            report.rows += [
                replace(
                    row,
                    suite=name,
                    task=task.name,
                    config=config,
                    version=version,
                    seconds=round(time.monotonic() - start, 1),
                )
                for row in rows
            ]
            report.save(output)
            progress.remove_task(bar)
            progress.advance(overall)
    return report
