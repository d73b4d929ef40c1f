"""The audit's report: one row for each result, in a file that can be resumed."""

from __future__ import annotations

import ast
import csv
import hashlib
import io
import json
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path

import flwr_safedshb
from flwr_safedshb.atomic_io import replace_file
from flwr_safedshb.audit.zoo import pretrained

_PACKAGES = ("torch", "numpy", "opacus", *pretrained.NEEDED)


@dataclass(frozen=True)
class Row:
    """One result of a suite.

    Attributes
    ----------
    subject : str
        What was attacked, such as a model.
    outcome : str
        Such as how a model is clipped, why it was refused, or counts of answers.
    trials : int
        Candidates, requests, steps or releases.
    figures : dict
        What was measured, by the columns of the suite.
    broken : str
        The promise that does not hold, or empty.
    suite, task : str
    config : dict
        The settings that the suite uses, its seed among them.
    version : str
        A hash of the audit's code and of the code under audit.
    seconds : float
        The time of the whole task.
    """

    subject: str
    outcome: str
    trials: int
    figures: Mapping[str, float | str] = field(default_factory=dict)
    broken: str = ""
    suite: str = ""
    task: str = ""
    config: Mapping[str, object] = field(default_factory=dict)
    version: str = ""
    seconds: float = 0.0


@dataclass
class Report:
    """All rows of an audit, and the versions of the packages that it ran with."""

    rows: list[Row] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=lambda: _package_versions())

    @property
    def holds(self) -> bool:
        """Whether no promise was found broken."""
        return not any(row.broken for row in self.rows)

    def has(self, suite: str, task: str) -> bool:
        """Whether a task of a suite is done."""
        return any((row.suite, row.task) == (suite, task) for row in self.rows)

    def save(self, path: Path) -> None:
        """Write everything as JSON, and the rows as CSV beside it."""
        text = json.dumps({**asdict(self), "holds": self.holds}, indent=1)
        replace_file(path, lambda file: file.write(f"{text}\n".encode()))
        table = self._to_csv().encode()
        replace_file(path.with_suffix(".csv"), lambda file: file.write(table))

    def _to_csv(self) -> str:
        """Return the rows as CSV, with a column for each setting and each figure."""
        lines = []
        for row in self.rows:
            record = asdict(row)
            line = record | record["config"] | record["figures"]
            lines.append({k: v for k, v in line.items() if k not in _NESTED})
        names = list(dict.fromkeys(name for line in lines for name in line))
        text = io.StringIO()
        writer = csv.DictWriter(text, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
        return text.getvalue()

    @classmethod
    def load(cls, path: Path) -> Report:
        """Read what `save` wrote."""
        saved = json.loads(path.read_text())
        return cls([Row(**row) for row in saved["rows"]], saved["versions"])

    @classmethod
    def resume(cls, path: Path, is_current: Callable[[Row], bool]) -> Report:
        """Return a report with the rows of a file that are still current.

        If the packages have other versions now, no row is.
        """
        new = cls()
        if not path.exists():
            return new
        try:
            old = cls.load(path)
        except (ValueError, LookupError, TypeError):
            raise ValueError(
                f"output={path} is not a report of this audit; name another file"
            ) from None
        if old.versions == new.versions:
            new.rows = [row for row in old.rows if is_current(row)]
        return new


_NESTED = ("config", "figures")


def _package_versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


@cache
def hash_code(patterns: Sequence[str]) -> str:
    """Return a hash of the package's modules that match, without their comments."""
    root = Path(flwr_safedshb.__file__).parent
    total = hashlib.sha256()
    for path in sorted(file for pattern in patterns for file in root.glob(pattern)):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                node.body = [line for line in node.body if not _is_docstring(line)]
        total.update(ast.dump(tree).encode())
    return total.hexdigest()[:16]


def _is_docstring(line: ast.stmt) -> bool:
    return (
        isinstance(line, ast.Expr)
        and isinstance(line.value, ast.Constant)
        and isinstance(line.value.value, str)
    )
