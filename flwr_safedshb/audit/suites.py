"""Define the suites of the privacy audit, and run those whose results are missing."""

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
from torch import nn

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
from flwr_safedshb.audit.target_model import TargetModel, floats
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

# Of the search over persons: K, the most batches at once, and a model of which a person
# has three pairs of vectors for each layer.
_PER_OWNER, _MAX_OWNER_BATCHES = 3, 24
_WIDE = TargetModel(
    "wide MLP",
    lambda: nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 24)),
    floats(24, classes=24),
)
Advance = Callable[[int], object]  # moves a progress bar forward
ZOO = tuple(
    target
    for module in (layers, pretrained, randomised, raising, mixing, state)
    for target in module.MODELS
)


@dataclass(frozen=True)
class Settings:
    """The size of an audit, and its seed.

    Attributes
    ----------
    candidates : int
        Candidates that the sensitivity search tries on each model and dtype.
    guesses : int
        Labels that are guessed on each model that is accepted.
    rounds : int
        Rounds for each bad example in the suite of messages.
    steps : int
        Timed steps for each model and kind of bad example.
    trials : int
        Releases on each of two neighbouring datasets, to bound epsilon.
    delta, confidence : float
        Parameters of the lower bound on epsilon.
    secure : bool
        Whether releases use `SecureRandomness`, as a deployment does; it has no seed.
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
    """A unit of work in a suite; the report is saved after each."""

    name: str
    size: int
    run: Callable[[Advance], Iterable[Row]]


@dataclass(frozen=True)
class Suite:
    """A question about the privacy code, and the tasks that answer it.

    Attributes
    ----------
    title : str
    unit : str
        What a trial is, such as "candidates".
    columns : dict of str to callable
        The names of the figures, and the function that formats each.
    used_settings : tuple of str
        Names of the `Settings` on which the results depend.
    code : tuple of str
        Glob patterns of the modules on which the results depend.
    make_tasks : callable (settings, only) -> iterator of Task
    """

    title: str
    unit: str
    columns: dict[str, Callable[[Any], str]]
    used_settings: tuple[str, ...]
    code: tuple[str, ...]
    make_tasks: Callable[[Settings, Sequence[str]], Iterator[Task]]

    def identify_results(self, settings: Settings) -> tuple[dict[str, object], str]:
        """Return the `config` and the `version` that rows made now would have."""
        config = {name: getattr(settings, name) for name in self.used_settings}
        if config.get("secure"):
            config["seed"] = None
        return config, hash_code(self.code)

    @property
    def headings(self) -> tuple[str, ...]:
        """The column headings of a printed table."""
        return "subject", "outcome", self.unit, *self.columns

    def format_row(self, row: Row) -> tuple[str, ...]:
        """Return the cells of a row, one for each heading."""
        outcome = f"BROKEN: {row.broken}" if row.broken else row.outcome
        figures = (
            format_figure(row.figures[name]) if name in row.figures else ""
            for name, format_figure in self.columns.items()
        )
        trials = f"{row.trials:,}" if row.trials else ""
        return row.subject, outcome, trials, *figures


def make_search_tasks(settings: Settings, only: Sequence[str] = ()) -> Iterator[Task]:
    """Return a sensitivity search for each model and dtype.

    Parameters
    ----------
    settings : Settings
    only : sequence of str
        Substrings of models' names; empty for all models.

    Raises
    ------
    ValueError
        If a substring matches no model.
    """
    for part in only:
        if not any(part.lower() in target.name.lower() for target in ZOO):
            names = ", ".join(target.name for target in ZOO)
            raise ValueError(f"only={part!r} matches no model; choose from {names}")
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
    """Search, then try to infer labels with the worst candidates found."""
    missing = pretrained.missing_packages() if target in pretrained.MODELS else []
    if missing:
        yield Row(name, f"skipped: {', '.join(missing)} not installed", 0)
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
    """Return the row for the result of a search and of the label guesses."""
    if result.refusal:
        outcome = f"refused: {result.refusal}"
        return Row(name, outcome, result.candidates, broken=result.broken)
    figures: dict[str, float | str] = {
        "worst / C": result.removal_ratio,
        "worst / 2C": result.replacement_ratio,
    }
    broken = result.broken
    if guesses is not None:
        figures["labels"] = f"{guesses.num_right} of {guesses.num_guesses}"
        if not guesses.holds:
            broken = broken or "labels are guessed better than the plan allows"
    return Row(name, result.isolation, result.candidates, figures, broken)


def make_owner_tasks(settings: Settings, only: Sequence[str] = ()) -> Iterator[Task]:
    """Return a sensitivity search over persons for each model that is trained."""
    chosen = [
        replace(target, per_owner=_PER_OWNER, max_batches=_MAX_OWNER_BATCHES)
        for target in (_WIDE, *layers.MODELS, *randomised.MODELS, *raising.MODELS)
        if not only or any(part.lower() in target.name.lower() for part in only)
    ]
    for target in chosen:
        run = partial(_search_owners, target, settings)
        yield Task(target.name, settings.candidates, run)


def _search_owners(
    target: TargetModel, settings: Settings, advance: Advance
) -> Iterator[Row]:
    count, seed = settings.candidates, settings.seed
    result = search_sensitivity(target, count, seed, progress=advance)
    yield make_search_row(target.name, result, None)


def make_request_tasks(settings: Settings, only: Sequence[str] = ()) -> Iterator[Task]:
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
    """Return the row for the outcomes of one kind of request."""
    counts = outcomes.count_results().items()
    outcome = ", ".join(f"{count} {result}" for result, count in counts)
    broken = "; ".join(f"{case.request}: {case.broken}" for case in outcomes.broken)
    return Row(kind, outcome, len(outcomes.cases), broken=broken)


def make_timing_tasks(settings: Settings, only: Sequence[str] = ()) -> Iterator[Task]:
    """Return a task for each model whose steps are timed."""
    for model in MODELS:
        yield Task(model, 1, partial(_time_model, model, settings.steps))


def _time_model(model: str, steps: int, advance: Advance) -> Iterator[Row]:
    for timing in measure_times(model, steps):
        yield make_timing_row(timing, steps)


def make_timing_row(timing: Timing, steps: int) -> Row:
    """Return the row of a timing comparison.

    A deviation is shown as FAR but breaks no promise: other load on the machine can
    cause it.
    """
    figures: dict[str, float | str] = {
        "usual ms": timing.usual_seconds * 1e3,
        "one bad": timing.one_bad,
        "half": timing.half_bad,
        "CPU": timing.cpu,
    }
    outcome = timing.isolation if timing.holds else f"FAR: {timing.isolation}"
    return Row(f"{timing.model}, {timing.kind}", outcome, steps, figures)


def make_epsilon_tasks(settings: Settings, only: Sequence[str] = ()) -> Iterator[Task]:
    """Return one task for all privacy plans, which share one random generator."""
    size = 2 * settings.trials * len(epsilon_bound.PLANS)
    yield Task("one private step", size, partial(_measure_epsilons, settings))


def _measure_epsilons(settings: Settings, advance: Advance) -> Iterator[Row]:
    randomness = (
        SecureRandomness() if settings.secure else SeededRandomness(settings.seed)
    )
    delta, trials, confidence = settings.delta, settings.trials, settings.confidence
    for plan in epsilon_bound.PLANS:
        measured = measure_epsilon(plan, delta, trials, confidence, randomness, advance)
        accounted = plan.epsilon(1, delta)
        holds = measured <= accounted
        unit = "person" if plan.unit == "person" else plan.adjacency
        yield Row(
            f"{plan.sampling}, {unit}, {plan.clipping}",
            "holds" if holds else "VIOLATED",
            trials,
            {"measured": measured, "accounted": accounted},
            "" if holds else "the measured epsilon exceeds the accounted epsilon",
        )


def format_ratio(ratio: float) -> str:
    """Format a ratio, rounded down to six decimals: below 1 it never reads 1."""
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
        make_search_tasks,
    ),
    "messages": Suite(
        "Can a message, an example or an order of charges change what leaves a node?",
        "requests",
        {},
        ("rounds",),
        ("*.py", "algorithm/*.py", "privacy/**/*.py", *_AUDIT),
        make_request_tasks,
    ),
    "timing": Suite(
        "Does the time of a step depend on its examples? Relative to good examples",
        "steps",
        {
            "usual ms": "{:.1f}".format,
            "one bad": "{:.2f}".format,
            "half": "{:.2f}".format,
            "CPU": "{:.2f}".format,
        },
        ("steps",),
        (*_CLIPPING, *_AUDIT),
        make_timing_tasks,
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
        make_epsilon_tasks,
    ),
    "owners": Suite(
        "Can one person move a clipped sum by more than the bound?",
        "candidates",
        {"worst / C": format_ratio, "worst / 2C": format_ratio},
        ("candidates", "seed"),
        (*_CLIPPING, *_AUDIT),
        make_owner_tasks,
    ),
}


def run_audit(
    settings: Settings,
    output: Path,
    suites: Sequence[str] = (),
    only: Sequence[str] = (),
) -> Report:
    """Run the tasks whose results the report lacks, and save it after each.

    Parameters
    ----------
    settings : Settings
    output : Path
        The report, as JSON; its rows are written as CSV beside it.
    suites : sequence of str
        Names in `SUITES`; empty for all, or for "sensitivity" alone if `only` is given.
    only : sequence of str
        Substrings of models' names, to search these models alone.

    Returns
    -------
    Report
        The rows of these suites, and the current rows of others in the file.
    """
    chosen = suites or (["sensitivity"] if only else list(SUITES))
    for name in chosen:
        if name not in SUITES:
            raise ValueError(f"suite={name!r} must be one of {', '.join(SUITES)}")
    current = {name: suite.identify_results(settings) for name, suite in SUITES.items()}

    def is_current(row: Row) -> bool:
        config, version = current[row.suite]
        # Rows of the other suites stay if they are of the same code.
        return row.version == version and (
            row.suite not in chosen or row.config == config
        )

    report = Report.resume(output, is_current)
    tasks = [
        (name, task)
        for name in chosen
        for task in SUITES[name].make_tasks(settings, only)
        if not report.has(name, task.name)
    ]
    report.save(output)  # refuses a bad path before hours of work
    with Progress(console=Console(stderr=True), transient=True) as progress:
        overall = progress.add_task("all", total=len(tasks))
        for name, task in tasks:
            bar = progress.add_task(f"{name}: {task.name}", total=task.size)
            start = time.monotonic()
            rows = list(task.run(partial(progress.advance, bar)))
            config, version = current[name]
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
