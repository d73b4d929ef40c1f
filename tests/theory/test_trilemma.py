"""The lower bound, its parts and their conditions, and the corollaries."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flwr_safedshb import theory
from flwr_safedshb.theory import MeanEstimation

PROBLEM = MeanEstimation(10, 2, 100, 50, 0.5, 1e-6, heterogeneity=0.1)


def test_lower_bound_by_hand() -> None:
    # n = 10, f = 2, m = 100, d = 50, epsilon = 1/2, G = 1/10, C = 2: (C/(eps m))^2 =
    # 1/625; times 50/10 = 0.008; times 2/10 = 0.00032; (2/10)/100 = 0.002.
    found = theory.lower_bound(replace(PROBLEM, clip_norm=2.0))
    assert found.privacy == pytest.approx(0.008)
    assert found.both == pytest.approx(0.00032)
    assert found.robustness == pytest.approx(0.002)
    assert found.dominant == "privacy"
    assert found.dominance == pytest.approx(4.0)
    assert found.total == pytest.approx(0.01032)


def test_lower_bound_at_its_limits() -> None:
    one = theory.lower_bound(PROBLEM)
    # Without adversaries only privacy costs; d-fold dimension costs d-fold there alone.
    alone = theory.lower_bound(replace(PROBLEM, f=0))
    assert alone.terms == {"privacy": one.privacy, "both": 0, "robustness": 0}
    assert alone.dominance == np.inf
    wide = theory.lower_bound(replace(PROBLEM, d=100))
    assert wide.privacy == pytest.approx(2 * one.privacy)
    assert wide.both == one.both
    # Half of epsilon costs what half of the examples cost, and heterogeneity neither.
    half = theory.lower_bound(replace(PROBLEM, m=50))
    assert half == theory.lower_bound(replace(PROBLEM, epsilon=0.25))
    assert half.privacy == pytest.approx(4 * one.privacy)
    assert half.robustness == one.robustness
    # No privacy asked for: what heterogeneity costs.
    free = theory.lower_bound(replace(PROBLEM, epsilon=1e12))
    assert free.dominant == "robustness"
    assert free.total == pytest.approx(0.002)


def test_the_parts_of_the_bound_by_hand() -> None:
    # (2/(0.5 * 100))^2 = 1/625; times 50/10; times log(10^6) * 3/8.
    problem = replace(PROBLEM, clip_norm=2.0)
    assert theory.privacy_lower_bound(problem) == pytest.approx(0.008)
    joint = theory.joint_lower_bound(problem)
    assert joint == pytest.approx(13.8155 * 3 / 8 / 625, rel=1e-5)
    # f = 0 leaves one client's share: log(1/delta)/(n eps^2 m^2).
    alone = theory.joint_lower_bound(replace(problem, f=0))
    assert alone == pytest.approx(joint * 8 / 30)
    # Whose d is 1, and whose logarithm the theorem hides.
    one = theory.privacy_lower_bound(replace(problem, d=1))
    assert alone == pytest.approx(one * 13.8155, rel=1e-5)


PROVEN = MeanEstimation(10, 2, 1000, 50, 0.02, 1e-6, heterogeneity=1.0)


def told(**changed: Any) -> str:
    return "; ".join(theory.lower_bound_violations(replace(PROVEN, **changed)))


def test_each_condition_of_the_theorem_that_fails_is_named() -> None:
    # 1/(4 sqrt(20 ln 1001)) = 0.02127.
    assert "epsilon" not in told()
    assert (
        "needs epsilon <= 1/(4 sqrt(2 n ln(m+1))) = 0.0213, and epsilon is 0.022"
        in (told(epsilon=0.022))
    )
    # n delta against 1/(8 m) = 1.25e-4 and 2^-m.
    assert "delta" not in told(delta=1.2e-5)
    assert "needs delta < 1/(8 n m) = 1.25e-05, and delta is 1.3e-05" in told(
        delta=1.3e-5
    )
    assert "needs n delta > 2^-m = 0.000977, and n delta is 1e-08" in told(
        m=10, delta=1e-9
    )
    assert "differ by G >= C = 1, and G is 0.99" in told(heterogeneity=0.99)
    assert "differ" not in told(heterogeneity=2.0, clip_norm=2.0, f=0)
    assert "needs at least 3 clients, and n is 2" in told(n=2, f=0)
    assert told(f=0) == ""


def test_one_example_is_never_enough() -> None:
    # m = 1: 1/2 <= n delta <= 1/8.
    for delta in (1e-6, 0.01, 0.0125, 0.05, 0.06):
        assert "delta" in told(m=1, delta=delta)


def test_with_adversaries_the_theorem_as_printed_is_vacuous() -> None:
    assert "only single terms can be proven" in told()
    for n in range(3, 60):
        for f in range(1, (n + 1) // 2):
            cost = theory.robustness_lower_bound(n, f, 1.0)
            assert cost > theory.error_cap(n, f)
    # (f+1)/(100 (n-f)) = 3/800, and C^2 times that.
    assert theory.error_cap(10, 2) == pytest.approx(0.00375)
    assert theory.error_cap(10, 2, 2.0) == pytest.approx(0.015)


def test_each_term_is_proven_under_its_own_conditions() -> None:
    def proven(**changed: Any) -> set[str]:
        found = theory.term_violations(replace(PROVEN, **changed))
        return {term for term, violated in found.items() if not violated}

    assert proven() == {"privacy", "both", "robustness"}
    # Identical data: privacy alone. No adversaries: the same.
    assert proven(heterogeneity=0.0) == {"privacy"}
    assert proven(f=0) == {"privacy"}
    # Robustness asks nothing of privacy, both nothing of epsilon.
    assert proven(epsilon=9.0) == {"both", "robustness"}
    assert proven(epsilon=9.0, delta=0.1) == {"robustness"}
    # Clients that differ by less than C: kappa_lb = 3, so up to sqrt(3) C.
    assert proven(heterogeneity=0.5) == {"privacy", "robustness"}
    assert proven(heterogeneity=1.8) == {"privacy", "both"}


def test_the_papers_own_setting_is_none_of_the_bounds() -> None:
    paper = MeanEstimation(7, 3, 2763, 69, 1.0143, 1e-4)
    found = theory.lower_bound_violations(paper)
    words = [
        "it needs epsilon <= 1/(4 sqrt(2 n ln(m+1))) = 0.0237",
        "it needs delta < 1/(8 n m) = 6.46e-06",
        "it needs honest gradients that differ by G >= C = 1",
        "it needs an error rho of at most 0.01",
    ]
    assert len(found) == len(words)
    for violation, start in zip(found, words, strict=True):
        assert violation.startswith(start)
    assert all(theory.term_violations(paper).values())


@pytest.mark.parametrize(("n", "f"), [(3, 1), (7, 3), (10, 2), (41, 20)])
def test_nobody_can_tell_the_two_worlds_apart(n: int, f: int) -> None:
    # The example of the robustness-only bound, with C = 1: clients 0..f-1 hold x = 1.
    held = np.repeat([1.0, -1.0], [f, n - f])
    worlds = [held[f:], held[: n - f]]  # whom the honest clients are
    means = [world.mean() for world in worlds]
    spreads = [np.var(2 * (0.3 - world)) for world in worlds]  # of gradients at 0.3
    assert max(spreads) == pytest.approx(theory.kappa_lb(n, f))
    assert min(spreads) == pytest.approx(0.0)
    # The best answer lies half way, and has this excess loss in both.
    answer = sum(means) / 2
    for mean, world in zip(means, worlds, strict=True):
        excess = np.mean((answer - world) ** 2) - np.mean((mean - world) ** 2)
        bound = theory.robustness_lower_bound(n, f, np.sqrt(max(spreads)))
        assert excess == pytest.approx(bound)


def test_kappa_lb_by_hand() -> None:
    assert theory.kappa_lb(10, 2) == pytest.approx(3.0)
    assert theory.kappa_lb(7, 3) == pytest.approx(3.0)
    assert theory.kappa_lb(9, 0) == 0.0
    # 2/(16 * 6) * 3 = (f/(n-f))^2 = 1/16.
    assert theory.robustness_lower_bound(10, 2, 3**0.5) == pytest.approx(1 / 16)


def test_noise_in_closed_form_by_hand() -> None:
    # C = 1, b = 25, m = 2763, T = 400, delta = 1e-4, epsilon = 1:
    # 25 * 20 sqrt(9.21034)/2763 = 0.549 < 1, so 2/25; at epsilon = 1/4 it is 2.1968.
    def noise(epsilon: float, m: int = 2763, constant: float = 1.0) -> float:
        return theory.closed_form_noise_std(1.0, 25, m, 400, epsilon, 1e-4, constant)

    assert noise(1.0) == pytest.approx(0.08)
    assert noise(0.25) == pytest.approx(0.08 * 2.1968, rel=1e-4)
    assert noise(0.25, constant=3.0) == pytest.approx(3 * noise(0.25))
    # 1/epsilon and 1/m where the budget binds; more examples buy nothing where not.
    assert noise(0.125) == pytest.approx(2 * noise(0.25))
    assert noise(0.125, m=5526) == pytest.approx(noise(0.25))
    assert noise(1.0, m=10**6) == noise(1.0)
    with pytest.raises(ValueError, match=r"epsilon=10 must be at most log.*9\.21"):
        noise(10)


def test_corollaries_by_hand() -> None:
    # n = 8, f = 2, m = 100, d = 32, epsilon = 1/2, log(1/delta) = 4, G = 3: C/(eps m)
    # = 1/50; squares 4 * 32/8/2500, 4 * 1/4/2500, 9/4; roots sqrt(16)/50, 1/50, 9/4.
    problem = MeanEstimation(8, 2, 100, 32, 0.5, np.exp(-4.0), 3.0)
    convex = theory.strongly_convex_corollary(problem)
    assert convex.privacy == pytest.approx(16 / 2500)
    assert convex.both == pytest.approx(1 / 2500)
    assert convex.robustness == pytest.approx(9 / 4)
    other = theory.non_convex_corollary(problem)
    assert other.privacy == pytest.approx(4 / 50)
    assert other.both == pytest.approx(1 / 50)
    assert other.robustness == pytest.approx(9 / 4)


def test_the_corollary_is_the_lower_bound_but_for_a_logarithm() -> None:
    problem = replace(PROBLEM, clip_norm=2.0)
    lower = theory.lower_bound(problem)
    upper = theory.strongly_convex_corollary(problem)
    log = np.log(1e6)
    assert upper.privacy == pytest.approx(log * lower.privacy)
    assert upper.both == pytest.approx(log * lower.both)
    assert upper.robustness == lower.robustness


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"f": 5}, "f=5 needs n > 2f"),
        ({"m": 0}, "m=0 must be"),
        ({"d": 0}, "d=0 must be"),
        ({"epsilon": 0.0}, "epsilon=0.0 must be"),
        ({"delta": 1.0}, "delta=1.0 must lie"),
        ({"heterogeneity": -1.0}, "heterogeneity=-1.0 must be"),
        ({"clip_norm": np.inf}, "clip_norm=inf must be"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(
    changed: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        replace(PROBLEM, **changed)
