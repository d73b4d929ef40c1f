"""Examples that cannot be used count as zero, and leave no trace in the others."""

import logging
import math
import sys
from typing import Any, cast

import pytest
import torch
from torch import nn

from flwr_safedshb.privacy.clipping.gradients import ClippedGradients
from tests.clipping import OwnForward, cross_entropy, way_of
from tests.privacy.clipping.test_gradients import Recurrent

torch.set_num_threads(1)


def net(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "alone":
        return Recurrent(nn.LSTM)
    layers = nn.Sequential(
        nn.Flatten(), nn.Linear(12, 20), nn.Dropout(0.5), nn.Linear(20, 3)
    )
    return layers if kind == "plain" else OwnForward(layers)


all_ways = pytest.mark.parametrize("kind", ["plain", "vmap", "alone"])


@all_ways
@pytest.mark.parametrize("bad", [77, -5, math.nan, math.inf])
@pytest.mark.parametrize("places", [[2], [0, 5], [0, 1, 2, 3, 4, 5, 6]])
def test_others_are_the_same_to_the_last_bit(
    kind: str, bad: float, places: list[int]
) -> None:
    clipped = ClippedGradients(net(kind), cross_entropy, 0.7)
    inputs, targets = torch.randn(7, 3, 4), torch.randint(3, (7,))
    usable = torch.ones(7, dtype=torch.bool)
    usable[places] = False
    torch.manual_seed(1)
    others = clipped.flat_sum(inputs, targets, usable)
    state = torch.get_rng_state()
    if math.isfinite(bad) and bad in (77, -5):
        targets[places] = int(bad)
    else:
        inputs[places] = bad
    torch.manual_seed(1)
    found = clipped.flat_sum(inputs, targets)
    assert torch.equal(found, others.to(found.dtype))
    # And dropout goes on from the same state as if nothing had been.
    assert torch.equal(torch.get_rng_state(), state)
    assert bool(found.any()) == bool(usable.any())
    assert way_of(clipped) == kind


@all_ways
def test_node_that_is_sent_nonsense_answers(kind: str) -> None:
    model = net(kind)
    clipped = ClippedGradients(model, cross_entropy, 0.7)
    inputs, targets = torch.randn(5, 3, 4), torch.randint(3, (5,))
    for value in (math.nan, math.inf, 3e38, 1e-45):
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(value)
        assert bool(clipped.flat_sum(inputs, targets).isfinite().all())


@pytest.mark.parametrize("kind", ["vmap", "alone"])
def test_log_of_the_node_says_how_many_and_what(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    clipped = ClippedGradients(net(kind), cross_entropy, 0.7)
    inputs, targets = torch.randn(5, 3, 4), torch.randint(3, (5,))
    clipped(inputs, targets)
    with caplog.at_level(logging.INFO):
        clipped(inputs, targets)
        assert not caplog.records
        targets[3] = 77
        clipped(inputs, targets)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith("1 examples cannot be used")
    assert "77" not in record.getMessage()


@all_ways
@pytest.mark.parametrize("already", [False, True])
def test_numbers_below_the_normal_ones_take_no_longer(kind: str, already: bool) -> None:
    """They are taken for zero while a batch is computed, and as before afterwards."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot take them for zero")
    clipped = ClippedGradients(net(kind), cross_entropy, 0.7)
    inputs, targets = torch.randn(5, 3, 4), torch.randint(3, (5,))
    path, seen = clipped.prepare(inputs, targets), []

    def half() -> float:
        return sys.float_info.min * 0.5

    class Spy:
        def __getattr__(self, name: str) -> Any:
            seen.append(half())
            return getattr(path, name)

    try:
        torch.set_flush_denormal(already)
        clipped._backwards = dict.fromkeys(clipped._backwards, cast(Any, Spy()))
        clipped(inputs, targets)
        assert seen[-1] == 0.0
        assert (half() == 0.0) == already
    finally:
        torch.set_flush_denormal(False)
