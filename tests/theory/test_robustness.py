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
    assert theory.kappa_filter(7, 3) == pytest.approx(85.5)
    assert theory.filter_eta(7, 3) == pytest.approx(56.0)
    assert theory.kappa_filter(10, 0) == 0.0
    assert theory.filter_eta(10, 0) == pytest.approx(2.0)


def test_variance_constants_by_hand() -> None:
    # n = 8, f = 2: f/(n-2f) = 1/2.
    assert theory.kappa_trimmed_mean(8, 2) == pytest.approx(4.5)
    assert theory.kappa_krum(8, 2) == pytest.approx(9.0)
    assert theory.kappa_geometric_median(8, 2) == pytest.approx(9.0)
    assert theory.kappa_median(8, 2) == pytest.approx(9.0)
    assert theory.kappa_nnm(8, 2, 9.0) == pytest.approx(80 / 3)


@pytest.mark.parametrize(("n", "f"), [(4, 2), (0, 0), (3, -1), (2, 5)])
def test_impossible_numbers_are_refused(n: int, f: int) -> None:
    for function in (
        theory.kappa_smea,
        theory.kappa_smea_paper,
        theory.kappa_filter,
        theory.filter_eta,
        theory.kappa_lower_bound,
        theory.kappa_krum,
        theory.kappa_median,
        theory.kappa_trimmed_mean,
    ):
        with pytest.raises(ValueError, match=f"[nf]={n if n < 1 else f}"):
            function(n, f)
