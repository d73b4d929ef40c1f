"""What adaptive choices cost on ordinary histories."""

import pytest

from simulations.studies.filtering import costs_of, histories


@pytest.mark.parametrize("history", histories())
def test_a_filter_costs_little_more_than_what_was_committed(history: str) -> None:
    runs = histories()[history]
    costs = costs_of(history, runs)
    assert costs.composed <= costs.first_committed <= 1.2 * costs.composed
    assert costs.composed < costs.adaptive < 1.5 * costs.composed
    if len(runs) == 1:
        assert costs.first_committed == costs.composed
