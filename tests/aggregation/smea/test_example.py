"""The worked example says what is so, of its own points and of others."""

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from flwr_safedshb import SMEA
from flwr_safedshb.aggregation.rule import FloatArray
from flwr_safedshb.aggregation.smea import example
from flwr_safedshb.aggregation.smea.example import (
    POINTS,
    F,
    derive_conclusions,
    top_eigenvalue,
)

PAGE = Path(__file__).parents[3] / "docs" / "robustness.md"


def better_sets(
    points: FloatArray, f: int, anchor: int, t: float
) -> list[frozenset[int]]:
    """Return all sets with the anchor and below t, by looking at every one."""
    others = [i for i in range(len(points)) if i != anchor]
    sets = [(anchor, *rest) for rest in combinations(others, len(points) - f - 1)]
    return [frozenset(s) for s in sets if top_eigenvalue(points[list(s)]) < t]


@pytest.mark.parametrize("seed", range(200))
def test_every_conclusion_is_true(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n, f = [(7, 2), (7, 3), (9, 2), (8, 3)][seed % 4]
    points = rng.normal(size=(n, 3)) * rng.choice([1.0, 3.0], size=(n, 1))
    t = top_eigenvalue(points[: n - f]) * rng.uniform(0.5, 1.0)
    better = better_sets(points, f, 0, t)
    for one in derive_conclusions(points, f, 0, t):
        match one.prune:
            case "nothing":
                assert not better
            case "found":
                assert frozenset(one.in_) in better
            case _:
                assert all(not s.intersection(one.out) for s in better)
                assert all(s.issuperset(one.in_) for s in better)
                assert not any(s.issuperset(p) for s in better for p in one.pairs)


def test_all_prunes_are_met_and_the_answer_is_smeas(
    capsys: pytest.CaptureFixture[str],
) -> None:
    example.main()
    told = capsys.readouterr().out
    for prune in ("far", "pairs", "inertia", "found", "nothing"):
        assert f"    {prune}: " in told
    assert told.endswith(f"{SMEA()(POINTS, F)}, the mean of 0, 1, 2, 3, 5.\n")
    # The page shows what the command prints.
    assert told in PAGE.read_text()
