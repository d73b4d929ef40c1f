"""ByzFL's own training loop on this project's task, for comparison.

Its Client, ByzantineClient and Server, called as its benchmark calls them, for the same
model, data, batch size, momentum, rule and attack; without privacy, which it lacks.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from importlib.util import find_spec, module_from_spec
from types import ModuleType

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from simulations.experiment import share


class LogisticRegression(nn.Module):
    """The paper's model, with one logit for each example: (k, 68) to (k,)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(68, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        logits: torch.Tensor = self.linear(inputs)
        return logits.squeeze(1)


def available() -> bool:
    """Say whether ByzFL is installed."""
    return find_spec("byzfl") is not None


def round_function(overrides: str, honest: int, f: int) -> Callable[[], None]:
    """Return a function that does one round of ByzFL.

    Parameters
    ----------
    overrides : str
        Of the experiment whose data are used.
    honest, f : int
        Honest clients, and adversaries beside them.
    """
    framework = _framework()
    models = importlib.import_module("byzfl.fed_framework.models")
    models.LogisticRegression = LogisticRegression  # type: ignore[attr-defined]
    common = {
        "model_name": "LogisticRegression",
        "device": "cpu",
        "loss_name": "BCEWithLogitsLoss",
        "nb_labels": 2,
    }
    clients = [
        framework["client"].Client(
            {
                **common,
                "LabelFlipping": False,
                "momentum": 0.99,
                "training_dataloader": _batches(overrides, i),
                "store_per_client_metrics": False,
            }
        )
        for i in range(honest)
    ]
    rule = {"name": "SMEA", "parameters": {"f": f}}
    server = framework["server"].Server(
        {
            **common,
            "optimizer_name": "SGD",
            "learning_rate": 1.0,
            "weight_decay": 1e-4,
            "milestones": [],
            "learning_rate_decay": 1.0,
            "aggregator_info": rule,
            "pre_agg_list": [],
            "test_loader": _batches(overrides, 0),
        }
    )
    attack = framework["byzantine_client"].ByzantineClient(
        {
            "name": "Optimal_ALittleIsEnough",
            "f": f,
            "parameters": {"f": f, "aggregator_info": rule, "pre_agg_list": []},
        }
    )

    def play() -> None:
        for client in clients:
            client.compute_gradients()
        sent = [client.get_flat_gradients_with_momentum() for client in clients]
        server.update_model_with_gradients(sent + attack.apply_attack(sent))
        model = server.get_dict_parameters()
        for client in clients:
            client.set_model_state(model)

    return play


def _batches(overrides: str, index: int) -> DataLoader[tuple[torch.Tensor, ...]]:
    inputs, labels = share(overrides, index).examples
    return DataLoader(TensorDataset(inputs, labels.squeeze(1)), 25, shuffle=True)


def _framework() -> dict[str, ModuleType]:
    """Import what is needed; the rest of ByzFL wants packages for its plots."""
    for name in ("byzfl", "byzfl.fed_framework"):
        if name not in sys.modules:
            spec = find_spec(name)
            assert spec is not None
            sys.modules[name] = module_from_spec(spec)
    package = sys.modules["byzfl.fed_framework"]
    interface = importlib.import_module("byzfl.fed_framework.model_base_interface")
    package.ModelBaseInterface = interface.ModelBaseInterface  # type: ignore[attr-defined]
    aggregator = importlib.import_module("byzfl.fed_framework.robust_aggregator")
    package.RobustAggregator = aggregator.RobustAggregator  # type: ignore[attr-defined]
    names = ("client", "server", "byzantine_client")
    return {n: importlib.import_module(f"byzfl.fed_framework.{n}") for n in names}
