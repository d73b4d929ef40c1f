"""An app of the older kind on a SuperLink, its nodes with ledgers of their own."""

from pathlib import Path

import pytest

from flwr_safedshb.algorithm.budget import LEDGER_NAME
from flwr_safedshb.privacy.ledger.ledger import Ledger
from simulations.loopback import ROOT, Deployment
from tests.guard import HANGS

# The server allows for one hostile node, which takes three.
NODES, ROUNDS = 3, 2


@pytest.mark.process
def test_the_older_private_app_trains_on_a_superlink(tmp_path: Path) -> None:
    config = {"max-epsilon": 50.0, "delta": 1e-4}
    app = ROOT / "examples" / "from-fedavg" / "older" / "private"
    with Deployment(tmp_path / "flower", NODES, config, app) as deployment:
        run_id = deployment.submit({"num-server-rounds": ROUNDS})
        deployment.wait(run_id, timeout=HANGS)
        for index in range(NODES):
            with Ledger(deployment.state_dir(index) / LEDGER_NAME) as ledger:
                charges = ledger.charges()
            # Each round, and the private evaluation of the last model.
            assert [charge.steps for charge in charges] == [1] * (ROUNDS + 1)
            assert len({charge.run for charge in charges}) == 1
