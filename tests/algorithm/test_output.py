"""Local steps and the mean of iterates, as the server takes them."""

import math
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord

from flwr_safedshb.aggregation import Average
from flwr_safedshb.algorithm import checkpoint
from flwr_safedshb.algorithm.progress import Progress
from flwr_safedshb.algorithm.schedules import noise_left
from flwr_safedshb.strategy import SafeDSHB
from tests.federation import federation, flat, model, vectors


@pytest.mark.parametrize("rounds", [1, 2, 5, 6])
@pytest.mark.parametrize("cut", [None, 1, 4])
def test_the_mean_is_that_of_the_last_half(
    tmp_path: Path, rounds: int, cut: int | None
) -> None:
    iterates = [
        flat(SafeDSHB(seed=1).start(federation(3), model(), t).arrays)
        for t in range(rounds + 1)
    ]
    path = tmp_path / "run.npz"
    strategy = SafeDSHB(output="average", seed=1, checkpoint=path)
    if cut is not None:  # a server that was stopped, and one that goes on
        whole, seen = checkpoint.save, []

        def stop(to: Path, progress: Progress) -> None:
            whole(to, progress)
            seen.append(progress.step)
            if progress.step == cut:
                raise KeyboardInterrupt

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("flwr_safedshb.algorithm.run.save", stop)
            try:
                strategy.start(federation(3), model(), rounds)
            except KeyboardInterrupt:
                strategy = SafeDSHB(output="average", seed=1, checkpoint=path)
    found = strategy.start(federation(3), model(), rounds).arrays
    expected = np.mean(iterates[rounds // 2 + 1 :], axis=0)
    assert np.allclose(flat(found), expected, rtol=1e-6, atol=1e-7)
    assert found["weight"].dtype == "float32"


def test_whole_numbers_of_a_model_stay_whole() -> None:
    arrays = ArrayRecord({**model(), "seen": Array(np.array([7]))})
    progress = Progress.fresh(0, 4, arrays, {})
    from flwr_safedshb.algorithm.output import add_to_mean, select_output

    for progress.step in (3, 4):
        add_to_mean(progress)
    assert select_output(progress, "average")["seen"].numpy() == np.array([7])
    assert select_output(progress, "average")["seen"].dtype == "int64"


def test_k_local_steps_are_k_steps_of_the_server() -> None:
    strategy = SafeDSHB(Average(), server_learning_rate=0.5, local_steps=4)
    found = strategy.start(federation(3), model(), 2)
    theta = np.zeros(13)
    for step in (0, 4):  # what a node is asked for counts its own steps
        theta -= 4 * 0.5 * vectors(range(3), step).mean(axis=0)
    assert np.allclose(flat(found.arrays), theta, rtol=1e-6, atol=1e-6)
    assert found.train_metrics_clientapp[2]["learning-rate"] == 0.5


def test_rates_of_a_round_are_those_of_its_first_step() -> None:
    strategy = SafeDSHB(server_learning_rate=lambda t: 1.0 / (1 + t), local_steps=3)
    found = strategy.start(federation(3), model(), 3).train_metrics_clientapp
    assert [found[i]["learning-rate"] for i in (1, 2, 3)] == [1.0, 1 / 4, 1 / 7]


@pytest.mark.parametrize("count", [0, -1, 1001, 10**9, 2.0, True])
def test_a_number_of_steps_that_nobody_takes_is_refused(count: object) -> None:
    with pytest.raises(ValueError, match="local_steps"):
        SafeDSHB(local_steps=count)  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_noise_in_what_is_sent_is_that_of_the_recursion(count: int) -> None:
    """Coefficients of every noise vector, by the recursion itself."""
    betas = [0.0, 0.9, 0.5]
    total = count * len(betas)
    momentum, sent = np.zeros(total), np.zeros(total)
    for number, beta in enumerate(betas):
        sent = np.zeros(total)
        for k in range(count):
            unit = np.eye(total)[number * count + k]
            momentum = beta * momentum + (1 - beta) * unit
            sent += momentum / count
    assert math.isclose(noise_left(betas, count), float(np.linalg.norm(sent)))
