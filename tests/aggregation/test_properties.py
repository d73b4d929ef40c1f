"""Every rule answers on all finite input, as far as it is defined what the answer is.

Thousands of inputs here; `python -m tests.aggregation.properties` takes 100,000.
"""

from fractions import Fraction

import numpy as np
import pytest

from flwr_safedshb.aggregation import SMEA, GeometricMedian, GramRule, Rule
from flwr_safedshb.aggregation.gram import centred_gram_matrix
from flwr_safedshb.aggregation.rule import check_vectors
from flwr_safedshb.aggregation.smea import rule as smea
from tests.aggregation import inputs
from tests.aggregation.properties import Report, check, truths
from tests.aggregation.registry import all_rules
from tests.oracles import Floats


@pytest.mark.parametrize("rule", all_rules(), ids=str)
def test_a_rule_answers_on_every_family(rule: Rule) -> None:
    report = Report()
    for name in inputs.FAMILIES:
        for seed in range(2):
            check([rule], name, seed, 5, report, every=5)
    assert report.inputs >= 100
    assert report.faults == {}, report.first


@pytest.mark.parametrize("name", inputs.FAMILIES)
def test_smea_is_exact_on_every_family(name: str) -> None:
    report = Report()
    for seed in range(20):
        check([SMEA()], name, 100 + seed, 8, report, every=8)
    assert report.faults == {}, report.first


@pytest.mark.parametrize("name", inputs.FAMILIES)
def test_the_search_is_exact_on_every_family(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where enumeration is not allowed, and where there are too many subsets for it."""
    monkeypatch.setattr(smea, "ENUMERATED", 0)
    report = Report()
    for seed in range(6):
        check([SMEA()], name, 200 + seed, 5, report, every=5)
    check([SMEA()], name, 300, 1, report, sizes=inputs.SEARCHED)
    assert report.faults == {}, report.first


def definite(matrix: list[list[Fraction]]) -> bool:
    """Say if a rational matrix is positive definite, by elimination."""
    rows = [row[:] for row in matrix]
    for k, pivot in enumerate(rows):
        if pivot[k] <= 0:
            return False
        for row in rows[k + 1 :]:
            factor = row[k] / pivot[k]
            for j in range(k, len(row)):
                row[j] -= factor * pivot[j]
    return True


def below(x: Floats, value: float) -> bool:
    """Say if the top eigenvalue of the covariance of x is below a value, exactly."""
    exact = [[Fraction(v) for v in row] for row in x.tolist()]
    m, d = len(exact), len(exact[0])
    mean = [sum((row[j] for row in exact), Fraction()) / m for j in range(d)]
    centred = [[row[j] - mean[j] for j in range(d)] for row in exact]
    return definite(
        [
            [
                Fraction(value) * int(i == j)
                - sum((row[i] * row[j] for row in centred), Fraction()) / m
                for j in range(d)
            ]
            for i in range(d)
        ]
    )


@pytest.mark.parametrize("name", inputs.FAMILIES)
def test_the_oracle_is_right_to_the_ninth_digit(name: str) -> None:
    x, f, _ = inputs.draw(name, 7, 1, ((5, 2), (4, 1)))
    for one, truth in zip(x, truths(x, f), strict=True):
        for subset, value in zip(truth.subsets, truth.lambdas, strict=True):
            assert below(one[subset], value * (1 + 1e-9) + 1e-300)
            assert value == 0.0 or not below(one[subset], value * (1 - 1e-9))


def spoilt(seed: int) -> Floats:
    """An offset far above a gap that is far above the spread of the larger cluster."""
    rng = np.random.default_rng(seed)
    x = 1e-3 * rng.normal(size=(5, 4))
    x[0] += 30.0
    return (x + 1e5 * rng.normal(size=4)).astype(np.float32).astype(np.float64)


def test_what_round_off_spoils_is_looked_at_one_by_one_and_side_by_side() -> None:
    """Bounds on eigenvalues cross there: nothing was looked at, and the first taken."""
    stack = np.array([spoilt(seed) for seed in range(300)])
    many = SMEA().weigh_many(stack @ stack.swapaxes(1, 2), 1)
    for x, weights in zip(stack, many, strict=True):
        one = SMEA().weigh(x @ x.T, 1)
        _, whole = SMEA().aggregate(check_vectors(x, 1), 1)
        assert whole is not None
        assert one.weights[0] == weights[0] == whole.weights[0] == 0.0
        assert one.kappa == whole.kappa == SMEA().kappa(5, 1)


def test_one_centre_is_not_always_enough() -> None:
    """About a member of the smaller cluster, the larger one is a single point."""
    rng = np.random.default_rng(0)
    x = 1e-3 * rng.normal(size=(7, 3))
    x[:3] += 1e3
    clients = check_vectors(x + 2.0**36 * np.ones(3), 3)
    exact = x + 2.0**36 - (x[3] + 2.0**36)
    apart = np.square(exact[3:, None] - exact[None, 3:]).sum(axis=2)
    gram = centred_gram_matrix(clients, 3)[3:, 3:]
    squares = np.diag(gram)
    found = squares[:, None] + squares - 2.0 * gram
    np.testing.assert_allclose(found, apart, rtol=1e-9, atol=1e-9 * apart.max())


SCALE_FREE = [
    rule
    for rule in all_rules()
    if isinstance(rule, GramRule) and rule.change_unit(1) == rule
]


@pytest.mark.parametrize("rule", SCALE_FREE, ids=str)
@pytest.mark.parametrize("exponent", [-900, -600, 600, 1000])
def test_the_unit_does_not_matter_where_squares_are_no_numbers(
    rule: GramRule, exponent: int
) -> None:
    x = np.random.default_rng(3).normal(size=(7, 4))
    x[0] *= 2.0**20
    near, (far,) = rule(x, 2), rule([[np.ldexp(row, exponent)] for row in x], 2)
    np.testing.assert_allclose(np.ldexp(far, -exponent), near, rtol=1e-9, atol=1e-9)


def test_one_that_is_longer_than_squares_can_tell_is_no_help_to_adversaries() -> None:
    x = np.random.default_rng(4).normal(size=(7, 4))
    for size in (1e9, 1e200, 1e308):
        x[:3] = size
        for rule in (SMEA(), GeometricMedian()):
            assert np.linalg.norm(rule(x, 3)) < 10.0


def test_a_scale_of_a_rule_follows_the_unit() -> None:
    for rule in all_rules():
        if isinstance(rule, GramRule):
            assert rule.change_unit(3).change_unit(-3) == rule
            for exponent in (-5000, 5000):
                rule.change_unit(exponent)  # and stays one that can be made
