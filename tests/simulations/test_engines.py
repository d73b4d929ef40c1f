"""One experiment, three engines, the same configuration and the same bytes."""

from pathlib import Path

import pytest

from flwr_safedshb.algorithm.checkpoint import load
from flwr_safedshb.algorithm.progress import Progress
from simulations.app import OVERRIDES
from simulations.engines import run
from simulations.experiment import make_share
from simulations.loopback import Deployment
from tests.guard import HANGS

SMALL = ["num_nodes=4", "num_malicious_nodes=1", "steps=4", "data.num_examples=400"]


def model_bytes(progress: Progress) -> list[bytes]:
    return [array.data for array in progress.arrays.values()]


@pytest.fixture(scope="module")
def in_process() -> Progress:
    return run(SMALL)


@pytest.mark.federation
def test_same_seed_same_bytes(in_process: Progress) -> None:
    assert model_bytes(run(SMALL)) == model_bytes(in_process)
    assert model_bytes(run([*SMALL, "seed=2"])) != model_bytes(in_process)
    assert in_process.step == 4
    assert set(in_process.evaluate_serverapp) == {0, 4}


@pytest.mark.process
def test_ray_gives_the_same_model_bit_for_bit(in_process: Progress) -> None:
    progress = run([*SMALL, "engine=ray"])
    assert model_bytes(progress) == model_bytes(in_process)
    assert progress.evaluate_serverapp == in_process.evaluate_serverapp


@pytest.mark.process
def test_flwr_run_from_the_repository_gives_the_same_model(
    in_process: Progress, tmp_path: Path
) -> None:
    overrides = " ".join([*SMALL, f"checkpoint={tmp_path / 'run.npz'}"])
    with Deployment(tmp_path / "flower", 4, virtual=True) as deployment:
        deployment.run({OVERRIDES: overrides}, timeout=HANGS)
    progress = load(tmp_path / "run.npz")
    assert progress is not None
    assert model_bytes(progress) == model_bytes(in_process)


@pytest.mark.federation
def test_training_helps() -> None:
    progress = run(["steps=60", "momentum=0.9", "privacy.plan.noise_multiplier=0.1"])
    first, last = (progress.evaluate_serverapp[i] for i in (0, 60))
    assert last["accuracy"] > 0.7 > first["accuracy"]  # type: ignore[operator]


def test_nodes_share_the_examples_and_one_model() -> None:
    shares = [make_share("num_nodes=3", i) for i in range(3)]
    assert {mine.plan.num_examples for mine in shares} == {4000 * 8 // 10 // 3}
    assert all(len(mine.examples[1]) == mine.plan.num_examples for mine in shares)
    assert len({id(mine.model) for mine in shares}) == 1
    assert sum(p.numel() for p in shares[0].model.parameters()) == 69
