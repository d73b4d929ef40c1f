"""The walk through a round, and the page and the picture that are made from it."""

import sys
from pathlib import Path

import pytest

from simulations import walk
from simulations.walk import Function, Walk


@pytest.mark.federation
def test_a_round_is_traced_from_the_messages_to_the_step() -> None:
    found = walk.walk_a_round()
    assert sys.getprofile() is None
    names = {(by.file, called.file, called.name) for by, called in found.calls}
    assert ("client.py", "algorithm/step.py", "Steps.fit") in names
    assert ("algorithm/step.py", "privacy/ledger/ledger.py", "Ledger.charge") in names
    assert ("algorithm/round.py", "algorithm/screening.py", "screen_all") in names
    assert all(by.file != called.file for by, called in found.calls)
    # The same every time, so that a page can tell it.
    assert list(walk.walk_a_round().lines()) == list(found.lines())


def test_a_function_counts_once_and_only_across_files() -> None:
    one, two, three = (
        Function("a.py", "f"),
        Function("b.py", "g"),
        Function("c.py", "h"),
    )
    found = Walk(dict.fromkeys([(one, three), (two, three), (three, one)]))
    assert found.called == {three, one}
    assert found.files == {"a.py", "b.py", "c.py"}


def test_the_page_gets_the_walk_and_keeps_the_rest() -> None:
    one, two = Function("a.py", "f"), Function("b.py", "g")
    text = "before\n<!-- walk -->\nold\n<!-- /walk -->\nafter\n"
    page = walk.page_with(text, Walk({(one, two): None}))
    assert page.startswith("before\n<!-- walk -->\nIn this round 1 functions")
    assert "a.py f -> b.py g" in page
    assert "old" not in page
    assert page.endswith("<!-- /walk -->\nafter\n")
    assert walk.PAGE.read_text().count("<!-- walk -->") == 1


def test_rooms_and_their_edges_come_from_the_imports(tmp_path: Path) -> None:
    edges = walk.room_edges()
    assert edges["attacks"] == {"aggregation"}
    assert "client" not in edges["strategy"]
    assert "strategy" not in edges["client"]
    walk.draw(tmp_path / "rooms.png")
    assert (tmp_path / "rooms.png").read_bytes().startswith(b"\x89PNG")
