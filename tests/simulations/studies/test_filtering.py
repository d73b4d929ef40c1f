"""What adaptive choices cost on ordinary histories."""

import pytest

from simulations.studies.filtering import find_budgets, list_histories


@pytest.mark.parametrize("history", list_histories())
def test_a_filter_costs_little_more_than_what_was_committed(history: str) -> None:
    found = find_budgets([*list_histories()].index(history))
    composed, committed = found["composed"], found["first_committed"]
    assert composed <= committed <= 1.2 * composed
    assert composed < found["adaptive"] < 1.5 * composed
    if len(list_histories()[history]) == 1:
        assert committed == composed
