"""Lower bounds of a stopped search, and what it leaves out before it begins."""

import numpy as np
import pytest

from flwr_safedshb.aggregation.scatter import scatter_lambda, squared_distances
from flwr_safedshb.aggregation.smea.budget import WorkBudget
from flwr_safedshb.aggregation.smea.certificate import (
    find_reachable,
    game_bound,
    principal_coordinates,
    quick_bound,
    trace_bound,
    window_bound,
)
from flwr_safedshb.aggregation.smea.incumbent import drop_outliers, find_incumbent
from flwr_safedshb.aggregation.smea.root_cases import decompose_scatter
from tests.oracles import FAMILIES, Floats, brute_force_smea, family, subsets


def circle(n: int) -> Floats:
    angles = 2 * np.pi * np.arange(n) / n
    return np.stack([np.cos(angles), np.sin(angles)], axis=1)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "offset"])
def test_no_bound_exceeds_the_best_subset(name: str) -> None:
    """With W of trace above 1, or one pair too many, some of these would."""
    for seed in range(40):
        rng = np.random.default_rng([seed, FAMILIES.index(name)])
        n = int(rng.integers(5, 12))
        f = int(rng.integers(1, (n - 1) // 2 + 1))
        x = family(name, n, f, int(rng.integers(1, 9)), rng)
        smallest, _ = brute_force_smea(x, f)
        optimum = (n - f) * smallest
        room = 1e-9 * optimum + 1e-10 * float(np.median(np.sum(x**2, axis=1)))
        distances = squared_distances(x @ x.T)
        whole = decompose_scatter(distances, WorkBudget(0))
        some = rng.permutation(n)[: n - f]
        assert game_bound(whole, some, WorkBudget(0)) <= optimum + room
        assert quick_bound(whole, distances, n - f) <= optimum + room


def test_each_bound_is_the_best_somewhere() -> None:
    """A bound that is never the largest would be dead weight."""
    rng = np.random.default_rng(0)
    line = np.outer(rng.normal(size=40), rng.normal(size=5))
    wide = rng.normal(size=(40, 2000))
    rng = np.random.default_rng(1)
    winners = []
    for x, f in ((line, 8), (wide, 4), (circle(40), 4)):
        distances = squared_distances(x @ x.T)
        m = len(x) - f
        whole = decompose_scatter(distances, WorkBudget(0))
        best = find_incumbent(distances, m, WorkBudget(10**9))
        bounds = {
            "window": window_bound(principal_coordinates(whole), m),
            "interlacing": float(whole.values[m - 1]),
            "game": game_bound(whole, best.subset, WorkBudget(0)),
        }
        winner = max(bounds, key=bounds.__getitem__)
        winners.append(winner)
        assert bounds[winner] >= 0.85 * best.value
    assert winners == ["window", "interlacing", "game"]


def test_window_is_exact_on_a_line() -> None:
    rng = np.random.default_rng(2)
    for n, f in ((7, 3), (9, 2), (11, 5)):
        x = rng.normal(size=(n, 1)) ** 3
        smallest, _ = brute_force_smea(x, f)
        assert window_bound(x, n - f) == pytest.approx((n - f) * smallest)


def test_spread_is_below_the_trace_of_every_subset() -> None:
    rng = np.random.default_rng(3)
    x = rng.normal(size=(9, 4))
    distances = squared_distances(x @ x.T)
    for m in (5, 7, 9):
        bound, chosen = trace_bound(distances, m)
        traces = [float(((x[s] - x[s].mean(0)) ** 2).sum()) for s in subsets(9, m)]
        assert 0.5 * min(traces) < bound <= min(traces) * (1 + 1e-12)
        assert bound == pytest.approx((chosen * distances).sum() / (2 * m))
        assert chosen.sum() == m * m
    assert bound == pytest.approx(traces[0])


def test_what_is_out_of_reach_is_in_no_better_subset() -> None:
    left_out = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        n, f = 9, int(rng.integers(1, 5))
        x = rng.standard_t(1.5, size=(n, 3))
        distances = squared_distances(x @ x.T)
        values = {
            tuple(s): scatter_lambda(distances, np.array(s)) for s in subsets(n, n - f)
        }
        value = 1.5 * min(values.values())
        near = find_reachable(distances, n - f, value)
        left_out += int((~near).sum())
        for s in values:
            assert values[s] > value or near[list(s)].all()
    assert left_out >= 30


@pytest.mark.parametrize("scale", [1e-150, 1.0, 1e70])
def test_dropping_outliers_drops_what_sticks_out(scale: float) -> None:
    rng = np.random.default_rng(4)
    x = rng.normal(size=(30, 6)) * scale
    x[:5] += 20.0 * scale
    distances = squared_distances(x @ x.T)
    left = drop_outliers(distances, np.arange(30), 25, WorkBudget(0))
    assert left.tolist() == list(range(5, 30))
    equal = np.zeros((8, 8))
    assert len(drop_outliers(equal, np.arange(8), 5, WorkBudget(0))) == 5
