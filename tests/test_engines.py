"""Every engine drives the same step: a defect in it is seen on each of them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, UserConfig
from numpy.typing import NDArray
from torch.utils.data import Dataset

from flwr_safedshb import (
    Average,
    BatchedGrid,
    InProcessGrid,
    Ledger,
    PrivacyPlan,
    SafeDSHB,
    SafeDSHBClient,
    client_app,
    trained_arrays,
)
from flwr_safedshb.algorithm.budget import LEDGER_NAME, LedgerBudget
from flwr_safedshb.algorithm.momentum_store import MomentumFiles
from flwr_safedshb.algorithm.requests import TrainRequest
from flwr_safedshb.privacy.randomness.noise import SecureRandomness

torch.set_num_threads(1)

NODES, ROUNDS, BETA = 3, 4, 0.5
PLAN = PrivacyPlan(1.0, 0.01, 4, 4, sampling="whole")
ENGINES = {"in process": InProcessGrid, "batched": BatchedGrid}


def slope(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return outputs[:, 0]  # its gradient is the input, whatever the weights


class Watched(Dataset[tuple[torch.Tensor, float]]):
    """Examples (1, 0, 0) that note what the ledger holds whenever they are read."""

    def __init__(self, folder: Path, seen: list[int]) -> None:
        self._path, self._seen = folder / LEDGER_NAME, seen

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[torch.Tensor, float]:
        with Ledger(self._path) as ledger:
            self._seen.append(sum(charge.steps for charge in ledger.charges()))
        return torch.tensor([1.0, 0.0, 0.0]), 0.0


def train_and_check(engine: str, folder: Path, local_steps: int = 1) -> None:
    """Train with real ledgers, and hold the run to Algorithm 1 and its order."""
    steps = ROUNDS * local_steps
    seen: dict[int, list[int]] = {node: [] for node in range(NODES)}
    model = torch.nn.Linear(3, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    state = [folder / str(node) for node in range(NODES)]

    def client_fn(context: Context) -> SafeDSHBClient:
        node = int(context.node_config["partition-id"])
        rules: UserConfig = {
            "state-dir": str(state[node]),
            "max-epsilon": 1e9,
            "delta": 1e-5,
        }
        context.node_config.update(rules)
        data, like = Watched(state[node], seen[node]), (torch.zeros(3), 0.0)
        return SafeDSHBClient(model, slope, data, PLAN, context, like=like)

    grid = ENGINES[engine](client_app(client_fn), NODES)
    strategy = SafeDSHB(
        Average(),
        num_malicious_nodes=0,
        server_learning_rate=1.0,
        momentum=BETA,
        local_steps=local_steps,
    )
    result = strategy.start(grid, trained_arrays(model), num_rounds=ROUNDS)
    for node in range(NODES):
        with Ledger(state[node] / LEDGER_NAME) as ledger:
            assert sum(charge.steps for charge in ledger.charges()) == steps
        # Charged before the first example of the message is read.
        message = np.repeat(np.arange(1, ROUNDS + 1) * local_steps, 4 * local_steps)
        assert seen[node] == message.tolist()
    found = result.arrays.to_numpy_ndarrays()[0][0]
    # Without noise, every gradient is (1, 0, 0) and m_t = 1 - beta^(t+1).
    path = -sum(1 - BETA ** (t + 1) for t in range(steps))
    assert abs(found[0] - path) < 30 * PLAN.noise_std
    # The noise moves the other coordinates, each node's and each step's its own.
    assert np.abs(found[1:]).min() > 1e-6


def charge_one_step(
    charge: Callable[[LedgerBudget, TrainRequest], None],
) -> Callable[[LedgerBudget, TrainRequest], None]:
    return lambda budget, request: charge(budget, replace(request, local_steps=1))


def no_noise(self: object, size: int, std: float) -> NDArray[np.float64]:
    return np.zeros(size)


@pytest.mark.parametrize("local_steps", [1, 3])
@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_charges_then_steps_then_keeps(
    engine: str, local_steps: int, tmp_path: Path
) -> None:
    train_and_check(engine, tmp_path, local_steps)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "defect", ["no charge", "charge of one", "charge after", "no noise", "not kept"]
)
def test_a_defect_of_the_step_is_seen_on_every_engine(
    engine: str, defect: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    charge = LedgerBudget.charge_training
    match defect:
        case "no charge":
            monkeypatch.setattr(LedgerBudget, "charge_training", lambda *_: None)
        case "charge of one":
            one = charge_one_step(charge)
            monkeypatch.setattr(LedgerBudget, "charge_training", one)
        case "charge after":
            save = MomentumFiles.save
            waiting: dict[str, tuple[LedgerBudget, TrainRequest]] = {}

            def postpone(budget: LedgerBudget, request: TrainRequest) -> None:
                waiting[str(budget.ledger.path.parent)] = budget, request

            def charge_late(files: MomentumFiles, *state: Any) -> None:
                charge(*waiting.pop(str(files.folder)))
                save(files, *state)

            monkeypatch.setattr(LedgerBudget, "charge_training", postpone)
            monkeypatch.setattr(MomentumFiles, "save", charge_late)
        case "no noise":
            monkeypatch.setattr(SecureRandomness, "gaussian", no_noise)
        case "not kept":
            monkeypatch.setattr(MomentumFiles, "save", lambda *_: None)
    with pytest.raises(AssertionError):
        train_and_check(engine, tmp_path, 2 if defect == "charge of one" else 1)
