"""What every rule has in common."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_safedshb.aggregation import (
    ARC,
    CGE,
    NNM,
    SMEA,
    Average,
    Bucketing,
    CentredClipping,
    DnC,
    Filter,
    GramRule,
    Krum,
    Median,
    Rule,
    SignGuard,
    StaticClipping,
)
from tests.aggregation.registry import all_rules
from tests.oracles import Floats, covariance_lambda, family, subsets

# Whoever adds a rule has added it to these tests. Rules that look at the distance from
# zero, have a scale of their own or draw at random have other tests.
OTHERS = ARC | Bucketing | CGE | CentredClipping | SignGuard | StaticClipping
RULES = [rule for rule in all_rules() if not isinstance(rule, OTHERS)]
every_rule = pytest.mark.parametrize("rule", RULES, ids=str)


@every_rule
def test_equal_vectors_give_that_vector(rule: Rule) -> None:
    x = np.full((5, 3), 2.5)
    np.testing.assert_allclose(rule(x, 2), x[0], rtol=1e-12)


@every_rule
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_output_follows_permutation_translation_scale_and_rotation(
    rule: Rule, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(4, 11))  # of three, each other's nearest two tie for Krum
    f = int(rng.integers(0, (n - 1) // 2 + 1))
    x = rng.normal(size=(n, 4))
    output = rule(x, f)
    # Mixed vectors are often equal, and subsets of them tie: no order is better.
    if not (isinstance(rule, NNM) and isinstance(rule.rule, GramRule)):
        np.testing.assert_allclose(rule(x[rng.permutation(n)], f), output, atol=1e-6)
    shift = rng.normal(size=4)
    np.testing.assert_allclose(rule(x + shift, f), output + shift, atol=1e-6)
    if not (isinstance(rule, Filter) and rule.spectral_bound):
        np.testing.assert_allclose(rule(5.0 * x, f), 5.0 * output, atol=1e-5)
    if isinstance(rule, GramRule) and not isinstance(rule, NNM):
        turn, _ = np.linalg.qr(rng.normal(size=(4, 4)))
        np.testing.assert_allclose(rule(x @ turn, f), output @ turn, atol=1e-6)


@every_rule
def test_weights_are_a_convex_combination(rule: Rule) -> None:
    if not isinstance(rule, GramRule):
        return
    if isinstance(rule, NNM) and not isinstance(rule.rule, GramRule):
        with pytest.raises(TypeError, match="no weights"):
            rule.weigh(np.eye(5), 1)
        return
    x = family("alie", 9, 3, 6, np.random.default_rng(1))
    result = rule.weigh(x @ x.T, 3)
    assert (result.weights >= 0.0).all()
    assert result.weights.sum() == pytest.approx(1.0)
    np.testing.assert_allclose(result.weights @ x, rule(x, 3), atol=1e-9)
    mean = result.weights @ x
    centred = (x - mean) * np.sqrt(result.weights)[:, None]
    spread = np.linalg.eigvalsh(centred.T @ centred)[-1]
    assert result.lambda_max == pytest.approx(spread, rel=1e-6, abs=1e-9)


@every_rule
def test_layers_and_rows_give_the_same(rule: Rule) -> None:
    x = np.random.default_rng(2).normal(size=(7, 12)).astype(np.float32)
    layers = [[row[:4].reshape(2, 2), row[4:], row[12:]] for row in x]
    whole = rule(x, 2)
    parts = rule(layers, 2)
    assert [p.shape for p in parts] == [(2, 2), (8,), (0,)]
    assert all(p.dtype == np.float32 for p in parts)
    np.testing.assert_allclose(
        np.concatenate([p.ravel() for p in parts]), whole, rtol=1e-6, atol=1e-7
    )


@every_rule
def test_hostile_far_vectors_leave_the_output_near_the_honest(rule: Rule) -> None:
    x = family("very-far", 9, 2, 5, np.random.default_rng(0))
    output = rule(x, 2)
    assert np.isfinite(output).all()
    # DnC looks along one direction, and two who are far away span two.
    if rule not in (Average(), NNM(Average()), DnC()):
        assert np.linalg.norm(output) < 10.0


@every_rule
@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_a_common_offset_does_not_matter(rule: Rule, scale: float) -> None:
    """Raw inner products of such vectors share their first fourteen digits."""
    if isinstance(rule, Filter) and rule.spectral_bound:
        return
    x = np.round(scale * np.random.default_rng(5).normal(size=(8, 6)), 6)
    shifted = x + 2.0**20
    np.testing.assert_allclose(
        rule(shifted, 2), rule(shifted - 2.0**20, 2) + 2.0**20, rtol=0, atol=1e-8
    )


def worst_ratio(rule: Rule, x: Floats, f: int) -> float:
    output = rule(x, f)
    worst = 0.0
    for s in subsets(len(x), len(x) - f):
        error = float(np.sum((output - x[s].mean(axis=0)) ** 2))
        spread = (
            covariance_lambda(x[s])
            if rule.kappa_kind == "spectral"
            else float(np.var(x[s], axis=0).sum())
        )
        if spread > 0.0:
            worst = max(worst, error / spread)
        else:
            assert error <= 1e-18
    return worst


@every_rule
def test_proven_constants_hold_for_every_subset(rule: Rule) -> None:
    for n, f in [(5, 2), (7, 3), (8, 2)]:
        kappa = rule.kappa(n, f)
        if kappa is None or rule.kappa_kind == "spectral bound":
            continue
        for seed in range(30):
            rng = np.random.default_rng(seed)
            name = ["isotropic", "alie", "lattice", "clusters", "duplicates"][seed % 5]
            x = family(name, n, f, int(rng.integers(1, 6)), rng)
            assert worst_ratio(rule, x, f) <= kappa * (1 + 1e-9)


def test_only_proven_constants_are_given() -> None:
    given_by = {str(rule): rule.kappa(7, 3) for rule in RULES}
    assert given_by["SMEA(max_nodes=400000, time_limit=None)"] == pytest.approx(12.0)
    for name in ("Average()", "MultiKrum()", "MDA(max_nodes=100000)", "CAF()"):
        assert given_by[name] is None
    assert Filter().kappa(7, 3) is None
    assert Filter(spectral_bound=1.0).kappa(7, 3) == pytest.approx(9.0)


def test_our_constants_are_never_above_the_papers() -> None:
    stated = {type(rule).__name__ for rule in RULES if rule.paper_kappa(7, 3)}
    assert {"SMEA", "Filter"} <= stated
    for n, f in ((7, 3), (10, 2), (9, 0)):
        for rule in RULES:
            paper, ours = rule.paper_kappa(n, f), rule.kappa(n, f)
            assert paper is None or (ours is not None and ours <= paper)


BAD: list[tuple[object, int, str]] = [
    (np.zeros((5, 2)), -1, "f=-1"),
    (np.zeros((6, 2)), 3, "f=3 needs n > 2f, got n=6"),
    (np.zeros((0, 2)), 0, "n=0"),
    ([], 0, "n=0"),
    (np.zeros(4), 1, "shape"),
    (np.zeros((3, 0)), 1, "empty"),
    ([[], [], []], 1, "empty"),
    (np.array([[1.0], [np.nan], [1.0]]), 1, "NaN or infinity"),
    (np.array([[1.0], [1.0], [np.inf]]), 1, r"vectors\[2\]"),
    ([[np.ones(2)], [np.ones(3)], [np.ones(2)]], 1, "same layers"),
    ([[np.ones(2)], [np.ones(2), np.ones(1)], [np.ones(2)]], 1, "same layers"),
    (np.array([["a"], ["b"], ["c"]]), 1, "dtype"),
    (np.ones((3, 2), dtype=complex), 1, "dtype"),
]


@pytest.mark.parametrize(("vectors", "f", "message"), BAD)
@pytest.mark.parametrize("rule", [SMEA(), Filter(), Krum(), NNM(Median())], ids=str)
def test_bad_input_is_refused_by_name(
    rule: Rule, vectors: object, f: int, message: str
) -> None:
    with (
        pytest.raises(ValueError, match=message),
        np.errstate(over="ignore", invalid="ignore"),
    ):
        rule(vectors, f)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    "gram",
    [np.ones(3), np.ones((2, 3)), np.full((3, 3), np.nan), np.full((3, 3), 1e305)],
)
def test_bad_gram_is_refused(gram: Floats) -> None:
    with pytest.raises(ValueError, match=r"[gG]ram"):
        SMEA().weigh(gram, 1)


def test_largest_float32_values_do_not_overflow() -> None:
    x = np.full((5, 4), 3.4e38, np.float32)
    x[:2] *= -1
    for rule in RULES:
        assert np.isfinite(rule(x, 2)).all()
