"""Constants of robust averaging, by hand and against optimisers."""

import numpy as np
import pytest

from flwr_safedshb import theory


@pytest.mark.parametrize(
    ("n", "f", "sharp", "paper"),
    [(7, 3, 12.0, 48.0), (10, 2, 4 / 3, 16 / 9), (20, 6, 3.0, 5.25), (9, 0, 0.0, 0.0)],
)
def test_smea_constants_by_hand(n: int, f: int, sharp: float, paper: float) -> None:
    assert theory.kappa_smea(n, f) == pytest.approx(sharp)
    assert theory.kappa_smea_paper(n, f) == pytest.approx(paper)
    if f:
        ratio = theory.kappa_smea(n, f) / theory.kappa_smea_paper(n, f)
        assert ratio == pytest.approx((n - 2 * f) / (n - f))
        assert theory.kappa_smea(n, f) == 4 * theory.kappa_lower_bound(n, f)


def test_gap_of_a_stopped_search() -> None:
    # 3/1 * (1 + sqrt(4))^2 for a subset three times worse than the bound.
    assert theory.kappa_smea(7, 3, gap=3.0) == pytest.approx(27.0)
    assert theory.kappa_smea(7, 3, gap=np.inf) == np.inf
    with pytest.raises(ValueError, match="gap"):
        theory.kappa_smea(7, 3, gap=-0.1)


def test_filter_constants_by_hand() -> None:
    # n = 7, f = 3: 84/1 + 6/4, and not 72, the paper's other form.
    assert theory.kappa_filter_paper(7, 3) == pytest.approx(85.5)
    assert theory.filter_eta_paper(7, 3) == pytest.approx(56.0)
    # 3 * 56/4 + 3 with the paper's eta, 3 * 8/4 + 3 with ours.
    assert theory.kappa_filter(7, 3, eta=56.0) == pytest.approx(45.0)
    assert theory.filter_eta(7, 3) == pytest.approx(8.0)
    assert theory.kappa_filter(7, 3) == pytest.approx(9.0)
    for eta in (theory.filter_eta, theory.filter_eta_paper):
        assert eta(10, 0) == pytest.approx(2.0)
    for kappa in (theory.kappa_filter, theory.kappa_filter_paper):
        assert kappa(10, 0) == 0.0
    with pytest.raises(ValueError, match=r"eta=7.9 must be finite and at least .*=8"):
        theory.kappa_filter(7, 3, eta=7.9)


def test_filter_without_a_bound_by_hand() -> None:
    # n = 10, f = 2: e = 16/6; 2/4 (sqrt 2 + sqrt(8/3))^2.
    expected = 0.5 * (2**0.5 + (8 / 3) ** 0.5) ** 2
    assert theory.kappa_filter_agnostic(10, 2) == pytest.approx(expected)
    assert theory.kappa_filter_agnostic(10, 0) == 0.0
    assert theory.kappa_filter_agnostic(9, 3) is None
    assert theory.kappa_filter_agnostic(7, 3) is None


def test_certificates_of_an_answer_by_hand() -> None:
    # n = 5, f = 1, e = 8/3. Equal weights: S keeps all, one vector is not its own.
    assert theory.filter_certificate([1.0] * 5, 1) == pytest.approx(8 / 3 / 4)
    # Their scale is nobody's business.
    assert theory.filter_certificate([0.2] * 5, 1) == pytest.approx(8 / 3 / 4)
    # Without one vector: h = 3, x = 1, a = 1.
    found = theory.filter_certificate([0, 1, 1, 1, 1], 1)
    assert found == pytest.approx((1 + (8 / 3) ** 0.5) ** 2 / 3)
    # Three times the smallest eigenvalue that was seen.
    found = theory.filter_certificate([1.0] * 5, 1, gap=2.0)
    assert found == pytest.approx(8 / 4)
    # f vectors hold all, or nothing is known of the eigenvalue.
    assert theory.filter_certificate([1.0, 0, 0, 0, 0], 1) == np.inf
    assert theory.filter_certificate([1.0] * 5, 1, gap=np.inf) == np.inf
    assert theory.filter_certificate([1.0] * 5, 0, gap=np.inf) == 0.0


def test_certificates_are_never_above_the_constant() -> None:
    for seed in range(200):
        rng = np.random.default_rng(seed)
        n = int(rng.integers(4, 12))
        f = int(rng.integers(1, (n - 1) // 3 + 1))
        # Masses above n - 2f.
        c = 1 - rng.uniform(size=n) * (rng.uniform(size=n) < 0.5)
        c[:2] = 1.0
        if c.sum() <= n - 2 * f:
            continue
        proven = theory.kappa_filter_agnostic(n, f)
        assert proven is not None
        assert theory.filter_certificate(c.tolist(), f) <= proven * (1 + 1e-12)


@pytest.mark.parametrize(
    ("weights", "gap", "words"),
    [
        ([0.0] * 5, 0.0, "all 0"),
        ([1.0, -1.0, 1.0], 0.0, "least_weight=-1.0"),
        ([np.inf, 1.0, 1.0], 0.0, "largest_weight=inf"),
        ([1.0] * 5, -1.0, "gap=-1.0"),
        ([1.0] * 2, 0.0, "f=1 needs n > 2f"),
    ],
)
def test_weights_of_no_answer_are_refused(
    weights: list[float], gap: float, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        theory.filter_certificate(weights, 1, gap)


def test_variance_constants_by_hand() -> None:
    # n = 8, f = 2: f/(n-2f) = 1/2.
    assert theory.kappa_trimmed_mean(8, 2) == pytest.approx(4.5)
    assert theory.kappa_krum(8, 2) == pytest.approx(9.0)
    assert theory.kappa_geometric_median(8, 2) == pytest.approx(9.0)
    assert theory.kappa_median(8, 2) == pytest.approx(9.0)
    assert theory.kappa_nnm(8, 2, 9.0) == pytest.approx(80 / 3)
    # n - f - 1 = 5 times as much in the spectral sense, or d times.
    assert theory.kappa_spectral(9.0, 8, 2) == 45.0
    assert theory.kappa_spectral(9.0, 8, 2, d=3) == 27.0


@pytest.mark.parametrize(("n", "f"), [(3, 1), (7, 3), (10, 2), (9, 0)])
def test_no_rule_is_below_the_limit(n: int, f: int) -> None:
    # The two lines of the proof: zeros force 0, and f ones among them are this far.
    points = np.repeat([1.0, 0.0], [f, n - f])
    assert np.var(points[f:]) == 0.0
    seen = points[: n - f]
    ratio = np.mean(seen) ** 2 / np.var(seen) if f else 0.0
    assert ratio == pytest.approx(theory.kappa_lower_bound(n, f))


@pytest.mark.parametrize(("n", "f"), [(4, 2), (0, 0), (3, -1), (2, 5)])
def test_impossible_numbers_are_refused(n: int, f: int) -> None:
    for function in (
        theory.kappa_smea,
        theory.kappa_smea_paper,
        theory.kappa_filter,
        theory.kappa_filter_paper,
        theory.kappa_filter_agnostic,
        theory.filter_eta,
        theory.filter_eta_paper,
        theory.kappa_lower_bound,
        theory.kappa_krum,
        theory.kappa_median,
        theory.kappa_trimmed_mean,
    ):
        with pytest.raises(ValueError, match=f"[nf]={n if n < 1 else f}"):
            function(n, f)
