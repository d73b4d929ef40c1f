"""The rules of other libraries, against their definitions."""

from itertools import combinations

import numpy as np
import pytest

from flwr_safedshb.aggregation import (
    CGE,
    Bulyan,
    DnC,
    Krum,
    Meamed,
    MoNNA,
    SignGuard,
)
from tests.oracles import Floats

SIZES = [(5, 1), (7, 3), (8, 2), (11, 2), (12, 2)]
every_size = pytest.mark.parametrize(("n", "f"), SIZES)


def vectors(n: int, seed: int = 0, d: int = 6) -> Floats:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, d)) + rng.normal(size=d)


def nearest_to_median(values: Floats, count: int) -> float:
    middle = float(np.median(values))
    by_distance = sorted(values.tolist(), key=lambda value: abs(value - middle))
    return float(np.mean(by_distance[:count]))


def krum_scores(x: Floats, f: int) -> list[float]:
    return [
        sum(sorted(float(np.sum((a - b) ** 2)) for b in x)[: len(x) - f]) for a in x
    ]


@every_size
def test_meamed_is_the_mean_around_the_median(n: int, f: int) -> None:
    x = vectors(n)
    expected = [nearest_to_median(column, n - f) for column in x.T]
    np.testing.assert_allclose(Meamed()(x, f), expected)


@every_size
def test_bulyan_selects_by_krum_and_then_goes_by_coordinates(n: int, f: int) -> None:
    x = vectors(n, seed=1)
    selected = x[np.argsort(krum_scores(x, f))[: n - 2 * f]]
    if n > 4 * f:
        expected = [nearest_to_median(column, n - 4 * f) for column in selected.T]
    else:
        expected = np.median(selected, axis=0).tolist()
    np.testing.assert_allclose(Bulyan()(x, f), expected)


@every_size
def test_monna_averages_the_nearest_to_its_pivot(n: int, f: int) -> None:
    x = vectors(n, seed=2)
    pivot = Krum()(x, f)
    nearest = sorted(x, key=lambda row: float(np.linalg.norm(row - pivot)))[: n - f]
    np.testing.assert_allclose(MoNNA()(x, f), np.mean(nearest, axis=0))


@every_size
def test_dnc_leaves_out_who_is_farthest_along_the_top_direction(n: int, f: int) -> None:
    x = vectors(n, seed=3)
    centred = x - x.mean(axis=0)
    scores = np.square(centred @ np.linalg.svd(centred)[2][0])
    np.testing.assert_allclose(DnC()(x, f), x[np.argsort(scores)[: n - f]].mean(axis=0))


@every_size
def test_cge_averages_the_shortest(n: int, f: int) -> None:
    x = vectors(n, seed=4)
    shortest = sorted(x, key=lambda row: float(np.linalg.norm(row)))[: n - f]
    np.testing.assert_allclose(CGE()(x, f), np.mean(shortest, axis=0))


def two_means(points: Floats) -> list[int]:
    """The split into two with the least sum of squares, by looking at all."""

    def spread(some: tuple[int, ...]) -> float:
        rest = [i for i in range(len(points)) if i not in some]
        parts = [points[list(some)], points[rest]]
        return sum(float(np.var(part, axis=0).sum() * len(part)) for part in parts)

    sizes = range(1, len(points))
    splits = [some for k in sizes for some in combinations(range(len(points)), k)]
    best = min(splits, key=spread)
    rest = [i for i in range(len(points)) if i not in best]
    return max([*best], rest, key=len)


def test_sign_guard_keeps_usual_norms_and_most_signs() -> None:
    rng = np.random.default_rng(5)
    x = rng.normal(size=(9, 40)) + 1.0
    x[:2] *= -1.0  # signs that are unlike those of most
    x[2] *= 30.0  # too long
    x[3] *= 0.01  # too short
    x[4] *= 2.0  # shortened
    norms = np.linalg.norm(x, axis=1)
    typical = np.median(norms)
    usual = [i for i in range(9) if 0.1 * typical <= norms[i] <= 3.0 * typical]
    assert usual == [0, 1, 4, 5, 6, 7, 8]
    shares = np.array([[(row > 0).mean(), 0.0, (row < 0).mean()] for row in x[usual]])
    kept = [usual[i] for i in two_means(shares)]
    assert kept == [4, 5, 6, 7, 8]
    shortened = x * np.minimum(1.0, typical / norms)[:, None]
    np.testing.assert_allclose(SignGuard()(x, 2), shortened[kept].mean(axis=0))


@pytest.mark.parametrize("scale", [1e-300, 1.0, 1e300])
def test_sign_guard_answers_where_no_norm_is_like_another(scale: float) -> None:
    for sizes in ([0.0, 0.0, 1.0, 1.0], [1.0, 1e3, 1e6], [0.0, 0.0, 0.0]):
        x = scale * np.array(sizes)[:, None] * np.ones(3)
        out = SignGuard()(x, 1)
        assert np.isfinite(out).all()
        assert x.min() <= out.min() <= out.max() <= x.max() * (1 + 1e-12)


def test_sign_guard_refuses_bounds_that_may_leave_nobody() -> None:
    for options in ({"low": 2.0}, {"high": 1.5}, {"low": 0.0}):
        with pytest.raises(ValueError, match="low="):
            SignGuard(**options)
