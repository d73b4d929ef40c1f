import numpy as np
import pytest

from flwr_safedshb.aggregation import CAF, Filter, filter
from flwr_safedshb.theory import filter_eta, kappa_filter
from tests.oracles import FAMILIES, Floats, covariance_lambda, family


def literal_filter(
    x: Floats, f: int, spectral_bound: float, min_mass: float
) -> tuple[Floats, Floats]:
    """The definition in d dimensions: weights, mean; see the module for the test."""
    n = len(x)
    c = np.ones(n)
    seen: list[tuple[float, Floats]] = []
    while True:
        mean = c @ x / c.sum()
        centred = x - mean
        covariance = (c[:, None] * centred).T @ centred / c.sum()
        values, vectors = np.linalg.eigh(covariance)
        seen.append((values[-1], c))
        if values[-1] <= filter_eta(n, f) * spectral_bound + 1e-13:
            return c / c.sum(), mean
        tau = np.where(c > 0, (centred @ vectors[:, -1]) ** 2, 0.0)
        c = c * (1.0 - tau / tau.max())
        if c.sum() <= min_mass:
            best = min(seen, key=lambda pair: pair[0])[1] if min_mass else seen[-1][1]
            return best / best.sum(), best @ x / best.sum()


@pytest.mark.parametrize("name", ["isotropic", "alie", "sign-flip", "heterogeneous"])
@pytest.mark.parametrize("bound", [0.0, 0.05, 1.0])
def test_equals_the_definition(name: str, bound: float) -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        n = int(rng.integers(4, 15))
        f = int(rng.integers(0, (n - 1) // 2 + 1))
        x = family(name, n, f, int(rng.integers(2, 9)), rng)
        for min_mass in (None, n - f):
            floor = n - 2.0 * f if min_mass is None else float(min_mass)
            weights, mean = literal_filter(x, f, bound, floor)
            rule = Filter(bound, min_mass)
            np.testing.assert_allclose(rule(x, f), mean, atol=1e-7)
            np.testing.assert_allclose(rule.weigh(x @ x.T, f).weights, weights, 0, 1e-7)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("min_mass", [None, 0.0])
def test_ends_and_stays_finite(name: str, min_mass: float | None) -> None:
    for seed in range(10):
        x = family(name, 11, 4, 3, np.random.default_rng(seed))
        assert np.isfinite(Filter(min_mass=min_mass)(x, 4)).all()


def test_run_to_the_end_all_weight_is_on_one_point() -> None:
    x = np.random.default_rng(0).normal(size=(9, 20))
    weights = Filter(min_mass=0.0).weigh(x @ x.T, 3).weights
    # Two points are at equal distances from their mean: they stay together.
    assert (weights > 1e-9).sum() <= 2


def test_default_keeps_the_mass_of_an_honest_majority() -> None:
    x = np.random.default_rng(0).normal(size=(9, 20))
    assert (Filter().weigh(x @ x.T, 3).weights > 0).sum() >= 3


def test_valid_bound_gives_the_proved_error() -> None:
    for seed in range(200):
        rng = np.random.default_rng(seed)
        n, f = [(7, 3), (10, 2), (9, 4)][seed % 3]
        name = ["alie", "sign-flip", "clusters", "far-point"][seed % 4]
        x = family(name, n, f, 4, rng)
        bound = covariance_lambda(x[f:])
        error = np.sum((Filter(bound)(x, f) - x[f:].mean(axis=0)) ** 2)
        assert error <= kappa_filter(n, f) * bound * (1 + 1e-9)
        assert Filter(bound).weigh(x @ x.T, f).kappa == kappa_filter(n, f)


def test_a_large_bound_gives_the_mean_at_once() -> None:
    """And not the other way round, as the paper's listing has it."""
    x = np.random.default_rng(0).normal(size=(7, 3))
    np.testing.assert_allclose(Filter(1e6)(x, 3), x.mean(axis=0), rtol=1e-9)
    assert not np.allclose(Filter(0.0)(x, 3), x.mean(axis=0))


@pytest.mark.parametrize("name", ["isotropic", "alie", "duplicates", "heterogeneous"])
def test_iterative_eigenvector_equals_the_full_decomposition(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = family(name, 150, 40, 30, np.random.default_rng(0))
    iterated = Filter().weigh(x @ x.T, 40)
    assert iterated.weights.tobytes() == Filter().weigh(x @ x.T, 40).weights.tobytes()
    monkeypatch.setattr(filter, "DENSE", 1000)
    full = Filter().weigh(x @ x.T, 40)
    np.testing.assert_allclose(iterated.weights, full.weights, atol=1e-7)
    assert iterated.lambda_max == pytest.approx(full.lambda_max)


def test_caf_is_the_filter_without_a_bound() -> None:
    x = family("alie", 12, 4, 6, np.random.default_rng(0))
    assert CAF()(x, 4).tobytes() == Filter()(x, 4).tobytes()


@pytest.mark.parametrize(
    "arguments", [(-1.0, None), (np.nan, None), (0.0, -1.0), (0.0, np.inf)]
)
def test_bad_settings_are_refused(arguments: tuple[float, float | None]) -> None:
    with pytest.raises(ValueError, match="must be finite and at least 0"):
        Filter(*arguments)


def test_equal_vectors_keep_equal_weights() -> None:
    """Or round-off decides: one copy is dropped, a remnant of the other stays."""
    for seed in range(100):
        rng = np.random.default_rng(seed)
        honest = rng.normal(size=(6, 7))
        x = np.vstack([honest, np.tile(honest.mean(0) + 2 * honest.std(0), (4, 1))])
        raw = Filter().weigh(x @ x.T, 4).weights
        centred = x - honest.mean(axis=0)
        np.testing.assert_allclose(raw[6:], raw[6], atol=1e-12)
        again = Filter().weigh(centred @ centred.T, 4).weights
        np.testing.assert_allclose(raw, again, atol=1e-8)
