"""What the benchmark of a deployment says of its measurements, and its lower bound."""

from pathlib import Path

import pytest

from simulations.benchmarks import deployment
from simulations.benchmarks.deployment import (
    FederationCost,
    FlowerDeployment,
    OurDeployment,
)
from simulations.benchmarks.federated import make_model
from simulations.benchmarks.lower_bound import measure_lower_bound
from simulations.benchmarks.result import compare_thresholds


@pytest.mark.parametrize(
    ("length", "spent", "verdict"), [(1.0, 0.3, "met"), (1.1, 0.31, "MISSED")]
)
def test_thresholds_see_what_they_are_about(
    length: float, spent: float, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure_federation(
        kind: type, folder: Path, num_nodes: int, hidden: int, rounds: int
    ) -> FederationCost:
        if kind is FlowerDeployment:
            return FederationCost(round=8.0, message=4.0, memory=230.0)
        assert kind is OurDeployment
        return FederationCost(round=length, message=spent, memory=400.0)

    monkeypatch.setattr(deployment, "measure_federation", measure_federation)
    monkeypatch.setattr(deployment, "measure_lower_bound", lambda *_: 0.1)
    result = deployment.measure(quick=False)
    verdicts = [row[3] for row in compare_thresholds("deployment", result.figures).rows]
    assert verdicts == [verdict, verdict]
    assert result.costs["round, ours / Flower"] == pytest.approx(length / 8.0)
    (table,) = result.tables
    assert [row[:2] for row in table.rows] == [
        *((4, "69"), (4, "1.8M"), (4, "12.8M")),
        *((1, "69"), (12, "69"), (20, "69")),
    ]


@pytest.mark.parametrize(
    ("hidden", "size"), [(0, 69), (1000, 1_787_001), (3200, 12_758_401)]
)
def test_models_have_the_sizes_that_the_table_names(hidden: int, size: int) -> None:
    assert sum(p.numel() for p in make_model(hidden).parameters()) == size


@pytest.mark.process
def test_the_lower_bound_sends_steps_and_answers(tmp_path: Path) -> None:
    assert measure_lower_bound(tmp_path / "folder", 2, 0) > 0.0
