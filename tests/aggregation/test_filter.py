import numpy as np
import pytest

from flwr_safedshb.aggregation import CAF, Filter, filter
from flwr_safedshb.aggregation.filter import min_overlap
from flwr_safedshb.theory import filter_eta, kappa_filter
from tests.oracles import FAMILIES, Floats, covariance_lambda, family, subsets


def literal_share(c: Floats, f: int) -> float:
    """What weights share with the uniform ones of a subset, at least, by trying all."""
    size = len(c) - f
    shared = np.minimum(c / c.sum(), 1 / size)
    return min(float(shared[subset].sum()) for subset in subsets(len(c), size))


def literal_filter(
    x: Floats, f: int, spectral_bound: float, min_mass: float | None
) -> tuple[Floats, Floats]:
    """The definition in d dimensions: weights, mean; see the module for the test."""
    n = len(x)
    share = 0.0
    if min_mass is None:
        min_mass = n - 2 * f
        if spectral_bound == 0 and f >= n / 3:
            share = ((n - 2 * f) / (n - f)) ** 3
    c = np.ones(n)
    seen: list[tuple[float, Floats]] = []
    while True:
        mean = c @ x / c.sum()
        centred = x - mean
        covariance = (c[:, None] * centred).T @ centred / c.sum()
        values, vectors = np.linalg.eigh(covariance)
        if share == 0 or literal_share(c, f) >= share:
            seen.append((values[-1], c))
        if values[-1] <= filter_eta(n, f) * spectral_bound + 1e-13:
            c = seen[-1][1]
            return c / c.sum(), c @ x / c.sum()
        tau = np.where(c > 0, (centred @ vectors[:, -1]) ** 2, 0.0)
        c = c * (1.0 - tau / tau.max())
        if c.sum() <= min_mass:
            best = min(seen, key=lambda pair: pair[0])[1] if min_mass else seen[-1][1]
            return best / best.sum(), best @ x / best.sum()


@pytest.mark.parametrize("name", ["isotropic", "alie", "sign-flip", "heterogeneous"])
@pytest.mark.parametrize("bound", [0.0, 0.05, 1.0])
def test_filter_equals_its_definition(name: str, bound: float) -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        n = int(rng.integers(4, 15))
        f = int(rng.integers(0, (n - 1) // 2 + 1))
        x = family(name, n, f, int(rng.integers(2, 9)), rng)
        for min_mass in (None, n - f):
            weights, mean = literal_filter(x, f, bound, min_mass)
            rule = Filter(bound, min_mass)
            np.testing.assert_allclose(rule(x, f), mean, atol=1e-7)
            np.testing.assert_allclose(rule.weigh(x @ x.T, f).weights, weights, 0, 1e-7)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("min_mass", [None, 0.0])
def test_filter_ends_and_stays_finite_on_every_family(
    name: str, min_mass: float | None
) -> None:
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


@pytest.mark.parametrize("name", FAMILIES)
def test_below_a_third_the_default_is_robust_averaging(name: str) -> None:
    """The inequality of the class, for every subset."""
    for seed in range(15):
        rng = np.random.default_rng(seed)
        n, f = [(4, 1), (7, 2), (9, 2), (10, 3)][seed % 4]
        x = family(name, n, f, int(rng.integers(1, 6)), rng)
        out = Filter()(x, f)
        kappa = Filter().kappa(n, f)
        assert kappa is not None
        assert CAF().kappa(n, f) == kappa
        for s in subsets(n, n - f):
            error = np.sum((out - x[s].mean(axis=0)) ** 2)
            scale = float(np.sum(x[s] ** 2)) * 1e-14
            assert error <= kappa * covariance_lambda(x[s]) + scale


@pytest.mark.parametrize("name", FAMILIES)
def test_every_answer_without_a_bound_is_certified(name: str) -> None:
    """The same with the answer's own constant, for f up to n/2."""
    finite = 0
    for seed in range(12):
        rng = np.random.default_rng(seed)
        n, f = [(5, 2), (7, 3), (7, 2), (9, 4)][seed % 4]
        x = family(name, n, f, int(rng.integers(1, 6)), rng)
        x -= x[-1]  # inner products of points far from 0 lose digits
        for rule in (Filter(), CAF(), Filter(min_mass=0.0)):
            answer = rule.weigh(x @ x.T, f)
            assert answer.kappa is not None
            if 3 * f < n and rule != Filter(min_mass=0.0):
                assert answer.kappa <= (rule.kappa(n, f) or 0.0) * (1 + 1e-12)
            if answer.kappa == np.inf:
                continue
            finite += 1
            out = answer.weights @ x
            for s in subsets(n, n - f):
                error = np.sum((out - x[s].mean(axis=0)) ** 2)
                scale = float(np.sum(x[s] ** 2)) * 1e-12
                assert error <= answer.kappa * covariance_lambda(x[s]) + scale
    assert finite > 0


def test_a_bound_that_turns_out_too_small_proves_nothing() -> None:
    x = np.random.default_rng(0).normal(size=(7, 30))
    assert Filter(1e-6).weigh(x @ x.T, 3).kappa == np.inf
    assert Filter(1e6).weigh(x @ x.T, 3).kappa == 9.0


def test_filter_states_a_constant_only_where_it_is_proven() -> None:
    assert Filter(1.0).kappa_kind == "spectral bound"
    assert (Filter().kappa_kind, CAF().kappa_kind) == ("spectral", "spectral")
    assert Filter(1.0).paper_kappa(7, 3) == 85.5
    assert Filter().paper_kappa(7, 3) is None
    assert Filter(min_mass=0.0).kappa(7, 2) is None
    assert Filter(min_mass=3.0).kappa(7, 2) == Filter().kappa(7, 2)


def hidden_colluders(seed: int) -> Floats:
    """Three who send one vector that stands out less than the noise of the honest."""
    rng = np.random.default_rng(seed)
    honest = 0.1 + rng.normal(size=(4, 69))
    return np.vstack([honest, np.tile(-0.5 * honest.mean(axis=0), (3, 1))])


def test_colluders_never_hold_all_the_weight() -> None:
    captured = 0
    for seed in range(100):
        x = hidden_colluders(seed)
        weights = Filter().weigh(x @ x.T, 3).weights
        assert weights[:4].sum() >= 1 / 64
        captured += CAF().weigh(x @ x.T, 3).weights[:4].sum() < 1e-9
    # So they would, without a look at who may hold the weight.
    assert captured > 50


@pytest.mark.parametrize(("n", "f"), [(5, 2), (7, 3), (9, 4), (21, 10)])
def test_colluders_far_away_are_dropped(n: int, f: int) -> None:
    """It takes most of the honest mass, too: no stop may come before that."""
    x = np.random.default_rng(n).normal(size=(n, 30))
    x[:f] = 1e4
    weights = Filter().weigh(x @ x.T, f).weights
    np.testing.assert_array_equal(weights[:f], 0.0)
    stopped = Filter(min_mass=f + 0.5).weigh(x @ x.T, f).weights
    np.testing.assert_allclose(stopped, 1 / n)


def test_the_share_is_the_least_over_all_subsets() -> None:
    for seed in range(50):
        rng = np.random.default_rng(seed)
        n = int(rng.integers(3, 9))
        f = int(rng.integers(0, (n - 1) // 2 + 1))
        c = rng.uniform(size=n) * (rng.uniform(size=n) < 0.7)
        c[0] = 1.0
        assert min_overlap(c[None], f)[0] == pytest.approx(
            literal_share(c, f), abs=1e-12
        )


def test_valid_bound_gives_the_proved_error() -> None:
    for seed in range(200):
        rng = np.random.default_rng(seed)
        n, f = [(7, 3), (10, 2), (9, 4)][seed % 3]
        name = ["alie", "sign-flip", "clusters", "far-point"][seed % 4]
        x = family(name, n, f, 4, rng)
        # Of every S whose eigenvalue the bound covers, not of the honest ones alone.
        bound = 1.2 * covariance_lambda(x[f:])
        out = Filter(bound)(x, f)
        for s in subsets(n, n - f):
            if covariance_lambda(x[s]) <= bound:
                error = np.sum((out - x[s].mean(axis=0)) ** 2)
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
    x = family("alie", 13, 4, 6, np.random.default_rng(0))
    assert CAF()(x, 4).tobytes() == Filter()(x, 4).tobytes()
    assert CAF()(x, 6).tobytes() == Filter(min_mass=1.0)(x, 6).tobytes()


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
