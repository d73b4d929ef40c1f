"""A study: a grid of runs, what each run measures, and the report about all of them.

``python -m simulations.study NAME`` runs a study of `simulations.studies`, one that an
installed package publishes (entry points ``flwr_safedshb.studies``), or ``MODULE:NAME``
of one's own. It can be killed and started again. Its folder holds a file for each run,
``results.csv`` with a row for each run, the figures, and ``report.html``.
"""

from __future__ import annotations

import importlib
import re
import shlex
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import entry_points
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any, Generic, TypeVar

from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.markdown import Markdown
from rich.markup import escape
from rich.table import Table as RichTable

from simulations.command import (
    Parser,
    at_least,
    lock_path,
    print_settings_errors,
)
from simulations.config import SettingsError
from simulations.results.plots import Curve
from simulations.results.publish import check_page, publish_sections
from simulations.results.sweep import (
    Function,
    Measurement,
    Sweep,
    Training,
    run_missing,
    write_csv,
)
from simulations.results.tables import Table, slugify

ENTRY_POINTS = "flwr_safedshb.studies"
R = TypeVar("R")
Axis = Mapping[str, str] | Sequence[object]


@dataclass(frozen=True)
class Case:
    """One run: its place in the grid, its settings and its seed.

    Attributes
    ----------
    labels : mapping of str to str
        The label on each axis of the grid. An empty one belongs to all of that axis,
        as a run without adversaries belongs to the panel of every attack.
    overrides : tuple of str
        ``key=value`` of Hydra, or of the arguments of a measured function.
    seed : int
    """

    labels: Mapping[str, str]
    overrides: tuple[str, ...] = ()
    seed: int = 0

    def __hash__(self) -> int:
        """Return the hash of the name; equal cases have equal names."""
        return hash(self.name)

    @property
    def name(self) -> str:
        """The name of the run's file, without suffix."""
        words = (
            f"{axis}{label}" if label[0] in "-0123456789" else label
            for axis, label in self.labels.items()
            if label
        )
        return slugify("_".join([*words, f"seed{self.seed}"]))

    def has(self, **labels: str) -> bool:
        """Return True if the case has these labels, or belongs to all of their axes."""
        return all(self.labels.get(k, "") in (v, "") for k, v in labels.items())


def grid(*common: str, **axes: Axis) -> list[Case]:
    """Return a case for every combination of the axes.

    Parameters
    ----------
    *common : str
        Overrides of all cases.
    **axes : sequence or mapping
        Values of a setting, ``attack=("foe", "alie")``; or overrides by label,
        ``data={"ours": "data._target_=my.Data data.size=9", "digits": "data=digits"}``.

    Examples
    --------
    >>> [case.name for case in grid(attack=("foe", "alie"), rule={"SMEA": ""})]
    ['foe_SMEA_seed0', 'alie_SMEA_seed0']
    """
    choices = [
        [(axis, label, shlex.split(text)) for label, text in values.items()]
        if isinstance(values, Mapping)
        else [(axis, str(value), [f"{axis}={value}"]) for value in values]
        for axis, values in axes.items()
    ]
    return [
        Case(
            {axis: label for axis, label, _ in chosen},
            (*common, *(text for _, _, some in chosen for text in some)),
        )
        for chosen in product(*choices)
    ]


class Runs(dict[Case, R], Generic[R]):
    """What the runs left, by case."""

    def where(self, **labels: str) -> Runs[R]:
        """Return the runs with these labels, or that belong to all of an axis."""
        return Runs({case: run for case, run in self.items() if case.has(**labels)})

    def labels(self, axis: str) -> list[str]:
        """Return the labels of an axis, in order."""
        found = dict.fromkeys(case.labels.get(axis, "") for case in self)
        return [label for label in found if label]

    def by(self, axis: str) -> dict[str, Runs[R]]:
        """Return the runs of each label of an axis."""
        return {label: self.where(**{axis: label}) for label in self.labels(axis)}

    def groups(self, axis: str) -> dict[str, list[R]]:
        """Return what the runs of each label of an axis left; all seeds together."""
        return {label: list(some.values()) for label, some in self.by(axis).items()}

    @property
    def seeds(self) -> list[int]:
        """The seeds, in order."""
        return sorted({case.seed for case in self})


@dataclass(frozen=True)
class Section:
    """A part of the report: text, plots, and a table.

    Attributes
    ----------
    title : str
    text : str
        Markdown, above the plots.
    table : Table, optional
        Long ones are folded in the report, and a file that the page links.
    panels : mapping
        By title, then by label, curves over the steps: one mapping for each quantity.
    figures : mapping of caption to Figure
    notes : str
        Markdown, below the table.
    """

    title: str
    text: str = ""
    table: Table | None = None
    panels: Mapping[str, Mapping[str, Mapping[str, Curve]]] = field(
        default_factory=dict
    )
    figures: Mapping[str, Figure] = field(default_factory=dict)
    notes: str = ""


@dataclass(frozen=True)
class Study:
    """A question that a grid of runs answers.

    Attributes
    ----------
    name : str
        Of its folder, ``outputs/NAME``, and of its marks in `page`.
    title, question : str
    cases : sequence of Case, or callable from the parsed arguments to them
        Without seeds.
    seeds : sequence of int
    report : callable (runs) -> sections
        By default the last axis is compared, in a panel for each choice of the others.
    measure : callable, optional
        What a run measures, called with a case's settings and ``seed``; by default a
        run trains a federation.
    words : mapping of a label to what readers see
    page : str
        A page of the documentation with ``<!-- begin NAME -->`` and ``end`` marks.
    add_options : callable from a parser, optional
    again : bool
        Run also what is there.
    failed : callable (runs) -> bool, optional
        Whether the result is not what it must be, so that the command ends with 1.
    """

    name: str
    title: str
    question: str
    cases: Sequence[Case] | Callable[[Namespace], Iterable[Case]]
    seeds: Sequence[int] = (1, 2, 3)
    report: Callable[[Runs[Any]], Iterable[Section]] | None = None
    measure: Callable[..., Mapping[str, object]] | None = None
    words: Mapping[str, str] = field(default_factory=dict)
    page: str = ""
    add_options: Callable[[Parser], None] | None = None
    again: bool = False
    failed: Callable[[Runs[Any]], bool] | None = None

    @property
    def measurement(self) -> Measurement[Any]:
        """What each run does."""
        return Training() if self.measure is None else Function(self.measure)

    def sections(self, runs: Runs[Any]) -> list[Section]:
        """Return the report's sections."""
        if self.report is not None:
            return list(self.report(runs))
        from simulations.results.comparison import compare_last_axis

        return compare_last_axis(runs, self.words)

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Run what is missing of the study, and report; return the exit code."""
        parser, arguments = self.parser(), argv
        args = parser.parse_args(arguments)
        if args.quick:
            if args.page:
                parser.error("--page shows whole runs: leave out --quick")
            args.seeds, args.set = args.seeds[:1], ["steps=20", *args.set]
        cases = list(self.choose_cases(args))
        if not cases:
            parser.error("no run has all of these labels")
        if args.page is not None:
            check_page(args.page, self.name)
        work = Sweep(args.output, cases, self.measurement, tuple(args.set))
        work.check()
        console = Console()
        with lock_path(args.output / "runs"):
            if not run_missing(console, work, args.workers, self.again, args.cluster):
                return 1
            runs = Runs(work.runs())
            return self.conclude(runs, args.output, args.page, console)

    def conclude(
        self, runs: Runs[Any], folder: Path, page: Path | None, console: Console
    ) -> int:
        """Write table, figures and report of the runs; return the exit code."""
        from simulations.results.report import write_report

        write_csv(folder / "results.csv", runs, self.measurement)
        sections = self.sections(runs)
        write_report(folder / "report.html", self, sections, runs)
        if self.question:
            console.print(self.question.strip(), highlight=False)
        for section in sections:
            print_section(section, folder, console)
        console.print(f"Report, figures, results.csv and runs are in {folder}")
        if page is not None:
            publish_sections(page, self.name, sections, folder / "figures")
        return int(self.failed is not None and self.failed(runs))

    def parser(self) -> Parser:
        """Return the parser of the study's command, with an option for each axis."""
        parser = Parser(
            prog=f"python -m simulations.study {self.name}", description=self.question
        )
        parser.add_argument("--output", type=Path, default=Path("outputs") / self.name)
        parser.add_argument("--workers", type=at_least(1), help="processes; all cores")
        parser.add_argument(
            "--cluster", metavar="ADDRESS", help="of a Ray cluster that does the runs"
        )
        parser.add_argument(
            "--seeds", nargs="+", type=at_least(0), default=list(self.seeds)
        )
        parser.add_argument(
            "--set", nargs="+", default=[], help="settings of all runs: steps=20 ..."
        )
        parser.add_argument(
            "--quick", action="store_true", help="one seed and 20 steps, to see it work"
        )
        parser.add_argument(
            "--panel", default="", help="labels of the runs to do, such as foe/high"
        )
        parser.add_argument(
            "--page",
            type=Path,
            nargs="?",
            const=Path(self.page) if self.page else None,
            help=f"also put the report into a page ({self.page or 'name it'})",
        )
        if self.add_options is not None:
            self.add_options(parser)
        else:
            for axis, labels in self._axes().items():
                parser.add_argument(
                    f"--{axis.replace('_', '-')}",
                    nargs="+",
                    choices=labels,
                    dest=f"axis {axis}",
                )
        return parser

    def _axes(self) -> dict[str, list[str]]:
        runs = Runs(dict.fromkeys(self.list_cases(Namespace())))
        axes = dict.fromkeys(axis for case in runs for axis in case.labels)
        return {axis: runs.labels(axis) for axis in axes}

    def list_cases(self, args: Namespace) -> Iterable[Case]:
        """Return all cases, without seeds; `args` may be empty."""
        return self.cases(args) if callable(self.cases) else self.cases

    def choose_cases(self, args: Namespace) -> Iterator[Case]:
        """Yield the cases that were asked for, with each of the seeds."""
        panel = [part for part in args.panel.split("/") if part]
        wanted = {
            name.removeprefix("axis "): labels
            for name, labels in vars(args).items()
            if name.startswith("axis ") and labels
        }
        every = list(self.list_cases(args))
        known = {label for case in every for label in case.labels.values()}
        if unknown := [part for part in panel if part not in known]:
            raise SettingsError(
                f"--panel {args.panel}: {unknown[0]} is no label; choose among "
                f"{', '.join(sorted(known - {''}))}"
            )
        for case in every:
            fits = all(case.labels.get(k, "") in (*v, "") for k, v in wanted.items())
            missing = [part for part in panel if part not in case.labels.values()]
            general = [label for label in case.labels.values() if not label]
            if fits and len(missing) <= len(general):
                for seed in args.seeds:
                    yield replace(case, seed=seed)


def print_section(section: Section, folder: Path, console: Console) -> None:
    """Print a section; a long table is only named."""
    console.print(Markdown(f"### {section.title}\n\n{section.text}"))
    table = section.table
    if table is not None and table.is_short:
        shown = RichTable(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for i, head in enumerate(table.heads):
            shown.add_column(head, no_wrap=i == 0)
        for row in table.rows:
            shown.add_row(*(to_rich(cell) for cell in row))
        console.print(shown)
    elif table is not None:
        console.print(f"Table: {folder / f'{slugify(section.title)}.csv'}")
    if section.notes:
        console.print(Markdown(section.notes))


def to_rich(cell: str) -> str:
    """Return a cell of Markdown in rich's markup."""
    return re.sub(r"\*\*(.*?)\*\*", r"[bold red]\1[/]", escape(cell))


def find_study(name: str) -> Study:
    """Return a study by its name here, its entry point, or ``MODULE:NAME``."""
    if ":" in name:
        module, _, attribute = name.partition(":")
        try:
            found = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise SettingsError(f"{name}: {error}") from error
        if not isinstance(found, Study):
            raise SettingsError(f"{name} is a {type(found).__name__}, and no Study")
        return found
    for point in entry_points(group=ENTRY_POINTS, name=name):
        return find_study(point.value)
    module = f"simulations.studies.{name}"
    if not re.fullmatch(r"\w+", name) or find_spec(module) is None:
        raise SettingsError(
            f"{name}: there is no such study; choose {', '.join(study_names())}, or "
            "MODULE:NAME for one of yours"
        )
    return find_study(f"{module}:study")


def study_names() -> list[str]:
    """Return the names of all studies, those of installed packages included."""
    import simulations.studies

    own = (
        path.stem
        for folder in simulations.studies.__path__
        for path in Path(folder).glob("[!_]*.py")
        if "\nstudy = " in path.read_text()
    )
    return sorted({*own, *(point.name for point in entry_points(group=ENTRY_POINTS))})


@print_settings_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Run the study that the first argument names."""
    given = list(sys.argv[1:] if argv is None else argv)
    if not given or given[0].startswith("-"):
        print("usage: python -m simulations.study NAME [--help]")
        print(f"studies: {', '.join(study_names())}; or MODULE:NAME, one of your own")
        return 0 if given[:1] in (["-h"], ["--help"]) else 2
    # A study of one's own may be a file beside which the command is started.
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    return find_study(given[0]).main(given[1:])


if __name__ == "__main__":
    # Studies import this module, and its classes must be the same as theirs.
    from simulations.study import main as imported_main

    try:
        raise SystemExit(imported_main())
    except KeyboardInterrupt:
        sys.exit(130)  # as shells say of a command that Ctrl-C stopped
