"""Weights by size, against counting every node once."""

import pytest

from flwr_safedshb.theory import kappa_smea
from simulations.studies.sizes import SIZES, measure_weights


def test_equal_sizes_make_no_difference() -> None:
    found = measure_weights(0, 1)
    for kind in ("kappa", "unharmed", "attacked"):
        assert found[f"{kind}_once"] == pytest.approx(found[f"{kind}_copies"])


def test_copies_help_unharmed_and_cost_a_larger_constant() -> None:
    found = measure_weights([*SIZES].index("one is twice as large"), 1)
    assert found["unharmed_copies"] < found["unharmed_once"]
    assert found["kappa_copies"] == kappa_smea(8, 2) > found["kappa_once"]
    assert found["attacked_copies"] > found["attacked_once"]
    assert "kappa_copies" not in measure_weights(4, 1)
