from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_safedshb.aggregation import SMEA
from flwr_safedshb.aggregation.scatter import sort_by_isolation
from flwr_safedshb.aggregation.smea import rule
from flwr_safedshb.aggregation.smea.budget import NODE, WorkBudget
from flwr_safedshb.aggregation.smea.search import find_best_subset
from flwr_safedshb.theory import kappa_smea
from tests.oracles import (
    FAMILIES,
    Floats,
    brute_force_smea,
    covariance_lambda,
    family,
    subsets,
)


@pytest.fixture
def always_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave nothing to enumeration, which is close to the oracle itself."""
    monkeypatch.setattr(rule, "ENUMERATED", 0)


def sizes(rng: np.random.Generator) -> tuple[int, int, int]:
    n = int(rng.integers(3, 12))
    f = int(rng.choice([0, 1, (n - 1) // 2, int(rng.integers(0, (n - 1) // 2 + 1))]))
    return n, f, int(rng.integers(1, 16))


def assert_smea(x: Floats, f: int) -> None:
    smallest, tied = brute_force_smea(x, f)
    result = SMEA().weigh(x @ x.T, f)
    assert result.subset is not None
    scale = 1e-12 * np.median(np.sum(x**2, axis=1))
    assert result.lambda_max == pytest.approx(smallest, rel=1e-8, abs=scale)
    assert result.subset.tolist() in tied
    assert result.lower_bound == result.lambda_max
    assert result.kappa == pytest.approx(kappa_smea(len(x), f))
    np.testing.assert_allclose(
        SMEA()(x, f), x[result.subset].mean(axis=0), rtol=1e-9, atol=1e-9
    )


@pytest.mark.usefixtures("always_search")
@pytest.mark.parametrize("name", FAMILIES)
def test_search_finds_the_subset_of_brute_force(name: str) -> None:
    for seed in range(60):
        rng = np.random.default_rng([seed, FAMILIES.index(name)])
        n, f, d = sizes(rng)
        # An offset needs the vectors: their raw Gram matrix has lost the digits.
        if name == "offset":
            x = family(name, n, f, d, rng)
            _, tied = brute_force_smea(x, f)
            means = [x[s].mean(axis=0) for s in tied]
            gaps = [np.abs(SMEA()(x, f) - mean).max() for mean in means]
            assert min(gaps) < 1e-9 * 1e4
        else:
            assert_smea(family(name, n, f, d, rng), f)


def test_enumeration_finds_the_subset_of_brute_force() -> None:
    for seed in range(100):
        rng = np.random.default_rng([seed, 77])
        name = FAMILIES[seed % len(FAMILIES)]
        n, f = [(5, 2), (7, 3), (7, 1), (9, 2)][seed % 4]
        if name != "offset":
            assert_smea(family(name, n, f, int(rng.integers(1, 9)), rng), f)


@pytest.mark.parametrize(("n", "f"), [(7, 3), (7, 0), (5, 2), (12, 5)])
def test_many_at_once_are_weighed_as_one_by_one(n: int, f: int) -> None:
    rng = np.random.default_rng(0)
    stack = [family(name, n, f, 6, rng) for name in FAMILIES if name != "offset"]
    grams = np.array([x @ x.T for x in stack])
    one_by_one = np.array([SMEA().weigh(gram, f).weights for gram in grams])
    np.testing.assert_allclose(
        SMEA().weigh_many(grams, f), one_by_one, rtol=0, atol=1e-12
    )
    assert SMEA().weigh_many(grams[:0], f).shape[0] == 0


@pytest.mark.parametrize("n", [14, 15])
def test_larger_searches_agree_with_brute_force(n: int) -> None:
    for seed in range(2):
        for name in ("isotropic", "alie", "heterogeneous", "lattice"):
            rng = np.random.default_rng([seed, n])
            assert_smea(family(name, n, 5, int(rng.integers(2, 20)), rng), 5)


@pytest.mark.parametrize("name", FAMILIES)
def test_same_input_gives_the_same_bytes(name: str) -> None:
    x = family(name, 20, 6, 12, np.random.default_rng(3)).astype(np.float32)
    first = SMEA()(x, 6)
    assert first.tobytes() == SMEA()(x.copy(), 6).tobytes()
    assert first.dtype == np.float32


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), n=st.integers(3, 16))
def test_follows_permutation_translation_rotation_scale(seed: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    f = int(rng.integers(0, (n - 1) // 2 + 1))
    x = rng.normal(size=(n, 7))
    subset = SMEA().weigh(x @ x.T, f).subset
    assert subset is not None
    order = rng.permutation(n)
    turn, _ = np.linalg.qr(rng.normal(size=(7, 7)))
    moved = (3.7 * x @ turn + rng.normal(size=7))[order]
    again = SMEA().weigh(moved @ moved.T, f).subset
    assert again is not None
    assert sorted(order[again]) == subset.tolist()
    np.testing.assert_allclose(SMEA()(x[order], f), SMEA()(x, f), rtol=1e-12)


def test_no_adversary_gives_the_mean() -> None:
    x = np.random.default_rng(0).normal(size=(6, 4))
    np.testing.assert_allclose(SMEA()(x, 0), x.mean(axis=0), rtol=1e-12)


def breaking_inputs(n: int, f: int) -> list[Floats]:
    """Inputs on which the mean of a bad subset would be far from some mean_S."""
    rng = np.random.default_rng(n * 10 + f)
    line = np.zeros((n, 1))
    line[n - f :] = 1.0
    gaps = np.arange(n, dtype=float)[:, None] ** 2
    heavy = rng.standard_t(1.5, size=(n, 3))
    circle = np.stack([np.cos(np.arange(n)), np.sin(np.arange(n))], axis=1)
    # Half of the honest spread is moved onto the adversaries' side.
    aligned = rng.normal(size=(n, 5)) * np.array([5.0, 1, 1, 1, 1])
    aligned[:f] = aligned[f:].mean(axis=0) + 1.2 * aligned[f:].std(axis=0)
    return [line, gaps, heavy, circle, aligned, rng.normal(size=(n, 2 * n))]


@pytest.mark.parametrize(("n", "f"), [(5, 1), (5, 2), (7, 2), (7, 3), (8, 3), (9, 4)])
@pytest.mark.parametrize("max_nodes", [0, 3, 400_000])
@pytest.mark.usefixtures("always_search")
def test_certified_kappa_holds_for_every_subset(n: int, f: int, max_nodes: int) -> None:
    rule = SMEA(max_nodes=max_nodes)
    for x in breaking_inputs(n, f):
        result = rule.weigh(x @ x.T, f)
        assert result.kappa is not None
        output = result.weights @ x
        for s in subsets(n, n - f):
            error = float(np.sum((output - x[s].mean(axis=0)) ** 2))
            bound = result.kappa * covariance_lambda(x[s])
            assert error <= bound * (1 + 1e-9) + 1e-12


def test_kappa_is_nearly_attained() -> None:
    """A constant that no input comes near would hide a rule that is too weak."""
    # n - 2f points at 0 and f at -1 and +1 each: two subsets tie.
    n, f = 7, 3
    x = np.array([[0.0], [-1.0], [-1.0], [-1.0], [1.0], [1.0], [1.0]])
    output = SMEA()(x, f)
    ratios = [
        float(np.sum((output - x[s].mean(axis=0)) ** 2)) / covariance_lambda(x[s])
        for s in subsets(n, n - f)
    ]
    assert max(ratios) == pytest.approx(kappa_smea(n, f))


@pytest.mark.parametrize("time_limit", [None, 0.0, 0.05])
def test_stopped_search_certifies_a_true_lower_bound(
    time_limit: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Much to prove with after a search that was hardly allowed to begin.
    monkeypatch.setattr("flwr_safedshb.aggregation.smea.search.SEARCH", 0.05)
    stopped = raised = 0
    for seed in range(2 * len(FAMILIES)):
        rng = np.random.default_rng(seed)
        n, f = 12, 4
        x = family(FAMILIES[seed % len(FAMILIES)], n, f, int(rng.integers(1, 9)), rng)
        if seed % 3 == 0:
            x = circle(n) + 0.05 * rng.normal(size=(n, 2))
        smallest, _ = brute_force_smea(x, f)
        optimum = (n - f) * smallest
        room = optimum * 1e-9 + 1e-12 * float(np.median(np.sum(x**2, axis=1)))
        ordered, _ = sort_by_isolation(x @ x.T, n - f)
        bounds = []
        for max_nodes in (0, 60, 120, 240, 480):
            budget = WorkBudget(max_nodes * NODE, time_limit)
            _, value, bound = find_best_subset(ordered, n - f, budget)
            assert bound <= optimum + room
            assert value >= optimum - room
            bounds.append(bound)
            stopped += bound < value
        raised += bounds[0] < bounds[-1] - room
    # Or else the test has not looked at what it is about.
    assert stopped >= 10
    assert time_limit == 0.0 or raised >= 3


def circle(n: int) -> Floats:
    angles = 2 * np.pi * np.arange(n) / n
    return np.stack([np.cos(angles), np.sin(angles)], axis=1)


@pytest.mark.parametrize(
    ("x", "f"),
    [
        (circle(40), 15),
        (circle(60), 12),
        (np.repeat(np.eye(20), 2, axis=0), 15),
        (np.repeat(np.eye(10), 4, axis=0), 15),
        (np.repeat(np.eye(20), 3, axis=0), 12),
    ],
    ids=["circle-40", "circle-60", "simplex-2", "simplex-4", "simplex-3"],
)
def test_inputs_made_to_defeat_the_search_end_with_a_certificate(
    x: Floats, f: int
) -> None:
    n = len(x)
    # A tenth of the default budget: the same path, sooner.
    result = SMEA(max_nodes=40_000).weigh(x @ x.T, f)
    assert result.subset is not None
    assert result.lower_bound is not None
    assert result.kappa is not None
    assert len(result.subset) == n - f
    assert result.lambda_max == pytest.approx(covariance_lambda(x[result.subset]))
    assert 0.0 < result.lower_bound <= result.lambda_max
    gap = result.lambda_max / result.lower_bound - 1.0
    assert result.kappa == pytest.approx(kappa_smea(n, f, gap))
    # An answer that anyone can check: an arc, or whole groups.
    best = covariance_lambda(x[: n - f])
    assert result.lower_bound <= best * (1 + 1e-9)


def test_colluders_that_send_the_same_do_not_multiply_the_work() -> None:
    """Which of ten equal vectors to leave out is one question, not 2^10."""
    rng = np.random.default_rng([1, 0])
    x = rng.normal(size=(50, 69))
    x[:10] = x[10:].mean(axis=0) + 0.5 * x[10:].std(axis=0)
    result = SMEA(max_nodes=40_000).weigh(x @ x.T, 10)
    assert result.lower_bound == result.lambda_max
    corners = np.repeat(np.eye(10), 4, axis=0)
    result = SMEA(max_nodes=20_000).weigh(corners @ corners.T, 15)
    assert result.lower_bound == result.lambda_max


def test_node_budget_makes_the_answer_independent_of_the_machine() -> None:
    x = circle(40)
    first = SMEA(max_nodes=500).weigh(x @ x.T, 15)
    again = SMEA(max_nodes=500).weigh(x @ x.T, 15)
    assert first.lower_bound == again.lower_bound
    assert first.subset is not None
    assert again.subset is not None
    assert first.subset.tolist() == again.subset.tolist()


@pytest.mark.parametrize("argument", [{"max_nodes": -1}, {"time_limit": -1.0}])
def test_refuses_a_negative_budget(argument: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(argument))):
        SMEA(**argument)  # type: ignore[arg-type]


def test_small_federations_need_no_compiler() -> None:
    """The search is imported where it is used: seven clients never wait for numba."""
    source = Path(rule.__file__).read_text()
    assert "\nfrom flwr_safedshb.aggregation.smea.search" not in source


@pytest.mark.parametrize("scale", [1.0, 1e-80, 1e-150, 1e140])
def test_bounds_hold_the_top_eigenvalue(scale: float) -> None:
    """A subset is passed over only if it cannot be the best, at any scale."""
    rng = np.random.default_rng(0)
    for m in (1, 2, 3, 4, 7):
        points = rng.normal(size=(200, m, 5)) * 10.0 ** rng.uniform(-9, 0, (200, 1, 5))
        points[:20, 1:] = points[:20, :1]  # equal vectors
        centred = (points - points.mean(axis=1, keepdims=True)) * scale
        scatters = centred @ centred.swapaxes(1, 2)
        lowest, highest = rule._eigenvalue_bounds(scatters)
        values = np.maximum(np.linalg.eigvalsh(scatters)[:, -1], 0.0)
        assert (lowest <= values * (1 + 1e-9) + 1e-25 * scale**2).all()
        assert (highest >= values * (1 - 1e-9)).all()
        assert np.isfinite(highest).all()
