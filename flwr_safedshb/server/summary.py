"""The settings of a strategy, as a tree in the log."""

from __future__ import annotations

from logging import INFO
from typing import TYPE_CHECKING

from flwr.common import log

if TYPE_CHECKING:
    from flwr_safedshb.server.strategy import SafeDSHB


def log_settings(strategy: SafeDSHB) -> None:
    """Log the settings, as every strategy of Flower does."""
    part = strategy.participation
    log(INFO, "\t├──> Safe-DSHB settings:")
    log(INFO, "\t│\t├── Aggregation: %s", strategy.aggregation)
    log(INFO, "\t│\t├── Number of malicious nodes: %d", strategy.num_malicious_nodes)
    log(INFO, "\t│\t├── Server learning rate: %s", strategy.server_learning_rate)
    log(INFO, "\t│\t├── Momentum: %s", strategy.momentum)
    log(INFO, "\t│\t├── Output: %s", strategy.output)
    log(INFO, "\t│\t└── Checkpoint: %s", strategy.checkpoint or "none")
    log(INFO, "\t├──> Sampling:")
    log(
        INFO,
        "\t│\t├── Fraction: train (%.2f) | evaluate (%.2f)",
        part.fraction,
        strategy.fraction_evaluate,
    )
    log(
        INFO,
        "\t│\t└── Minimum nodes: train (%d) | available (%d), within %g s",
        part.min_train_nodes,
        part.min_available_nodes,
        part.node_timeout,
    )
    log(INFO, "\t└──> Keys in records:")
    log(INFO, "\t\t├── ArrayRecord key: '%s'", strategy.arrayrecord_key)
    log(INFO, "\t\t└── ConfigRecord key: '%s'", strategy.configrecord_key)
