"""The search over persons leaves the code alone, and finds a clip by example."""

from dataclasses import replace

import pytest
from torch import nn

from flwr_safedshb.audit.sensitivity_search import search_sensitivity
from flwr_safedshb.audit.suites import Settings, make_owner_tasks
from flwr_safedshb.audit.zoo import layers
from flwr_safedshb.privacy.clipping import clipped_sum as sums
from flwr_safedshb.privacy.clipping.gradients import ClippedGradients, Loss
from flwr_safedshb.privacy.plan import Clipping

LOGISTIC = next(target for target in layers.MODELS if target.name == "logistic")
PERSONS = replace(LOGISTIC, per_owner=3, max_batches=24)


class ClippedByExample(ClippedGradients):
    """Clips every example of a person."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        clip_norm: float,
        clipping: Clipping,
        per_owner: int,
    ) -> None:
        super().__init__(model, loss, clip_norm, clipping)


def test_persons_move_a_sum_by_twice_the_clip_at_most() -> None:
    result = search_sensitivity(PERSONS, 300, 1)
    assert not result.broken
    assert 0.9 < result.ratio <= 1.0


def test_a_clip_by_example_is_found() -> None:
    found = search_sensitivity(PERSONS, 100, 1, make_clipper=ClippedByExample)
    assert found.ratio > 1.5


def test_a_norm_that_forgets_how_the_terms_of_a_person_round_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pairs of vectors that cancel leave rounding of the size of the pairs."""
    monkeypatch.setattr(sums, "bound_spread", lambda rows: 1e12)
    monkeypatch.setattr(sums, "lower_clip_norm", lambda clip_norm, *_: clip_norm)
    task = next(make_owner_tasks(Settings(candidates=400), ["wide MLP"]))
    (row,) = task.run(lambda count: None)
    assert row.broken
