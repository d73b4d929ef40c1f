"""What the hostile suite found, as a table and as a file that a run goes on from."""

from __future__ import annotations

import ast
import hashlib
import json
import platform
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path

import flwr_safedshb
from flwr_safedshb.atomic_io import replace_file
from flwr_safedshb.audit.label_inference import Reading
from flwr_safedshb.audit.outcomes import Cases
from flwr_safedshb.audit.sensitivity_search import Finding
from flwr_safedshb.audit.timing import Timing
from flwr_safedshb.audit.zoo import pretrained as borrowed

PACKAGES = ("torch", "numpy", "opacus", *borrowed.NEEDED)
TIME_HEADS = ("model", "path", "bad examples", "usual ms", "one bad", "half", "CPU")
HEADS = ("model", "path, or refusal", "candidates", "worst / C", "worst / 2C", "labels")


@dataclass(frozen=True)
class Settings:
    """How long to search, and from which seed.

    Attributes
    ----------
    candidates : int
        Of each model, for each type of its weights.
    guesses : int
        Of labels, for each model that is accepted.
    rounds : int
        That a node is asked with each bad example.
    steps : int
        That are timed, of each kind.
    seed : int
    """

    candidates: int = 1000
    guesses: int = 200
    rounds: int = 12
    steps: int = 200
    seed: int = 1

    def __post_init__(self) -> None:
        for name in ("candidates", "guesses", "rounds", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.seed < 0:
            raise ValueError(f"seed={self.seed} must be at least 0")


@dataclass(frozen=True)
class ModelRow:
    """One model, with weights of one type.

    Attributes
    ----------
    name, dtype : str
    path, refusal : str
        One of them is empty.
    candidates : int
    removed, replaced : float
        The largest changes of a sum by one example, in units of C and of 2C.
    labels : str
        How many labels were guessed right, of how many; empty where none were.
    broken : str
        The promise that does not hold, or empty.
    seconds : float
    """

    name: str
    dtype: str
    path: str
    refusal: str
    candidates: int
    removed: float
    replaced: float
    labels: str
    broken: str
    seconds: float

    def cells(self) -> tuple[str, ...]:
        """Return a row under `HEADS`."""
        name = self.name if self.dtype == "float32" else f"{self.name}, {self.dtype}"
        if self.broken:
            name = f"BROKEN: {name}: {self.broken}"
        if self.refusal:
            return name, f"refused: {self.refusal}", "", "", "", ""
        ratios = (_figure(self.removed), _figure(self.replaced))
        return name, self.path, f"{self.candidates:,}", *ratios, self.labels


@dataclass(frozen=True)
class CasesRow:
    """Requests of one kind, with how often each outcome came."""

    kind: str
    requests: int
    outcomes: dict[str, int]
    broken: list[str]

    def cells(self) -> tuple[str, str, str]:
        """Return the kind, the number of requests, and what came of them."""
        found = ", ".join(f"{count} {name}" for name, count in self.outcomes.items())
        broken = f"; BROKEN: {'; '.join(self.broken)}" if self.broken else ""
        return self.kind, str(self.requests), found + broken


@dataclass
class Report:
    """What was tried, and what was found."""

    settings: Settings
    models: list[ModelRow] = field(default_factory=list)
    requests: list[CasesRow] = field(default_factory=list)
    times: list[Timing] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=lambda: _versions())

    @property
    def holds(self) -> bool:
        """Whether no promise was found broken.

        Times are for people to judge: what else a machine does changes them.
        """
        models = any(row.broken for row in self.models)
        return not models and not any(row.broken for row in self.requests)

    def found(self, name: str, dtype: str) -> ModelRow | None:
        """Return the row of a model, if it is there."""
        rows = (r for r in self.models if (r.name, r.dtype) == (name, dtype))
        return next(rows, None)

    def save(self, path: Path) -> None:
        """Write everything as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({**asdict(self), "holds": self.holds}, indent=1)
        replace_file(path, lambda file: file.write(f"{text}\n".encode()))

    @classmethod
    def load(cls, path: Path) -> Report:
        """Read what `save` wrote."""
        held = json.loads(path.read_text())
        return cls(
            Settings(**held["settings"]),
            [ModelRow(**row) for row in held["models"]],
            [CasesRow(**row) for row in held["requests"]],
            [Timing(**row) for row in held.get("times", ())],
            held["left_out"],
            held["versions"],
        )

    @classmethod
    def resumed(cls, path: Path, settings: Settings) -> Report:
        """Return what a run of the same code and settings has written, or nothing."""
        new = cls(settings)
        if path.exists():
            old = cls.load(path)
            if (old.settings, old.versions) == (settings, new.versions):
                return old
        return new

    def markdown(self) -> str:
        """Return the tables for a page."""
        heads = ("requests to a node or a ledger", "number", "outcomes")
        return "\n\n".join(
            "\n".join(
                f"| {' | '.join(cells)} |"
                for cells in (names, ("---",) * len(names), *rows)
            )
            for names, rows in (
                (HEADS, [row.cells() for row in self.models]),
                (heads, [row.cells() for row in self.requests]),
                (TIME_HEADS, [time_cells(row) for row in self.times]),
            )
        )


def model_row(finding: Finding, reading: Reading | None) -> ModelRow:
    """Return the row of what a search found, and of the labels that were read."""
    broken = finding.raised or finding.accepted
    if finding.ratio > 1.0:
        broken = f"{finding.ratio:.6g} by one {finding.how}"
        if finding.remembered:
            broken += ", and a call remembers the one before"
    if reading is not None and not reading.holds:
        broken = broken or "labels are read better than by chance"
    return ModelRow(
        finding.subject,
        finding.dtype,
        finding.path,
        finding.refusal,
        finding.candidates,
        finding.removed,
        finding.replaced,
        "" if reading is None else f"{reading.right} of {reading.guesses}",
        broken,
        round(finding.seconds, 1),
    )


def time_cells(timing: Timing) -> tuple[str, ...]:
    """Return a row under `TIME_HEADS`."""
    bad = (f"{ratio:.2f}" for ratio in (timing.one, timing.half, timing.computed))
    kind = timing.kind if timing.holds else f"FAR: {timing.kind}"
    return timing.model, timing.path, kind, f"{timing.usual * 1e3:.1f}", *bad


def cases_row(cases: Cases) -> CasesRow:
    """Return the row of what an attack by requests found."""
    broken = [f"{case.request}: {case.broken}" for case in cases.broken]
    return CasesRow(cases.kind, len(cases.cases), cases.outcomes(), broken)


def _figure(ratio: float) -> str:
    # Cut off and not rounded: 1 is said of what is 1 or more.
    return f"{ratio:.6g}" if ratio >= 1.0 else f"{int(ratio * 1e6) / 1e6:.6f}"


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "code": _code()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _code() -> str:
    """Return a hash of the code that clips and that searches, without its comments."""
    root = Path(flwr_safedshb.__file__).parent / "privacy"
    total = hashlib.sha256()
    parts = ("*.py", "clipping/*.py", "randomness/*.py", "audit/**/*.py")
    for path in sorted(file for part in parts for file in root.glob(part)):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                node.body = [line for line in node.body if not _is_text(line)]
        total.update(ast.dump(tree).encode())
    return total.hexdigest()[:16]


def _is_text(line: ast.stmt) -> bool:
    return (
        isinstance(line, ast.Expr)
        and isinstance(line.value, ast.Constant)
        and isinstance(line.value.value, str)
    )
