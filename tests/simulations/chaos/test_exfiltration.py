"""A node runs the code that its owner approved, however other code is brought."""

from pathlib import Path

import pytest

from flwr_safedshb.algorithm.budget import LEDGER_NAME
from flwr_safedshb.node.approvals import KEY, inspect_bundle
from flwr_safedshb.node.flower_patches.fab import build_bundle
from flwr_safedshb.privacy.ledger.ledger import Ledger
from simulations.chaos.exfiltration import run_app, write_app
from simulations.loopback import Deployment


@pytest.mark.process
def test_only_an_approved_bundle_runs_whatever_it_is_called(tmp_path: Path) -> None:
    """Node 0 approved an app; node 1 has no list, and so trusts operators with code."""
    harmless = write_app(tmp_path / "harmless", "an-app", hostile=False)
    # The same name and version, and other bytes; then a run that comes back with them.
    changed = write_app(tmp_path / "changed", "an-app")
    with Deployment(tmp_path / "flower", 2, secure=False) as nodes:
        nodes.kill("node-0")
        nodes.start_node(0, config={KEY: inspect_bundle(build_bundle(harmless)).hash})
        for node in (0, 1):
            nodes.state_dir(node).mkdir()
            with Ledger(nodes.state_dir(node) / LEDGER_NAME, 1.0, 1e-5):
                pass
        served = run_app(nodes, harmless, 2)
        assert sorted(int(told["node"]) for told in served) == [0, 1]
        refused = run_app(nodes, changed, 2)
        log = nodes.log("node-1")
    errors = [told["error"] for told in refused if "error" in told]
    hash_ = inspect_bundle(build_bundle(changed)).hash
    assert len(errors) == 1
    assert f"{KEY} refuses the run, whose app has the hash {hash_}" in errors[0]
    # What it does where it runs is what the other node was spared.
    read = [path.name for path in (tmp_path / "changed").glob("read-*")]
    assert read == ["read-1"]
    assert LEDGER_NAME in (tmp_path / "changed" / "read-1").read_text()
    assert "OPERATORS ARE TRUSTED WITH CODE" in log
