"""The threat model names tests; they are there."""

import ast
import re
from functools import cache

from simulations.loopback import ROOT

PAGE = (ROOT / "docs" / "threat-model.md").read_text()
NAMED = re.findall(r"`(test_\w+)\.py::(test_\w+)`", PAGE)


@cache
def named_in(module: str) -> set[str]:
    trees = [ast.parse(p.read_text()) for p in (ROOT / "tests").rglob(f"{module}.py")]
    items = [item for tree in trees for item in tree.body]
    return {item.name for item in items if isinstance(item, ast.FunctionDef)}


def test_every_named_test_is_there() -> None:
    assert len(NAMED) > 30
    for module, name in NAMED:
        assert name in named_in(module), f"{module}.py::{name}"


def test_every_line_of_protection_names_a_test() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ")]
    claims = [row for row in rows if row != "| what | shown by |"]
    assert len(claims) > 30
    for row in claims:
        assert "`test_" in row.rsplit("|", 2)[1], row
