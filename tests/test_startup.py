"""What a client's process does not pay for."""

import subprocess
import sys

import pytest

SLOW = ("opacus", "dp_accounting", "scipy", "sympy", "numba", "ray", "hydra", "pandas")

STEP = """
import torch
from flwr.app import Context, RecordDict
from torch import nn
from flwr_safedshb import PrivacyPlan, SafeDSHBClient, SeededRandomness, client_app
context = Context(1, 1, {"partition-id": 0}, RecordDict(), {})
data = torch.randn(20, 1, 6, 6), torch.randint(3, (20,))
model = nn.Sequential(
    nn.Conv2d(1, 2, 3), nn.GroupNorm(1, 2), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3)
)
plan = PrivacyPlan(1.0, 1.0, 4, 20)
client = SafeDSHBClient(
    model, nn.CrossEntropyLoss(), data, plan, context, randomness=SeededRandomness(0)
)
arrays = [p.detach().numpy() for p in model.state_dict().values()]
client.fit(arrays, {"step": 0, "momentum": 0.9})
"""


def modules_after(script: str) -> set[str]:
    run = subprocess.run(
        [sys.executable, "-c", f"{script}\nimport sys\nprint(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(run.stdout.split())


@pytest.mark.process
@pytest.mark.parametrize(
    "script",
    ["from flwr_safedshb import SafeDSHBClient, client_app", STEP],
    ids=["ready", "stepped"],
)
def test_client_starts_without_what_it_does_not_use(script: str) -> None:
    modules = modules_after(script)
    assert "torch" in modules
    assert not modules & set(SLOW)
