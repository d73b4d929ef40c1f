"""What the benchmark of a deployment says of figures, and its floor."""

from pathlib import Path

import pytest

from simulations.benchmarks import deployment
from simulations.benchmarks.federated import model_of
from simulations.benchmarks.floor import floor
from simulations.benchmarks.nodes import FlowersOwn, OurDeployment, Taken


@pytest.mark.parametrize(
    ("length", "spent", "holds"), [(1.0, 0.3, True), (1.1, 0.31, False)]
)
def test_targets_see_what_they_are_about(
    length: float, spent: float, holds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def taken(
        kind: type, folder: Path, num_nodes: int, hidden: int, rounds: int
    ) -> Taken:
        if kind is FlowersOwn:
            return Taken(first=20.0, round=8.0, message=4.0, memory=230.0)
        assert kind is OurDeployment
        return Taken(first=9.0, round=length, message=spent, memory=400.0)

    monkeypatch.setattr(deployment, "taken", taken)
    monkeypatch.setattr(deployment, "floor", lambda *_: 0.1)
    outcome = deployment.run(quick=False)
    assert [check.holds for check in outcome.checks] == [holds, holds]
    assert outcome.costs["round, ours / Flower"] == pytest.approx(length / 8.0)
    (table,) = outcome.tables
    assert [row[:2] for row in table.rows] == [
        *(("4", "69"), ("4", "1.8M"), ("4", "12.8M")),
        *(("1", "69"), ("12", "69"), ("20", "69")),
    ]


@pytest.mark.parametrize(
    ("hidden", "size"), [(0, 69), (1000, 1_787_001), (3200, 12_758_401)]
)
def test_models_have_the_sizes_that_the_table_names(hidden: int, size: int) -> None:
    assert sum(p.numel() for p in model_of(hidden).parameters()) == size


@pytest.mark.process
def test_the_floor_sends_steps_and_answers(tmp_path: Path) -> None:
    assert floor(tmp_path / "floor", 2, 0) > 0.0
