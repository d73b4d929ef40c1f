"""Steps that are compared, and what is said of their times."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from flwr_safedshb.algorithm.budget import LEDGER_NAME
from flwr_safedshb.privacy.ledger.ledger import Ledger
from simulations.benchmarks import client_step, deployed, startup, steps
from simulations.benchmarks.result import compare_thresholds
from simulations.benchmarks.steps import (
    OPACUS,
    OURS,
    PLAIN,
    SECURE,
    STEPS,
    TASKS,
    make_step,
)
from simulations.benchmarks.thresholds import STEP_MODELS
from simulations.models import CNN

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")

SMALL = steps.Task(
    lambda: CNN((1, 8, 8), 3), nn.CrossEntropyLoss(), (1, 8, 8), 3, 20, 4
)


@pytest.mark.federation
@pytest.mark.parametrize("name", [PLAIN, *OPACUS])
def test_every_step_of_others_trains_the_model_again(name: str) -> None:
    step = make_step(SMALL, name)
    assert isinstance(step, partial)
    seen = []
    for _ in range(3):
        weights = [p.detach().flatten() for p in step.args[0].parameters()]
        seen.append(torch.cat(weights).clone())
        step()
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])


@pytest.mark.parametrize("name", [OURS, SECURE])
def test_our_step_is_a_private_gradient(name: str) -> None:
    step = make_step(SMALL, name)
    first, second = step(), step()
    assert isinstance(first, list)
    assert isinstance(second, list)
    shapes = [tuple(p.shape) for p in SMALL.make().parameters()]
    assert [layer.shape for layer in first] == shapes
    # A new batch and new noise, as in every step.
    assert not np.allclose(first[0], second[0])


@pytest.mark.parametrize(
    ("name", "size"), [("logistic", 69), ("CNN", 26_090), ("MLP", 1_796_010)]
)
def test_models_have_the_sizes_that_thresholds_speak_of(name: str, size: int) -> None:
    task = TASKS[name]
    assert sum(p.numel() for p in task.make().parameters()) == size
    inputs, targets = task.make_data()
    assert len(inputs) == len(targets) == task.make_plan().num_examples


def test_times_are_those_of_all_steps_and_draws(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(TASKS, "small", SMALL)
    seconds = steps.time_steps("small", 0.0)
    assert seconds.keys() == {*STEPS, "batch", "noise"}
    assert all(value > 0 for value in seconds.values())


def test_thresholds_are_of_the_models_that_are_measured() -> None:
    assert tuple(TASKS) == STEP_MODELS


BOUNDS = {"logistic": 2.4, "CNN": 2.2, "MLP": 2.4}


@pytest.mark.parametrize("slow", [False, True])
def test_thresholds_see_what_they_are_about(
    slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    far = 1.01 if slow else 1.0

    def measured(function: object, *arguments: object) -> dict[str, float]:
        if function is deployed.measure_step:
            peak = 10.0 * far
            return {"bare": 2.0, "deployed": 3.0 * far, "peak": peak, "model": 2.0}
        name, step = map(str, arguments)
        if function is steps.measure_memory:
            return {"peak": 2.0 if step == PLAIN else 4.0 * far, "model": 1.0}
        assert function is steps.time_steps
        ours = BOUNDS.get(name, 3.0) * far
        opacus = dict.fromkeys(OPACUS, ours / far / far)
        drawn = {"batch": 0.2, "noise": 0.3}
        return {PLAIN: 1.0, OURS: ours, SECURE: 1.0 / far} | opacus | drawn

    monkeypatch.setattr(client_step, "call_alone", measured)
    monkeypatch.setattr(deployed, "momentum_survives_kill", lambda size: not slow)
    result = client_step.measure(quick=True)
    verdicts = [
        row[3] for row in compare_thresholds("client_step", result.figures).rows
    ]
    assert verdicts == ["MISSED" if slow else "met"] * 17
    assert result.costs["MLP / plain SGD"] == pytest.approx(2.4 * far)


def test_start_is_measured_against_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = dict(zip(startup.SCRIPTS.values(), (0.1, 0.2, 2.0, 2.5, 3.1), strict=False))
    monkeypatch.setattr(startup, "processor_seconds", lambda s: taken.get(s, 4.0))
    result = startup.measure(quick=False)
    assert result.costs == {"client ready / torch": pytest.approx(1.55)}
    assert compare_thresholds("startup", result.figures).rows[0][3] == "MISSED"


@pytest.mark.process
def test_processor_seconds_are_those_of_the_process() -> None:
    # A process that waits does not work; Python's own start is some hundredths.
    assert startup.processor_seconds("import time; time.sleep(1.0)") < 0.9


def test_the_deployed_step_charges_and_keeps(tmp_path: Path) -> None:
    cost = deployed.measure_step(4, 0.0, str(tmp_path))
    assert cost["bare"] > 0.0
    assert cost["deployed"] > 0.0
    with Ledger(tmp_path / "state" / LEDGER_NAME) as ledger:
        assert len(ledger.charges()) == 3
    assert len(list((tmp_path / "state").glob("momentum-*"))) == 2


@pytest.mark.process
def test_a_momentum_is_found_after_a_kill(tmp_path: Path) -> None:
    assert deployed.momentum_survives_kill(10**5, str(tmp_path))
