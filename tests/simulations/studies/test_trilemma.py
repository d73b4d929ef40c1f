"""The empirical trilemma and the convergence check: what they draw, fit and leave."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from flwr_safedshb.privacy.plan import PrivacyPlan
from flwr_safedshb.privacy.private_gradient import private_gradient
from flwr_safedshb.privacy.randomness.noise import SeededRandomness
from simulations.studies.convergence import ConvergenceCheck
from simulations.studies.convergence.problem import Problem
from simulations.studies.convergence.study import CASES
from simulations.studies.trilemma import EmpiricalTrilemma, Sweep
from simulations.studies.trilemma.analysis import Cell, findings, separation
from simulations.studies.trilemma.points import (
    ATTACKS,
    MEAN_NORM,
    RULES,
    Point,
    errors,
    honest_vectors,
)

ROOT = Path(__file__).parents[3]
POINT = Point(n=10, f=2, d=64, m=1000, epsilon=1.0, heterogeneity=0.0, noise_std=0.01)


def test_honest_clients_differ_by_g_exactly() -> None:
    quiet = replace(POINT, heterogeneity=0.1, noise_std=0.0)
    sent, mean = honest_vectors(quiet, np.random.default_rng(0))
    assert sent.shape == (8, 64)
    assert np.linalg.norm(mean) == pytest.approx(MEAN_NORM)
    np.testing.assert_allclose(sent.mean(axis=0), mean)
    assert np.square(sent - mean).sum(axis=1).mean() == pytest.approx(0.01)
    # All in one direction.
    assert np.linalg.matrix_rank(sent - mean, tol=1e-9) == 1


def test_a_release_is_the_clients_own() -> None:
    # Half the squared distance, as a model of one layer: what `honest_vectors` draws
    # for m points of the unit ball is what a client sends in its first step.
    d, m = 4000, 30
    points = torch.randn(m, d, generator=torch.Generator().manual_seed(0))
    points /= points.norm(dim=1, keepdim=True)
    model = torch.nn.Linear(1, d, bias=False)
    torch.nn.init.zeros_(model.weight)

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs - targets).square().sum(dim=1) / 2

    plan = PrivacyPlan(1.0, 4.0, batch_size=m, num_examples=m)
    data = (torch.ones(m, 1), points)
    (sent,) = private_gradient(
        (model, loss), data, plan, SeededRandomness(1).for_step(0, 0)
    )
    noise = -sent[:, 0] - points.mean(dim=0).numpy()
    point = replace(POINT, n=1, f=0, d=d, m=m, noise_std=plan.noise_std)
    drawn, mean = honest_vectors(point, np.random.default_rng(2))
    assert plan.noise_std == 2 * 4 / 30
    for sample in (noise, drawn[0] - mean):
        assert stats.kstest(sample / plan.noise_std, "norm").pvalue > 0.01
        # The test would see a deviation of a tenth.
        assert stats.kstest(sample / (0.9 * plan.noise_std), "norm").pvalue < 0.01


def test_without_adversaries_rules_that_average_are_the_average() -> None:
    plain = replace(POINT, f=0)
    found = {rule: errors(plain, rule, [1, 2])["none"] for rule in RULES}
    for rule in ("SMEA", "Filter", "trimmed mean"):
        assert found[rule] == pytest.approx(found["average"])
    assert found["median"] != pytest.approx(found["average"])
    # The draws of a seed depend on nothing else.
    assert errors(plain, "average", [2])["none"] == found["average"][1:]


@pytest.mark.federation
def test_errors_under_every_attack() -> None:
    found = errors(POINT, "SMEA", range(8))
    assert set(found) == set(ATTACKS)
    cell = Cell("n", 10, "SMEA", POINT)
    cell.add(range(8), found)
    # What is proved holds on average, and no attack is stronger than the strongest.
    assert cell.worst.mean() <= cell.bound
    assert max(np.mean(values) for values in found.values()) == cell.worst.mean()
    # A rule that trusts everyone is anywhere.
    assert np.mean(errors(POINT, "average", [1])["huge norm"]) > 1e6


def test_seeds_that_come_in_any_order() -> None:
    cell = Cell("n", 10, "SMEA", POINT)
    cell.add([3, 4], {"ALIE": [3.0, 4.0], "FOE": [0.0, 1.0]})
    cell.add([1, 2], {"ALIE": [1.0, 2.0], "FOE": [0.0, 1.0]})
    assert cell.strongest == "ALIE"
    assert cell.worst.tolist() == [1.0, 2.0, 3.0, 4.0]


def invented() -> dict[tuple[str, float, str], Cell]:
    """Return errors that are known: SMEA's twice the noise, the median's grow."""
    cells = {}
    for value in (5.0, 10.0, 20.0, 40.0):
        point = replace(POINT, n=int(value), f=int(value) // 5)
        for rule, factor in (("SMEA", 2.0), ("median", value / 5)):
            cell = Cell("n", value, rule, point)
            error = factor * point.privacy_only
            cell.add(range(4), {"ALIE": [error] * 4})
            cells["n", value, rule] = cell
    return cells


def test_separation_of_what_is_known() -> None:
    smea, median = separation(invented(), "n", 0.0, ["SMEA", "median"])
    assert smea["slope"]["value"] == pytest.approx(0, abs=1e-9)  # type: ignore[index]
    assert median["slope"]["value"] == pytest.approx(1)  # type: ignore[index]
    assert median["times_smea"]["value"] == pytest.approx(4)  # type: ignore[index]
    found = findings(invented(), {"n": 10.0})
    # The error itself falls as 1/(n-f) where the ratio stands still.
    by_rule = {row["rule"]: row for row in found["slopes"]}  # type: ignore[attr-defined]
    assert by_rule["SMEA"]["slope"]["value"] == pytest.approx(-1)
    assert by_rule["SMEA"]["from"] == 10


@pytest.mark.process
def test_a_small_study(tmp_path: Path) -> None:
    study = EmpiricalTrilemma(
        base={"n": 5, "f": 1, "d": 32, "m": 100, "epsilon": 1, "heterogeneity": 0},
        sweeps={
            "m": Sweep([100, 1000]),
            "n": Sweep([5, 10], {"d": 100}),
        },
        plain=["m"],
        delta=1e-6,
        seed=3,
        num_seeds=5,
        workers=1,
    )
    study(tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    for stem in ("no-adversaries", "under-attack", "separation"):
        assert {f"{stem}.png", f"{stem}.svg"} <= names
    found = json.loads((tmp_path / "trilemma.json").read_text())
    assert found["config"]["seed"] == 3
    assert found["config"]["sweeps"]["n"]["others"] == {"d": 100}
    assert all(len(cell["errors"]) == 5 for cell in found["cells"])
    by_n = [cell["setting"] for cell in found["cells"] if cell["sweep"] == "n"]
    assert {(p["n"], p["f"], p["d"]) for p in by_n} == {(5, 1, 100), (10, 2, 100)}
    slopes = {(row["sweep"], row["rule"]): row for row in found["slopes"]}
    assert slopes["m, f = 0", "SMEA"]["predicted"] == -2
    assert slopes["m, f = 0", "SMEA"]["within"]
    assert slopes["m", "SMEA"]["predicted"] is None
    assert "within 0.25: yes" in (tmp_path / "trilemma.md").read_text()


@pytest.mark.process
def test_the_command_runs_a_study(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "simulations.run", "experiment=convergence"]
    command += ["study.steps=64", "study.fit_from=16", "study.num_seeds=2"]
    command += ["study.workers=1", f"hydra.run.dir={tmp_path}"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "of processors; everything is in" in ran.stdout
    found = json.loads((tmp_path / "convergence.json").read_text())
    assert found["times"] == [16, 32, 64]
    assert list(found["cases"]) == list(CASES)
    assert (tmp_path / "convergence.svg").exists()
    assert not (tmp_path / "model.npz").exists()


def problem() -> Problem:
    rng = np.random.default_rng(0)
    features = rng.normal(size=(3, 40, 4))
    features /= np.linalg.norm(features, axis=-1, keepdims=True)
    return Problem(features, rng.integers(2, size=(3, 40)).astype(float), 0.1)


def test_gradients_are_those_of_the_loss() -> None:
    it, theta = problem(), np.array([0.3, -1.0, 2.0, 0.1])
    everything = np.tile(np.arange(40), (3, 1))
    mean = it.gradients(theta, everything).mean(axis=0)
    for i, step in enumerate(1e-6 * np.eye(4)):
        difference = (it.loss(theta + step) - it.loss(theta - step)) / 2e-6
        assert mean[i] == pytest.approx(difference, abs=1e-7)
    best = it.gradients(it.minimiser, everything).mean(axis=0)
    assert np.abs(best).max() < 1e-8
    # Of a single client's batch: its own examples alone.
    rows = np.array([[0, 1], [2, 3], [4, 5]])
    alone = Problem(it.features[1:2, 2:4], it.labels[1:2, 2:4], 0.1)
    expected = alone.gradients(theta, np.array([[0, 1]]))
    np.testing.assert_allclose(it.gradients(theta, rows)[1], expected[0])


def test_constants_of_the_loss() -> None:
    it = problem()
    rng = np.random.default_rng(1)
    everything = np.tile(np.arange(40), (3, 1))
    for _ in range(50):
        a, b = rng.normal(size=(2, 4))
        ga, gb = (it.gradients(t, everything).mean(axis=0) for t in (a, b))
        stretch = (ga - gb) @ (a - b) / ((a - b) @ (a - b))
        assert 0.1 <= stretch <= it.smoothness
    # Spread of the clients' gradients along the worst direction, by its definition.
    each = it.gradients(it.minimiser, everything)
    largest = np.linalg.eigvalsh(np.cov(each.T, bias=True))[-1]
    assert it.heterogeneity == pytest.approx(np.sqrt(largest))


def check(**changes: float) -> ConvergenceCheck:
    settings = {
        "num_nodes": 5, "num_malicious_nodes": 1, "num_examples": 50,
        "num_features": 5, "weight_decay": 0.1, "batch_size": 50,
        "noise_multiplier": 0.0, "delta": 1e-6, "steps": 1024, "fit_from": 16,
        "seed": 1, "num_seeds": 2,
    }  # fmt: skip
    return ConvergenceCheck(**{**settings, **changes})  # type: ignore[arg-type]


@pytest.mark.federation
def test_without_noise_nothing_is_left_to_hide_in() -> None:
    # A full batch, no noise, clients alike: adversaries cannot move SMEA at all.
    for case in ("no adversaries", "ALIE", "min-max"):
        gaps = check().gaps(case, seed=1)
        assert gaps[-1] < 1e-6 < gaps[0]
    # Clients that differ leave something for ever.
    assert check().gaps("ALIE, clients differ", seed=1)[-1] > 1e-4


@pytest.mark.parametrize("whose", ["ours", "the paper's"])
def test_the_bound_of_each_case(whose: str) -> None:
    few = check(noise_multiplier=1.0, batch_size=10)
    plain, attacked, apart = (
        few.bounds(case)[whose][-1]
        for case in ("no adversaries", "ALIE", "ALIE, clients differ")
    )
    assert plain.heterogeneity == attacked.heterogeneity == 0 < apart.heterogeneity
    # d sigma_DP^2 = 5 * 0.04, of four honest clients; n = 5, f = 1: kappa = 4/3, and
    # 16/9 in the paper; sigma_b^2 = 40/49/10, and 2 * 0.8/10 in the paper.
    kappa, batch, noise = 4 / 3, 4 / 49, 0.04 * (1 + 1.25**0.5) ** 2
    if whose != "ours":
        kappa, batch, noise = 16 / 9, 0.16, 36 * 0.04 * 9 / 4
    mean = (batch + 0.2) / 4
    ratio = attacked.noise / plain.noise
    assert ratio == pytest.approx((mean + 4 * kappa * (batch + noise)) / mean)
