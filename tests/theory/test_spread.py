"""Two kinds of spread: what they are, how far apart they can be, what noise adds."""

import numpy as np
import pytest

from flwr_safedshb import theory


def test_heterogeneity_by_hand() -> None:
    # Four points on a cross, two of them twice as far: along x 8/4, along y 2/4.
    cross = [[2.0, 0.0], [-2.0, 0.0], [0.0, 1.0], [0.0, -1.0]]
    for offset in (0.0, 1e3):
        total, top = theory.heterogeneity(np.array(cross) + offset)
        assert total**2 == pytest.approx(2.5)
        assert top**2 == pytest.approx(2.0)
    assert theory.heterogeneity([[3.0, 4.0]]) == (0.0, 0.0)


def test_heterogeneity_is_that_of_the_definition() -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        x = rng.normal(size=(int(rng.integers(2, 9)), int(rng.integers(1, 9))))
        covariance = np.atleast_2d(np.cov(x.T, bias=True))
        total, top = theory.heterogeneity(x)
        assert total**2 == pytest.approx(np.trace(covariance))
        assert top**2 == pytest.approx(np.linalg.eigvalsh(covariance)[-1])
        factor = theory.spectral_factor(*x.shape)
        assert top**2 <= total**2 * (1 + 1e-12) <= factor * top**2 * (1 + 1e-9)


@pytest.mark.parametrize(("h", "d"), [(2, 5), (4, 69), (9, 3), (6, 1)])
def test_the_factor_is_attained(h: int, d: int) -> None:
    # A regular simplex differs by the same in all of its h - 1 directions; where d is
    # smaller, so do equally many pairs +-e_j.
    if d >= h - 1:
        centred = np.eye(h) - 1 / h
        basis = np.linalg.svd(centred)[0][:, : h - 1]
        points = np.zeros((h, d))
        points[:, : h - 1] = basis
    else:
        points = np.array([(1 if i % 2 else -1) * np.eye(d)[i // 2 % d] for i in
                           range(2 * d)])  # fmt: skip
        h = 2 * d
    total, top = theory.heterogeneity(points)
    assert (total / top) ** 2 == pytest.approx(theory.spectral_factor(h, d))
    assert theory.spectral_factor(h) == h - 1


@pytest.mark.parametrize(("h", "d"), [(2, 1), (2, 300), (4, 69), (16, 16), (64, 5)])
def test_what_noise_adds(h: int, d: int) -> None:
    rng = np.random.default_rng(h)
    squares = np.square(
        [theory.heterogeneity(0.5 * rng.normal(size=(h, d))) for _ in range(400)]
    )
    trace, top = squares.mean(axis=0)
    error = squares.std(axis=0) / 20
    exact, bound = theory.noise_spread(h, d, 0.5)
    assert trace == pytest.approx(exact, abs=4 * error[0])
    # Below the bound, and by no more than (sqrt(h-1) - sqrt(d))^2 allows.
    assert top <= bound + 4 * error[1]
    if d >= 64:
        assert top >= 0.5 * bound
        # Noise does not count "once": that would be 1/4.
        assert top > 1.0
    assert theory.noise_spread(1, d, 0.5) == (0.0, 0.0)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9, 0.99])
def test_noise_in_a_momentum(momentum: float) -> None:
    # The sum of the squares of the weights, step by step.
    squares = 0.0
    for steps in range(1, 60):
        squares = momentum**2 * squares + (1 - momentum) ** 2
        found = theory.noise_in_momentum(3.0, momentum, steps)
        assert found == pytest.approx(3.0 * np.sqrt(squares))
    assert theory.noise_in_momentum(1.0, 0.99) ** -2 == pytest.approx(199.0)
    assert theory.noise_in_momentum(0.08, 0.0) == 0.08


@pytest.mark.parametrize(("h", "d"), [(4, 69), (16, 69), (40, 1000)])
@pytest.mark.parametrize("spread", [0.0, 6.0, 20.0])
def test_noise_is_taken_off(h: int, d: int, spread: float) -> None:
    # Half of the clients on either side of their mean, in one direction.
    signal = np.zeros((h, d))
    signal[:, 0] = spread * np.where(np.arange(h) % 2, 1.0, -1.0)
    found = []
    for seed in range(60):
        noisy = signal + np.random.default_rng(seed).normal(size=(h, d))
        total, top = theory.heterogeneity(noisy)
        found.append(theory.heterogeneity_estimate(total**2, top**2, h, d, 1.0))
    total, top = np.mean(np.square(found), axis=0) ** 0.5
    if spread == 0.0:
        # Noise alone: far less than the 8 or 30 that it looks like.
        assert total < 3.5
        assert top < 2.5
    else:
        assert total == pytest.approx(spread, rel=0.15)
        assert top == pytest.approx(spread, rel=0.2)
    # Without noise nothing is taken off.
    assert theory.heterogeneity_estimate(9.0, 4.0, h, d, 0.0) == (3.0, 2.0)


@pytest.mark.parametrize(
    ("vectors", "words"),
    [
        (np.zeros(3), r"shape \(3,\)"),
        (np.zeros((0, 3)), r"shape \(0, 3\)"),
        ([[np.nan]], "NaN or infinity"),
    ],
)
def test_what_has_no_spread_is_refused(vectors: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        theory.heterogeneity(vectors)  # type: ignore[arg-type]
