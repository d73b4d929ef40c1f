"""Whether a training is likely to withstand: what the estimate is made of."""

import pytest

from flwr_safedshb.theory import swing, withstands
from flwr_safedshb.theory.resilience import MARGIN


def test_pushes_add_up_where_a_model_with_momentum_swings() -> None:
    assert swing(0.99, 1.0, 0.25) == pytest.approx(5.0)
    assert swing(0.99, 0.5, 0.5) == pytest.approx(5.0)
    assert swing(0.0, 1.0, 0.25) == 1.0  # overdamped: each push for itself
    assert swing(0.99, 1.0, 0.0) == 1.0  # unknown


def test_a_training_withstands_while_the_gradient_is_out_of_reach() -> None:
    assert withstands(0.99 * MARGIN, 1.0)
    assert not withstands(1.01 * MARGIN, 1.0)
    assert not withstands(0.6 * MARGIN, 1.0, 2.0)


@pytest.mark.parametrize(
    ("given", "words"),
    [((1.0, 1.0, 1.0), "momentum"), ((0.9, 0.0, 1.0), "learning_rate")],
)
def test_what_makes_no_sense_is_refused(
    given: tuple[float, float, float], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        swing(*given)
    with pytest.raises(ValueError, match="smoothness"):
        swing(0.9, 1.0, -1.0)
