"""Schedules: their values, from configuration, and in a run."""

import math

import numpy as np
import pytest
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig

from flwr_safedshb.algorithm.schedules import Constant, LinearDecay, Rates, rates_at
from flwr_safedshb.theory import NonConvex, StronglyConvex
from simulations.config import compose_config
from simulations.engines import run
from simulations.experiment import build_untrained, load_federation
from simulations.schedules import logistic_smoothness, make_schedule

SMALL = "data.num_examples=600 data.num_features=5 weight_decay=0.01 num_nodes=5 "


def rates_of(overrides: str) -> tuple[Rates, DictConfig]:
    cfg = compose_config(SMALL + overrides)
    data, model = (
        load_federation(SMALL + overrides),
        build_untrained(SMALL + overrides),
    )
    return make_schedule(cfg, data, model, instantiate(cfg.aggregation)), cfg


def test_a_linear_decay_keeps_its_last_rate() -> None:
    rates, cfg = rates_of("schedule=linear steps=4 server_learning_rate=2 momentum=0.7")
    given = rates.learning_rate, rates.momentum
    found = [rates_at(*given, step) for step in range(cfg.steps + 1)]
    assert found == [(2.0, 0.7), (1.5, 0.7), (1.0, 0.7), (0.5, 0.7), (0.5, 0.7)]
    with pytest.raises(ValueError, match="steps=0 must be at least 1"):
        LinearDecay(1.0, 0.9, 0)


def test_constants_and_functions_of_the_step() -> None:
    assert rates_at(0.5, 0.25, 7) == (0.5, 0.25)
    # Clients use beta_{t-1} in step t, and beta_0 in step 0.
    assert rates_at(lambda t: 1 / (t + 1), lambda t: t / 10, 3) == (0.25, 0.2)
    assert rates_at(1.0, lambda t: (t + 1) / 10, 0) == (1.0, 0.1)
    with pytest.raises(ValueError, match=r"server_learning_rate=0\.0 at step 2"):
        rates_at(lambda t: 2.0 - t, 0.5, 2)
    with pytest.raises(ValueError, match=r"momentum=1\.0 at step 10 must lie in"):
        rates_at(1.0, lambda t: t / 10, 11)


def test_the_default_is_that_of_the_papers_experiments() -> None:
    rates, _ = rates_of("momentum=0.9 num_malicious_nodes=1")
    assert rates == Constant(1.0, 0.9)
    assert rates_of("schedule=constant schedule.learning_rate=0.5")[0] == Constant(
        0.5, 0.99
    )


def test_smoothness_is_that_of_the_hessian_where_it_is_largest() -> None:
    # At theta = 0 every p (1-p) is 1/4: the Hessian of the loss itself, by autograd.
    data, model = load_federation(SMALL), build_untrained(SMALL)

    def loss(theta: torch.Tensor) -> torch.Tensor:
        total = 0.05 * theta.square().sum()  # lambda = 0.1
        for inputs, labels in data.shards:
            logits = inputs.double() @ theta[:-1] + theta[-1]
            total = total + torch.nn.functional.binary_cross_entropy_with_logits(
                logits, labels.double()
            ) / len(data.shards)
        return total

    start = torch.zeros(6, dtype=torch.float64)
    hessian = torch.autograd.functional.hessian(loss, start)  # type: ignore[no-untyped-call]
    largest = float(np.linalg.eigvalsh(hessian.numpy())[-1])
    assert logistic_smoothness(data, model, 0.1) == pytest.approx(largest)


def test_strongly_convex_from_config() -> None:
    rates, cfg = rates_of("schedule=strongly-convex num_malicious_nodes=1")
    assert isinstance(rates, StronglyConvex)
    assert rates.strong_convexity == cfg.weight_decay == 0.01
    # Unit vectors and a constant 1: between that of the constant and the trace.
    assert 0.25 + 0.01 <= rates.smoothness <= 0.5 + 0.01
    given, _ = rates_of("schedule=strongly-convex schedule.smoothness=3")
    assert given == StronglyConvex(3, 0.01)


def test_non_convex_from_config() -> None:
    rates, _ = rates_of("schedule=non-convex num_malicious_nodes=1 steps=50")
    assert isinstance(rates, NonConvex)
    assert rates.steps == 50
    # Logistic regression starts from 0.
    assert rates.initial_gap == pytest.approx(math.log(2), rel=1e-6)
    # n = 5, f = 1, d = 6, m = 480/5 = 96, b = 25, C = 1, s = 1: by the definition,
    # with kappa = 4/3.
    batch = (1 - 24 / 95) / 25
    noise = 0.08**2
    spread = noise * (1 + math.sqrt(6 / 4)) ** 2
    square = (batch + 6 * noise) / 4 + 16 / 3 * (batch + spread)
    assert rates.effective_std == pytest.approx(math.sqrt(square))
    given, _ = rates_of("schedule=non-convex schedule.effective_std=2 steps=50")
    assert isinstance(given, NonConvex)
    assert given.effective_std == 2


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ("schedule=strongly-convex model=mlp", "schedule.smoothness=null is estimated"),
        ("schedule=non-convex aggregation=median", "spectral kappa, got Median"),
        ("schedule=strongly-convex weight_decay=0.0", "strong_convexity=0"),
        (
            "schedule=strongly-convex schedule.strong_convexity=null",
            r"schedule\.strong_convexity=null is not estimated; give it",
        ),
    ],
)
def test_what_cannot_be_estimated_is_asked_for(overrides: str, words: str) -> None:
    with pytest.raises(Exception, match=words):
        rates_of(overrides + " num_malicious_nodes=1")


def test_a_run_follows_the_schedule() -> None:
    more = ["schedule=strongly-convex", "num_malicious_nodes=1", "steps=4"]
    progress = run([*SMALL.split(), *more])
    rates, _ = rates_of(" ".join(more))
    assert isinstance(rates, StronglyConvex)
    for step in range(4):
        metrics = progress.train[step + 1]
        assert metrics["learning-rate"] == rates.learning_rate(step)
        # Clients use beta_{t-1} in step t, and beta_0 in step 0.
        assert metrics["momentum"] == rates.momentum(max(step - 1, 0))
