"""The times of steps are measured for every way and every kind of bad example.

No test asserts a time: that is for people to read, on a machine that does nothing else.
"""

import math

import pytest

from flwr_safedshb.audit import timing
from flwr_safedshb.audit.timing import KINDS, Timing, measure_times

WAYS = {"MLP": "known layers", "residual": "torch.vmap", "LSTM": "one at a time"}


@pytest.mark.parametrize("model", WAYS)
def test_every_kind_of_bad_example_is_timed(model: str) -> None:
    found = measure_times(model, 2)
    assert [row.kind for row in found] == list(KINDS)
    for row in found:
        assert (row.model, row.isolation) == (model, WAYS[model])
        assert row.usual_seconds > 0.0
        assert math.isfinite(row.one_bad + row.half_bad + row.cpu)


@pytest.mark.parametrize(
    ("one", "half", "holds"),
    [(1.0, 1.05, True), (1.2, 1.0, False), (1.0, 0.8, False)],
)
def test_medians_are_compared_with_the_usual(
    one: float, half: float, holds: bool
) -> None:
    assert Timing("MLP", "", "", 1.0, one, half, 1.0).holds == holds


@pytest.mark.parametrize("kind", ["losses overflow", "rows of NaN", "wrong labels"])
def test_bad_examples_cannot_be_used(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    # What is timed is what it is called: half of the examples count as zero.
    timing._Step("MLP", kind, 16)
    assert "16 examples cannot be used" in caplog.text
