"""The server of the federation under fault: the product's strategy, and a trace."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from flwr_safedshb.strategy import SafeDSHB
from simulations.chaos.problem import BETA, DIMENSION, NODES
from simulations.chaos.trace import TracedGrid

CHECKPOINT, LOG, TRACE = "run.npz", "server.log", "server.jsonl"
# A round begins once all nodes are back, so that each fault stays in its own round.
_NODE_SECONDS = 600.0

server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Train with f = 1, from the checkpoint if there is one."""
    folder = Path(str(context.run_config["folder"]))
    # Flower's own copy of this log comes late, and not at all after a kill.
    handler = logging.FileHandler(folder / LOG)
    logging.getLogger("flwr").addHandler(handler)
    strategy = SafeDSHB(
        num_malicious_nodes=1,
        momentum=BETA,
        min_available_nodes=NODES,
        node_timeout=_NODE_SECONDS,
        seed=int(context.run_config["seed"]),
        checkpoint=folder / CHECKPOINT,
    )
    strategy.start(
        TracedGrid(grid, folder / TRACE),
        initial(),
        num_rounds=int(context.run_config["steps"]),
        timeout=float(context.run_config["timeout"]),
    )
    handler.close()


def initial() -> ArrayRecord:
    """Return the model to start from: zero, two away from the optimum."""
    return ArrayRecord({"weight": Array(np.zeros((DIMENSION, 1), np.float32))})
