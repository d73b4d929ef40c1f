"""Signal and distance of a task, against a literal transcription."""

import numpy as np
import pytest
import torch

from flwr_safedshb.simulation.task_signal import SHARE, measure_signal


def test_the_signal_is_the_clipped_gradient_along_the_way_to_the_optimum() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(200, 3, generator=generator)
    targets = (inputs @ torch.tensor([1.0, -2.0, 0.5]) > 0).float()[:, None]
    model = torch.nn.Linear(3, 1)
    for weight in model.parameters():
        torch.nn.init.zeros_(weight)
    loss, clip = torch.nn.BCEWithLogitsLoss(), 0.3
    found = measure_signal(model, loss, inputs, targets, clip)
    assert not any(weight.any() for weight in model.parameters())

    # Of logistic regression example i has the gradient (p_i - y_i) (x_i, 1).
    rows = torch.cat([inputs, torch.ones(200, 1)], dim=1).double().numpy()
    labels = targets[:, 0].numpy()

    def residuals(theta: np.ndarray) -> np.ndarray:
        found: np.ndarray = 1.0 / (1.0 + np.exp(-rows @ theta)) - labels
        return found

    left = rows.T @ residuals(found.way) / 200 + 1e-3 * found.way
    assert np.linalg.norm(left) < 1e-3
    gradients = residuals(SHARE * found.way)[:, None] * rows
    lengths = np.linalg.norm(gradients, axis=1)
    assert (lengths > clip).any()
    clipped = gradients * np.minimum(1.0, clip / lengths)[:, None]
    assert found.distance == pytest.approx(np.linalg.norm(found.way))
    expected = -clipped.mean(axis=0) @ found.way / found.distance
    assert found.signal == pytest.approx(expected, rel=1e-4)
