import numpy as np
import pytest
from scipy.optimize import minimize

from flwr_safedshb.aggregation import (
    MDA,
    NNM,
    Average,
    GeometricMedian,
    Krum,
    Median,
    MultiKrum,
    TrimmedMean,
    baselines,
)
from tests.oracles import FAMILIES, Floats, family, subsets


def cases(count: int) -> list[tuple[Floats, int]]:
    result = []
    for seed in range(count):
        rng = np.random.default_rng(seed)
        n = int(rng.integers(3, 12))
        f = int(rng.integers(0, (n - 1) // 2 + 1))
        name = ["isotropic", "alie", "clusters", "heterogeneous"][seed % 4]
        result.append((family(name, n, f, int(rng.integers(1, 7)), rng), f))
    return result


def krum_scores(x: Floats, f: int) -> Floats:
    distances = ((x[:, None] - x[None]) ** 2).sum(axis=-1)
    scores: Floats = np.sort(distances, axis=1)[:, : len(x) - f].sum(axis=1)
    return scores


def test_average_is_the_mean() -> None:
    for x, f in cases(20):
        np.testing.assert_allclose(Average()(x, f), x.mean(axis=0), atol=1e-12)


def test_krum_and_multikrum_equal_their_definitions() -> None:
    for x, f in cases(60):
        order = np.argsort(krum_scores(x, f), kind="stable")
        result = Krum()(x, f)
        # Two vectors alone have equal scores.
        best = krum_scores(x, f) <= krum_scores(x, f).min() * (1 + 1e-9)
        assert min(np.abs(x[best] - result).max(axis=1)) < 1e-12
        mean = x[order[: len(x) - f]].mean(axis=0)
        np.testing.assert_allclose(MultiKrum()(x, f), mean, atol=1e-9)


def test_geometric_median_minimises_the_sum_of_distances() -> None:
    for x, f in cases(60):
        result = GeometricMedian()(x, f).astype(np.float64)

        def total(z: Floats, x: Floats = x) -> float:
            return float(np.sqrt(((x - z) ** 2).sum(axis=1)).sum())

        start = np.median(x, axis=0)
        other = minimize(total, start, method="Nelder-Mead", options={"maxfev": 4000})
        assert total(result) <= other.fun * (1 + 1e-9)
        assert total(result) <= min(total(row) for row in x) * (1 + 1e-12)


def test_a_majority_at_one_place_holds_the_geometric_median() -> None:
    """A majority at one place holds the median there; Weiszfeld alone would crawl."""
    x = np.array([[0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [5.0, 1.0], [-3.0, 8.0]])
    assert GeometricMedian()(x, 2).tolist() == [0.0, 0.0]
    corner = np.array([[0.0, 0.0], [1.0, 0.05], [-1.0, 0.05]])
    np.testing.assert_allclose(GeometricMedian()(corner, 1), [0.0, 0.0], atol=1e-12)


def test_geometric_medians_beside_a_vector_take_few_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where Weiszfeld alone would crawl, and many side by side as each one alone."""
    monkeypatch.setattr(baselines, "MEDIAN_STEPS", 40)
    rng = np.random.default_rng(0)
    honest = rng.normal(size=(4, 20))
    shifts = np.linspace(0.2, 3.0, 40)[:, None] * rng.normal(size=20)
    groups = [np.vstack((honest, np.tile(honest[0] + move, (3, 1)))) for move in shifts]
    grams = np.array([x @ x.T for x in groups])
    weights = GeometricMedian().weigh_many(grams, 3)
    for x, gram, found in zip(groups, grams, weights, strict=True):
        np.testing.assert_allclose(GeometricMedian().weigh(gram, 3).weights, found)
        away = x - found @ x
        lengths = np.linalg.norm(away, axis=1)
        there = lengths < 1e-9
        pull = (away[~there] / lengths[~there, None]).sum(axis=0)
        assert np.linalg.norm(pull) <= there.sum() + 1e-8


def diameter(x: Floats) -> float:
    return float(((x[:, None] - x[None]) ** 2).sum(axis=-1).max())


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "offset"])
def test_mda_has_the_smallest_diameter(name: str) -> None:
    for seed in range(25):
        rng = np.random.default_rng(seed)
        n = int(rng.integers(3, 12))
        f = int(rng.integers(0, (n - 1) // 2 + 1))
        x = family(name, n, f, int(rng.integers(1, 7)), rng)
        subset = MDA().weigh(x @ x.T, f).subset
        assert subset is not None
        assert len(subset) == n - f
        best = min(diameter(x[s]) for s in subsets(n, n - f))
        scale = float(np.median(np.sum(x**2, axis=1)))
        assert diameter(x[subset]) == pytest.approx(best, rel=1e-9, abs=1e-12 * scale)


def test_mda_of_many_vectors_and_of_a_spent_budget() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 5))
    x[:20] += 50.0
    subset = MDA().weigh(x @ x.T, 20).subset
    assert subset is not None
    assert subset.tolist() == list(range(20, 60))
    stopped = MDA(max_nodes=0).weigh(x @ x.T, 20).subset
    assert stopped is not None
    assert len(stopped) == 40


def test_coordinatewise_rules_equal_their_definitions() -> None:
    for x, f in cases(40):
        n = len(x)
        np.testing.assert_allclose(Median()(x, f), np.median(x, axis=0), atol=1e-12)
        expected = np.sort(x, axis=0)[f : n - f].mean(axis=0)
        np.testing.assert_allclose(TrimmedMean()(x, f), expected, atol=1e-12)


@pytest.mark.parametrize("inner", [Median(), TrimmedMean(), Krum(), Average()], ids=str)
def test_mixing_equals_mixing_the_vectors_first(
    inner: Median | TrimmedMean | Krum | Average,
) -> None:
    for x, f in cases(40):
        n = len(x)
        distances = ((x[:, None] - x[None]) ** 2).sum(axis=-1)
        near = np.argsort(distances, axis=1, kind="stable")[:, : n - f]
        mixed = x[near].mean(axis=1)
        result, expected = NNM(inner)(x, f), inner(mixed, f)
        if isinstance(inner, Krum):  # mixed vectors often tie
            scores = krum_scores(mixed, f)
            best = mixed[scores <= scores.min() + 1e-9]
            assert min(np.abs(best - result).max(axis=1)) < 1e-9
        else:
            np.testing.assert_allclose(result, expected, atol=1e-9)


@pytest.mark.parametrize("norm", [1e12, 1e20, 1e30, 1e37])
@pytest.mark.parametrize(("n", "f", "d"), [(7, 3, 20), (10, 3, 300), (25, 10, 20)])
def test_geometric_median_of_vectors_at_infinity(
    norm: float, n: int, f: int, d: int
) -> None:
    """From far away vectors pull by their direction alone, however far it is."""
    rng = np.random.default_rng(0)
    honest = rng.normal(size=(n - f, d))
    far = rng.normal(size=(f, d))
    far /= np.linalg.norm(far, axis=1, keepdims=True)
    near_enough, found = (
        GeometricMedian()(np.vstack([honest, scale * far]), f) for scale in (1e10, norm)
    )
    np.testing.assert_allclose(found, near_enough, atol=1e-6)
    units = (honest - found) / np.linalg.norm(honest - found, axis=1, keepdims=True)
    assert np.linalg.norm(units.sum(axis=0) + far.sum(axis=0)) < 1e-5
