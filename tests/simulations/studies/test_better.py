"""In search of a better rule: the min-max point, its attackers, and the tables."""

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.optimize import minimize

from flwr_safedshb.aggregation import SMEA
from flwr_safedshb.attacks import Strongest
from simulations.attacks import AimedAtMean, Screened, Tireless
from simulations.config import compose_config
from simulations.plans import compute_spent
from simulations.results.schema import RunRecord
from simulations.rules import MinMaxPoint
from simulations.studies.better import OF_RULES, compare, epsilon_of, reach, study
from simulations.studies.constants import Claim, _error, list_pairs, search
from simulations.study import Case, Runs
from tests.oracles import FAMILIES, Floats, covariance_lambda, family, subsets
from tests.records import made_up


def balls(x: Floats, f: int) -> tuple[Floats, Floats]:
    """Return the means of all sets of n - f vectors, and their top eigenvalues."""
    sets = list(subsets(len(x), len(x) - f))
    means = np.array([x[s].mean(axis=0) for s in sets])
    return means, np.array([covariance_lambda(x[s]) for s in sets])


def ratios(x: Floats, f: int, z: NDArray[np.floating]) -> Floats:
    means, tops = balls(x, f)
    found: Floats = np.sum((z - means) ** 2, axis=1) / tops
    return found


@pytest.mark.parametrize(("n", "f"), [(5, 2), (7, 1), (7, 3), (8, 2)])
def test_a_slow_optimiser_finds_no_better_point(n: int, f: int) -> None:
    for seed in range(5):
        rng = np.random.default_rng(seed)
        x = family(["isotropic", "alie", "clusters"][seed % 3], n, f, 3, rng)
        z = MinMaxPoint()(x, f)
        best, (means, tops) = ratios(x, f, z).max(), balls(x, f)
        slow = minimize(
            lambda p: p[-1],
            np.append(x.mean(axis=0), 2.0 * best),
            constraints={
                "type": "ineq",
                "fun": lambda p, means=means, tops=tops: (
                    p[-1] - np.sum((p[:-1] - means) ** 2, axis=1) / tops
                ),
            },
            method="SLSQP",
            options={"ftol": 1e-12, "maxiter": 300},
        )
        assert best <= slow.x[-1] * (1 + 1e-8)
        np.testing.assert_allclose(z, slow.x[:-1], atol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_its_own_ratio_is_told_and_within_the_constant(name: str) -> None:
    for n, f in ((5, 2), (7, 3), (8, 2)):
        x = family(name, n, f, 4, np.random.default_rng(n))
        answer = MinMaxPoint().weigh(x @ x.T, f)
        assert (answer.weights >= 0.0).all()
        assert answer.weights.sum() == pytest.approx(1.0)
        assert answer.kappa is not None
        assert answer.kappa <= MinMaxPoint().kappa(n, f) * (1 + 1e-9)
        if name in ("isotropic", "alie", "clusters", "sign-flip", "heterogeneous"):
            found = ratios(x, f, answer.weights @ x).max()
            assert answer.kappa == pytest.approx(found, rel=1e-6)


def test_many_at_once_are_the_same_as_one_by_one() -> None:
    x = np.random.default_rng(0).normal(size=(6, 7, 5))
    grams = x @ x.swapaxes(1, 2)
    one_by_one = [MinMaxPoint().weigh(gram, 3).weights for gram in grams]
    together = MinMaxPoint().weigh_many(grams, 3)
    np.testing.assert_allclose(together, one_by_one, rtol=1e-9, atol=1e-9)


def test_an_optimiser_does_not_break_its_constant() -> None:
    rule = MinMaxPoint()
    claim = Claim("min-max", rule.kappa, _error(rule, spectral=True))
    for n, f in list_pairs(7):
        best, _ = search(claim, n, f, starts=4, steps=40)
        assert 0.5 * rule.kappa(n, f) * (1 - 1e-3) <= best <= rule.kappa(n, f)


def test_equal_vectors_and_too_many_sets() -> None:
    x = np.ones((5, 3))
    x[:2] = 7.0
    np.testing.assert_allclose(MinMaxPoint()(x, 2), 1.0)
    with pytest.raises(ValueError, match="n=20, f=5 have 15504 sets"):
        MinMaxPoint()(np.zeros((20, 3)), 5)


def gone(attack: Strongest, honest: Floats, f: int, way: Floats) -> float:
    sent = attack.with_gradient(way)(honest, f, np.random.default_rng(0), SMEA())
    out = SMEA()(np.concatenate([honest, sent]), f)
    return float((honest.mean(axis=0) - out) @ way)


def test_the_tireless_find_more_than_the_strongest() -> None:
    rng = np.random.default_rng(3)
    honest, way = rng.normal(size=(5, 69)), rng.normal(size=69)
    tireless = Tireless()
    first = gone(tireless, honest, 2, way)
    assert first >= gone(Strongest(), honest, 2, way) * (1 - 1e-9)
    for _ in range(20):
        last = gone(tireless, honest, 2, way)
    assert last > 1.1 * first  # they remember where they were


def test_who_stands_far_away_moves_the_min_max_point_and_not_smea() -> None:
    far, strongest, tireless = reach(MinMaxPoint(), 7, 2, 0)
    assert far == pytest.approx(np.sqrt(2 / 3), rel=0.03)
    assert strongest <= tireless <= np.sqrt(MinMaxPoint().kappa(7, 2))
    assert abs(reach(SMEA(), 7, 2, 0)[0]) < 1e-9


def test_who_aims_at_the_mean_knows_all_gradients_so_far() -> None:
    attack = AimedAtMean()
    honest = np.random.default_rng(0).normal(size=(4, 3))
    for gradient in np.eye(3)[:2]:
        known = attack.with_gradient(gradient)
        known(honest, 1, np.random.default_rng(0), SMEA())
    assert known.gradient is not None
    assert known.gradient.tolist() == [0.5, 0.5, 0.0]


def test_what_screened_colluders_claim_is_within_the_bound() -> None:
    rng = np.random.default_rng(1)
    attack = Screened(momentum=0.9, bound=2.0)
    before: NDArray[np.floating] = np.zeros((2, 6))
    longest = 0.0
    for _ in range(5):
        honest = 3.0 + rng.normal(size=(5, 6))
        sent = attack.with_gradient(np.ones(6))(honest, 2, rng, SMEA())
        claimed = np.linalg.norm(sent - 0.9 * before, axis=1) / 0.1
        assert (claimed <= 2.0 * (1 + 1e-9)).all()
        longest, before = max(longest, claimed.max()), sent
    assert longest == pytest.approx(2.0)


def cases(seeds: Sequence[int] = (1,)) -> list[Case]:
    given = ["--federation", "7, 2", "--noise", "1", "--momentum", "0.95", "--seeds"]
    return list(
        study.choose_cases(study.parser().parse_args([*given, *map(str, seeds)]))
    )


def test_other_schedules_spend_the_same_epsilon() -> None:
    first, second = (
        compose_config(" ".join(case.overrides))
        for schedule in ("usual", "batch 400")
        for case in cases()
        if (case.labels["schedule"], case.labels["attack"]) == (schedule, "tireless")
        and case.labels["rule"] == "SMEA"
    )
    cost = compute_spent(first, 11_055 // 5)
    assert cost == pytest.approx(epsilon_of(7, 2, 1.0), rel=1e-6)
    assert 0.98 * cost < compute_spent(second, 11_055 // 5) <= cost * (1 + 1e-5)
    assert second.privacy.plan.batch_size == 400


def test_the_worst_attack_that_knows_a_method_counts() -> None:
    runs: Runs[RunRecord] = Runs()
    for case in cases():
        attack, rule = case.labels["attack"], case.labels["rule"]
        loss = {"no attack": 0.2, "tireless": 0.4, "aimed": 0.3}.get(attack, 0.35)
        run = made_up(0.9, (0.7, loss), case.seed)
        run["evaluations"]["test_loss"] = [0.7, loss - 0.1 * (rule == "min-max")]
        run["returned"]["test_loss"] = loss - 0.05
        runs[case] = run
    section = compare("Rules", runs, OF_RULES)
    assert section.table is not None
    (row,) = section.table.rows
    assert row[:3] == ["7, 2", "1", "0.95"]
    losses = [cell.split(" / ")[0] for cell in row[4:]]
    assert losses == ["0.200", "0.400", "0.300", "0.350", "0.350"]
    assert "| SMEA | 60% | 60% | 1 of 1 | 0 of 1 |" in section.notes
    assert "| min-max point | 80% | 60% | 1 of 1 | 1 of 1 |" in section.notes
    assert len(runs) == 16


def test_each_run_has_a_name_of_its_own() -> None:
    args = study.parser().parse_args(["--seeds", "1", "2"])
    everything = list(study.choose_cases(args))
    assert len({case.name for case in everything}) == len(everything) == 2 * 264
    assert all(" " not in case.name for case in everything)
