"""A label cannot be read from a release, and the attack reads it where it can be."""

import numpy as np
import pytest
import torch

from flwr_safedshb.audit import label_inference
from flwr_safedshb.audit.candidate import Candidate, draw_candidate, float_entries
from flwr_safedshb.audit.label_inference import LabelGuesses, infer_labels
from flwr_safedshb.audit.zoo import layers
from flwr_safedshb.privacy.batches import Example
from flwr_safedshb.privacy.clipping.gradients import ClippedGradients

LOGISTIC = layers.MODELS[0]


def candidates(count: int = 6) -> list[Candidate]:
    rng = np.random.default_rng(1)
    start = [entry.clone() for entry in float_entries(LOGISTIC.make())]
    return [draw_candidate(LOGISTIC, start, rng) for _ in range(count)]


def test_labels_are_read_no_better_than_by_chance() -> None:
    found = infer_labels(LOGISTIC, candidates(), 200, 1)
    assert found.holds
    assert 0.5 < found.chance < 0.53
    assert 60 < found.num_right < 140


def test_labels_are_read_where_clipping_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unclipped(ClippedGradients):
        def consume_batch(
            self, batch: Example, groups: int = 1, usable: torch.Tensor | None = None
        ) -> torch.Tensor:
            return 1e3 * super().consume_batch(batch, groups, usable)

    monkeypatch.setattr(label_inference, "ClippedGradients", Unclipped)
    found = infer_labels(LOGISTIC, candidates(), 100, 1)
    assert found.num_right == 100
    assert not found.holds


@pytest.mark.parametrize(("right", "holds"), [(40, False), (24, True), (20, True)])
def test_what_is_more_than_chance(right: int, holds: bool) -> None:
    assert LabelGuesses(right, 40, 0.52).holds == holds
