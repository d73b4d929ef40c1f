"""The calls of a first round, and the page and the picture that are made from them."""

import subprocess
import sys
from pathlib import Path

import pytest

from simulations import call_graph
from simulations.call_graph import CallGraph, Function


@pytest.mark.process
def test_a_first_round_is_traced_from_the_constructors_to_the_step() -> None:
    command = [sys.executable, "-m", "simulations.call_graph"]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for call in (
        "simulation/in_process.py InProcessGrid._answer_message -> app.py ",
        "client.py SafeDSHBClient.__init__ -> algorithm/admission.py open_budget",
        "algorithm/step.py training_step -> algorithm/budget.py LedgerBudget.charge",
        "algorithm/step.py training_step -> algorithm/momentum_store.py MomentumFiles.",
        "algorithm/run.py TrainingRun.finish_round -> algorithm/round.py",
        "algorithm/round.py aggregate_round -> algorithm/screening.py screen_replies",
    ):
        assert call in found
    *lines, counts = found.splitlines()
    assert f"{len(lines)} calls" in counts


def test_a_function_counts_once_and_only_across_files() -> None:
    one, two, three = (
        Function("a.py", "f"),
        Function("b.py", "g"),
        Function("c.py", "h"),
    )
    graph = CallGraph(dict.fromkeys([(one, three), (two, three), (three, one)]))
    assert graph.called == {three, one}
    assert graph.files == {"a.py", "b.py", "c.py"}


def test_the_page_gets_the_calls_and_keeps_the_rest() -> None:
    graph = CallGraph({(Function("a.py", "f"), Function("b.py", "g")): None})
    text = "before\n<!-- calls -->\nold\n<!-- /calls -->\nafter\n"
    page = call_graph.insert_calls(text, graph)
    assert page.startswith("before\n<!-- calls -->\n1 functions called")
    assert "a.py f -> b.py g" in page
    assert "old" not in page
    assert page.endswith("<!-- /calls -->\nafter\n")
    assert call_graph.PAGE.read_text().count("<!-- calls -->") == 1


def test_rooms_and_their_edges_come_from_the_imports(tmp_path: Path) -> None:
    edges = call_graph.find_room_edges()
    assert edges["attacks"] == {"aggregation"}
    assert "client" not in edges["strategy"]
    assert "strategy" not in edges["client"]
    chain = {"top": {"mid", "low"}, "mid": {"low"}, "low": set[str]()}
    assert call_graph.reduce_edges(chain) == chain | {"top": {"mid"}}
    call_graph.draw_rooms(tmp_path / "rooms.png")
    assert (tmp_path / "rooms.png").read_bytes().startswith(b"\x89PNG")
