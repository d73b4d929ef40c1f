"""A label cannot be read from a release, and the attack reads it where it can be."""

import numpy as np
import pytest
import torch

import flwr_safedshb.audit.label_inference
from flwr_safedshb.audit.candidate import Trial, drawn, entries
from flwr_safedshb.audit.label_inference import Reading, read_labels
from flwr_safedshb.audit.zoo import plain
from flwr_safedshb.privacy.batches import Example
from flwr_safedshb.privacy.clipping.gradients import ClippedGradients

LOGISTIC = plain.SUBJECTS[0]


def trials(count: int = 6) -> list[Trial]:
    rng = np.random.default_rng(1)
    start = [entry.clone() for entry in entries(LOGISTIC.make())]
    return [drawn(LOGISTIC, start, rng) for _ in range(count)]


def test_labels_are_read_no_better_than_by_chance() -> None:
    reading = read_labels(LOGISTIC, trials(), 200, 1)
    assert reading.holds
    assert 0.5 < reading.chance < 0.53
    assert 60 < reading.right < 140


def test_labels_are_read_where_clipping_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unclipped(ClippedGradients):
        def consume_batch(
            self, batch: Example, groups: int = 1, usable: torch.Tensor | None = None
        ) -> torch.Tensor:
            return 1e3 * super().consume_batch(batch, groups, usable)

    monkeypatch.setattr(
        flwr_safedshb.audit.label_inference, "ClippedGradients", Unclipped
    )
    reading = read_labels(LOGISTIC, trials(), 100, 1)
    assert reading.right == 100
    assert not reading.holds


@pytest.mark.parametrize(("right", "holds"), [(40, False), (24, True), (20, True)])
def test_what_is_more_than_chance(right: int, holds: bool) -> None:
    assert Reading("", right, 40, 0.52).holds == holds
