"""The table of the paper's statements: its places and its tests exist."""

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "paper.md").read_text()
ROWS = [
    line for line in PAGE.splitlines() if re.match(r"\| (?!the paper|what|-)", line)
]
PLACES = sorted(set(re.findall(r"`((?:flwr_safedshb|simulations)[\w.]+)`", PAGE)))
TESTS = sorted(set(re.findall(r"`(test_\w+)\.py::(test_\w+)`", PAGE)))


@pytest.mark.parametrize("place", PLACES)
def test_every_place_exists(place: str) -> None:
    parts = place.split(".")
    for size in range(len(parts), 0, -1):
        try:
            found: object = import_module(".".join(parts[:size]))
        except ModuleNotFoundError:
            continue
        for name in parts[size:]:
            found = getattr(found, name)
        return
    raise AssertionError(place)


@pytest.mark.parametrize(("module", "name"), TESTS)
def test_every_test_exists(module: str, name: str) -> None:
    found = [
        item.name
        for path in (ROOT / "tests").rglob(f"{module}.py")
        for item in ast.parse(path.read_text()).body
        if isinstance(item, ast.FunctionDef)
    ]
    assert name in found, f"{module}.py::{name}"


def test_every_statement_has_a_place_and_a_test() -> None:
    assert len(ROWS) > 30
    for row in ROWS:
        cells = row.split(" | ")
        assert re.search(r"`(flwr_safedshb|simulations)[\w.]+`", cells[1]), row
        assert re.search(r"`test_\w+\.py::test_\w+`", cells[2]), row


def test_no_kind_of_statement_is_missing() -> None:
    for kind in (
        "Assumption",
        "Definition",
        "Algorithm",
        "Proposition",
        "Theorem",
        "Lemma",
        "Remark",
    ):
        assert f"| {kind}" in PAGE
    assert PAGE.count("| Corollary") == 2
    assert "| Experiments" in PAGE
    assert PAGE.count("| Assumption") == 2
    for lemma in (
        "variance",
        "drift",
        "deviation",
        "descent",
        "covering",
        "concentration",
        "Rényi",
    ):
        assert f"| Lemma: {lemma}" in PAGE
