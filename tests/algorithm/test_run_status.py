"""Operators see a run while it goes on, and after it was killed."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from flwr.app import RecordDict

from flwr_safedshb import cli
from flwr_safedshb.algorithm.progress import NothingTrainedError
from flwr_safedshb.algorithm.run_status import (
    RunStatus,
    find_status_file,
    read_status,
)
from flwr_safedshb.node import status_page
from flwr_safedshb.node.flower_patches.registered_nodes import RegisteredNode
from flwr_safedshb.node.status_page import RunView
from flwr_safedshb.strategy import SafeDSHB
from tests.federation import federation, model
from tests.replies import Layers, record


def spoil(partition: int, step: int, layers: Layers) -> RecordDict:
    """Node 1 sends NaN; node 2 fails."""
    if partition == 2:
        raise OSError("gone")
    if partition == 1:
        return record([np.full_like(layer, np.nan) for layer in layers])
    return record(list(layers))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Return the checkpoint of a run of two rounds with seven nodes."""
    path = tmp_path / "model.npz"
    grid = federation(7, spoil)
    SafeDSHB(num_malicious_nodes=2, checkpoint=path).start(grid, model(), 2)
    return path


def test_the_status_says_what_became_of_each_node(checkpoint: Path) -> None:
    status = read_status(find_status_file(checkpoint))
    assert (status.state, status.round, status.num_rounds) == ("ended", 2, 2)
    assert len(status.round_seconds) == 2
    assert status.skipped_rounds == []
    outcomes = sorted(node.outcome for node in status.nodes.values())
    assert outcomes.count("excluded: not-finite") == 1
    assert outcomes.count("excluded: error") == 1
    assert set(outcomes) - {"used", "left out"} == {
        "excluded: not-finite",
        "excluded: error",
    }
    assert len(outcomes) == 7


def test_a_round_under_way_names_whom_it_asks(tmp_path: Path) -> None:
    path, seen = tmp_path / "model.npz", list[RunStatus]()

    def look(partition: int, step: int, layers: Layers) -> RecordDict:
        seen.append(read_status(find_status_file(path)))
        return record(list(layers))

    SafeDSHB(checkpoint=path).start(federation(3, look), model(), 2)
    first, last = seen[0], seen[-1]
    assert (first.state, first.round) == ("running", 1)
    assert [node.outcome for node in first.nodes.values()] == ["asked"] * 3
    assert first.seconds_left(time.time()) is None
    assert last.round == 2
    assert last.seconds_left(last.since) == pytest.approx(last.round_seconds[0])


def test_a_run_that_trained_nothing_says_so(tmp_path: Path) -> None:
    path = tmp_path / "model.npz"

    def fail(partition: int, step: int, layers: Layers) -> RecordDict:
        if partition:
            raise OSError("gone")
        return record(list(layers))

    with pytest.raises((NothingTrainedError, RuntimeError)):
        SafeDSHB(num_malicious_nodes=2, checkpoint=path).start(
            federation(5, fail), model(), 1
        )
    assert read_status(find_status_file(path)).state in ("running", "nothing trained")


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"nodes": {"x": 1}}'])
def test_what_is_no_status_is_said_to_be_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "model.status"
    path.write_text(text)
    with pytest.raises(ValueError, match="no status of a run"):
        read_status(path)


Names = Callable[[str | None], dict[int, RegisteredNode]]


@pytest.fixture
def names(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> dict[int, str]:
    ids = sorted(read_status(find_status_file(checkpoint)).nodes)
    known = {n: RegisteredNode(f"ward-{i}", "online") for i, n in enumerate(ids[1:])}
    known[5] = RegisteredNode("<script>", "offline")
    monkeypatch.setattr(status_page, "list_registered_nodes", lambda _: known)
    return {n: known[n].name if n in known else str(n) for n in ids}


def test_nodes_are_shown_by_their_names(
    checkpoint: Path,
    names: dict[int, str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert cli.main(["status", str(checkpoint), "--superlink", "federation"]) == 0
    told = capsys.readouterr().out
    assert "ended: round 2 of 2" in told
    assert all(name[:12] in told for name in names.values())
    assert "excluded: not-finite" in told
    assert "never asked" in told  # the one that is registered and offline
    assert cli.main(["status", str(checkpoint), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["round"] == 2


def test_the_page_escapes_names_and_the_metrics_use_them(
    checkpoint: Path, names: dict[int, str]
) -> None:
    view = RunView(find_status_file(checkpoint), "federation")
    kind, page = view.page()
    assert kind.startswith("text/html")
    assert b"&lt;script&gt;" in page
    assert b"<script>" not in page
    samples = list(view.collect())
    outcomes = {
        (s.labels["node"], s.labels["outcome"]): s.value
        for s in samples
        if s.name == "safedshb_run_node_outcome"
    }
    assert {node for node, _ in outcomes} == set(names.values())
    for node in names.values():
        assert sum(outcomes[node, o] for o in ("used", "left out", "excluded")) == 1
    rounds = [s.value for s in samples if s.name == "safedshb_run_round"]
    assert rounds == [2]


def test_a_superlink_that_is_away_leaves_ids_and_says_so(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(_: str | None) -> dict[int, RegisteredNode]:
        raise ValueError("the SuperLink does not answer: no route")

    monkeypatch.setattr(status_page, "list_registered_nodes", away)
    lines, rows = RunView(find_status_file(checkpoint), "federation").describe()
    assert "the SuperLink does not answer: no route" in lines
    assert len(rows) == 7


def test_no_checkpoint_has_no_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["status", str(tmp_path / "none.npz")]) == 2
    assert "none.status" in capsys.readouterr().err
