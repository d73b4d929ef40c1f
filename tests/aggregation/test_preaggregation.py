"""Rules of others that limit reach, each against its definition written out slowly."""

import numpy as np
import pytest

from flwr_safedshb.aggregation import (
    ARC,
    SMEA,
    Average,
    Bucketing,
    CentredClipping,
    Median,
    StaticClipping,
)
from tests.oracles import Floats


def vectors(seed: int, n: int = 9, d: int = 5) -> Floats:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, d)) * rng.uniform(0.1, 5.0, size=(n, 1))


@pytest.mark.parametrize("seed", range(5))
def test_static_clipping_shortens_what_is_longer(seed: int) -> None:
    given = vectors(seed)
    shortened = np.array([x * min(1.0, 2.0 / np.linalg.norm(x)) for x in given])
    for rule in (Average(), SMEA(), Median()):
        np.testing.assert_allclose(
            StaticClipping(rule, 2.0)(given, 2), rule(shortened, 2), atol=1e-12
        )


@pytest.mark.parametrize("f", range(5))
def test_arc_clips_the_longest_to_the_next(f: int) -> None:
    given = vectors(f)
    n = len(given)
    k = int(np.floor(2 * f / n * (n - f) + 1e-9))
    order = sorted(range(n), key=lambda i: -np.linalg.norm(given[i]))
    limit = np.linalg.norm(given[order[k]])
    expected = given.copy()
    for i in order[:k]:
        expected[i] *= limit / np.linalg.norm(given[i])
    np.testing.assert_allclose(
        ARC(Average())(given, f), expected.mean(axis=0), atol=1e-12
    )


def test_without_adversaries_arc_leaves_all_as_it_is() -> None:
    given = vectors(0)
    np.testing.assert_allclose(ARC(Average())(given, 0), given.mean(axis=0))


def test_the_mean_of_equal_buckets_is_the_mean() -> None:
    given = vectors(1, n=8)
    np.testing.assert_allclose(
        Bucketing(Average(), size=2)(given, 1), given.mean(axis=0), atol=1e-12
    )


def test_buckets_of_one_are_the_vectors() -> None:
    given = vectors(2)
    np.testing.assert_allclose(
        Bucketing(SMEA(), size=1)(given, 3), SMEA()(given, 3), atol=1e-12
    )


def test_buckets_are_drawn_anew_and_by_the_seed() -> None:
    given = vectors(3)

    def drawn(seed: int) -> Floats:
        rule = Bucketing(Median(), size=3, seed=seed)
        return np.array([rule(given, 1) for _ in range(5)])

    assert len(np.unique(drawn(0), axis=0)) > 1
    np.testing.assert_array_equal(drawn(0), drawn(0))
    assert not np.array_equal(drawn(0), drawn(1))


def test_too_many_adversaries_for_the_buckets_are_refused() -> None:
    with pytest.raises(ValueError, match=r"half of the 4 buckets .* lower size=2"):
        Bucketing(SMEA())(vectors(0, n=7), 3)


@pytest.mark.parametrize("seed", range(5))
def test_centred_clipping_pulls_no_farther_than_its_radius(seed: int) -> None:
    given, f = vectors(seed), 3
    n = len(given)
    distances = np.square(given[:, None] - given[None]).sum(axis=2)
    around = np.sort(distances, axis=1)[:, : n - f].sum(axis=1)
    expected = given[np.argmin(around)]
    for _ in range(4):
        pulls = [
            (x - expected)
            * min(1.0, 1.5 / (float(np.linalg.norm(x - expected)) or 1.0))
            for x in given
        ]
        expected = expected + np.mean(pulls, axis=0)
    rule = CentredClipping(radius=1.5, iterations=4)
    np.testing.assert_allclose(rule(given, f), expected, atol=1e-9)
    # One vector far away moves it by no more than its own pulls.
    moved = given.copy()
    moved[0] = 1e6
    assert np.linalg.norm(rule(moved, f)) < 1e3


@pytest.mark.parametrize("value", [0.0, -1.0, np.inf, np.nan])
def test_bad_bounds_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match="bound"):
        StaticClipping(SMEA(), value)
    with pytest.raises(ValueError, match="radius"):
        CentredClipping(value)
    with pytest.raises(ValueError, match="iterations"):
        CentredClipping(1.0, 0)
    with pytest.raises(ValueError, match="size"):
        Bucketing(SMEA(), 0)
