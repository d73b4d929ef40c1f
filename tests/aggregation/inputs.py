"""Families of finite vectors on which rules have to answer, however they are made."""

from collections.abc import Callable

import numpy as np

from tests.oracles import Floats

Family = Callable[[np.random.Generator, int, int, int], Floats]
FLOAT32_MAX = float(np.finfo(np.float32).max)


def _scale(rng: np.random.Generator, low: float, high: float) -> float:
    return float(10.0 ** rng.uniform(low, high))


def _way(rng: np.random.Generator, d: int) -> Floats:
    way = rng.normal(size=d)
    unit: Floats = way / np.linalg.norm(way)
    return unit


def isotropic(rng: np.random.Generator, n: int, f: int, d: int) -> Floats:
    return rng.normal(size=(n, d))


def two_scales(rng: np.random.Generator, n: int, f: int, d: int) -> Floats:
    x = rng.normal(size=(n, d))
    x[f:] *= _scale(rng, -12, 0)
    return x


def common_offset(rng: np.random.Generator, n: int, f: int, d: int) -> Floats:
    return rng.normal(size=(n, d)) + _scale(rng, 0, 8) * _way(rng, d)


def offset_gap_spread(rng: np.random.Generator, n: int, f: int, d: int) -> Floats:
    """A common offset far above a gap, which is far above the larger one's spread."""
    offset = _scale(rng, 2, 8)
    gap = offset * _scale(rng, -7, -1)
    x = rng.normal(size=(n, d))
    x[:f] *= gap * _scale(rng, -6, 0)
    x[f:] *= gap * _scale(rng, -7, -1)
    x[:f] += gap * _way(rng, d)
    return x + offset * _way(rng, d)


def nested(rng: np.random.Generator, n: int, f: int, d: int) -> Floats:
    """Clusters of clusters of clusters."""
    x = np.zeros((n, d))
    for scale in 10.0 ** np.sort(rng.uniform(-10, 6, 4)):
        x += scale * rng.normal(size=(n, d))[rng.integers(0, min(n, 2), n)]
    return x


def denormal(rng: np.random.Generator, n: int, f: int, d: int) -> Floats:
    """Down to the smallest that float32 has; a few clients are not."""
    x = rng.normal(size=(n, d)) * _scale(rng, -45, -38)
    x[:f] *= _scale(rng, 0, 30)
    return x


def near_the_largest(rng: np.random.Generator, n: int, f: int, d: int) -> Floats:
    x = rng.normal(size=(n, d)) * _scale(rng, 30, 38.3)
    x[rng.uniform(size=x.shape) < 0.2] = FLOAT32_MAX
    return np.clip(x, -FLOAT32_MAX, FLOAT32_MAX)


def far(rng: np.random.Generator, n: int, f: int, d: int) -> Floats:
    x = rng.normal(size=(n, d))
    x[:f] *= 10.0 ** rng.uniform(3, 37, (f, 1))
    return x


def copies(rng: np.random.Generator, n: int, f: int, d: int) -> Floats:
    return rng.normal(size=(n, d))[rng.integers(0, n, n)] * _scale(rng, -3, 3)


def collinear(rng: np.random.Generator, n: int, f: int, d: int) -> Floats:
    along = rng.normal(size=n) * 10.0 ** rng.uniform(-6, 6, n)
    return np.outer(along, _way(rng, d)) + _scale(rng, -3, 6) * rng.normal(size=d)


def all_equal(rng: np.random.Generator, n: int, f: int, d: int) -> Floats:
    """Or one step of float32 apart."""
    x = np.tile(rng.normal(size=d) * _scale(rng, -40, 38), (n, 1))
    x = np.clip(x, -FLOAT32_MAX, FLOAT32_MAX).astype(np.float32)
    apart = rng.uniform(size=x.shape) < rng.choice([0.0, 0.2])
    return np.where(apart, np.nextafter(x, np.float32(0)), x).astype(np.float64)


def one_coordinate(rng: np.random.Generator, n: int, f: int, d: int) -> Floats:
    return (rng.normal(size=(n, 1)) + _scale(rng, -2, 4)) * _scale(rng, -8, 8)


def uneven_coordinates(rng: np.random.Generator, n: int, f: int, d: int) -> Floats:
    return rng.normal(size=(n, d)) * 10.0 ** rng.uniform(-20, 20, d)


def grid(rng: np.random.Generator, n: int, f: int, d: int) -> Floats:
    steps = rng.integers(-2, 3, (n, d)).astype(np.float64)
    return steps + float(rng.choice([0.0, 2.0**20]))


FAMILIES: dict[str, Family] = {
    family.__name__: family
    for family in (
        isotropic,
        two_scales,
        common_offset,
        offset_gap_spread,
        nested,
        denormal,
        near_the_largest,
        far,
        copies,
        collinear,
        all_equal,
        one_coordinate,
        uneven_coordinates,
        grid,
    )
}
# In these, no two subsets and no two clients are as good as each other, to a rule that
# looks at them all, either.
WITHOUT_TIES = ("isotropic", "uneven_coordinates")
SIZES = ((1, 0), (2, 0), (3, 1), (4, 1), (5, 2), (7, 3), (7, 2), (8, 3), (9, 4), (6, 0))
# Too many subsets to look at each: SMEA searches.
SEARCHED = ((11, 5), (12, 4))


def draw(
    name: str, seed: int, count: int, sizes: tuple[tuple[int, int], ...] = SIZES
) -> tuple[Floats, int, type[np.floating]]:
    """Return `count` inputs of one size and dtype, (count, n, d), as float64."""
    rng = np.random.default_rng([seed, list(FAMILIES).index(name)])
    n, f = sizes[int(rng.integers(len(sizes)))]
    d = int(rng.integers(1, 9))
    dtype = np.float32 if rng.integers(2) else np.float64
    drawn = np.array([FAMILIES[name](rng, n, f, d) for _ in range(count)])
    return drawn.astype(dtype).astype(np.float64), f, dtype
