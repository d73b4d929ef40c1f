"""How far clients differ, estimated from what the server sees anyway."""

import pytest

from flwr_safedshb.aggregation import SMEA
from flwr_safedshb.strategy import SafeDSHB
from flwr_safedshb.theory import heterogeneity, noise_in_momentum
from tests.federation import federation, model, vectors


def test_metrics_estimate_how_far_clients_differ() -> None:
    grid = federation(7)
    known = SafeDSHB(SMEA(), 2, momentum=0.5, noise_std=0.0).start(grid, model(), 2)
    metrics = known.train_metrics_clientapp[2]
    # Without noise: of the momentums that count.
    nodes = list(grid.get_node_ids())
    left_out = metrics["left-out"]
    assert isinstance(left_out, list)
    left = [nodes.index(int(node)) for node in left_out]
    chosen = vectors([i for i in range(7) if i not in left], 1)
    total, top = heterogeneity(chosen)
    assert metrics["heterogeneity-estimate"] == pytest.approx(total, rel=1e-4)
    assert metrics["heterogeneity-spectral-estimate"] == pytest.approx(top, rel=1e-4)
    # With more noise than there is spread nothing is left; unknown, nothing is said.
    noisy = SafeDSHB(SMEA(), 2, momentum=0.5, noise_std=1e6).start(grid, model(), 2)
    assert noisy.train_metrics_clientapp[2]["heterogeneity-estimate"] == 0.0
    silent = SafeDSHB(SMEA(), 2).start(grid, model(), 1).train_metrics_clientapp[1]
    assert "heterogeneity-estimate" not in silent
    with pytest.raises(ValueError, match="noise_std=-1"):
        SafeDSHB(SMEA(), 2, noise_std=-1.0)


def test_the_noise_of_a_step_is_that_of_all_steps_so_far() -> None:
    strategy = SafeDSHB(SMEA(), 2, momentum=0.9, noise_std=2.0)
    strategy.start(federation(7), model(), 4)
    for step in range(4):
        expected = noise_in_momentum(2.0, 0.9, step + 1)
        assert strategy.run._noise_in_momentum(step) == pytest.approx(expected)
