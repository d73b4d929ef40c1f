"""The ServerApp and ClientApp of an experiment: the same two on every engine.

Both sides compose the configuration from one string of Hydra overrides, which is all
that Flower has to carry: ``hydra-overrides`` in the run config, or an argument where an
engine cannot carry a run config.
"""

from __future__ import annotations

import copy
import shlex
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import cast

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import nn

from flwr_safedshb.attacks import Attack
from flwr_safedshb.client.client import SafeDSHBClient
from flwr_safedshb.client.client import client_app as private_client_app
from flwr_safedshb.grids.adversarial import AdversarialGrid
from flwr_safedshb.privacy.plan import PrivacyPlan
from flwr_safedshb.privacy.randomness.noise import (
    Randomness,
    SecureRandomness,
    SeededRandomness,
)
from flwr_safedshb.server.strategy import SafeDSHB
from simulations.data import Examples, Federation, federated, flipped
from simulations.data.own import load_own
from simulations.models import build, classification_loss, evaluate, training_loss
from simulations.overrides import CONF, plain
from simulations.schedules import scheduled

OVERRIDES = "hydra-overrides"


@lru_cache(maxsize=8)
def composed(overrides: str) -> DictConfig:
    """Return the configuration that the overrides make of the packaged files."""
    with initialize_config_dir(str(CONF), version_base=None):
        return compose("config", overrides=shlex.split(overrides))


@dataclass(frozen=True)
class Share:
    """What the client of one node is made of; the model is shared by all of them."""

    model: nn.Module
    examples: Examples
    plan: PrivacyPlan
    weight_decay: float
    max_epsilon: float | None
    delta: float
    randomness: Randomness


@lru_cache(maxsize=4096)
def share(overrides: str, index: int) -> Share:
    """Return the share of node `index`, made once: clients are made for each message.

    Adversaries who need data hold copies of what honest nodes hold.
    """
    cfg = composed(overrides)
    data = federation(overrides)
    examples = data.shards[index % len(data.shards)]
    if index >= len(data.shards) and not _attack(cfg).replaces_vectors:
        examples = flipped(examples, data.num_classes)
    return _share(cfg, untrained(overrides), examples)


@lru_cache(maxsize=2)
def own_share(overrides: str, path: str) -> Share:
    """Return the share of a node whose examples are in a file of its own."""
    cfg = composed(overrides)
    own = load_own(Path(path))
    make = instantiate(cfg.model, _partial_=True)
    shape = tuple(own.examples[0].shape[1:])
    return _share(cfg, build(make, shape, own.num_classes, cfg.seed), own.examples)


def _share(cfg: DictConfig, model: nn.Module, examples: Examples) -> Share:
    return Share(
        model=model,
        examples=examples,
        plan=instantiate(cfg.privacy.plan, num_examples=len(examples[1])),
        weight_decay=cfg.weight_decay,
        max_epsilon=cfg.engine.get("max_epsilon"),
        delta=cfg.privacy.delta,
        randomness=SeededRandomness(cfg.seed)
        if cfg.engine.seeded_noise
        else SecureRandomness(),
    )


def federation(overrides: str) -> Federation:
    """Return the data of an experiment; the honest nodes share all of them."""
    cfg = composed(overrides)
    holders = cfg.num_nodes - (cfg.num_malicious_nodes if _attacked(cfg) else 0)
    data = federated(instantiate(cfg.data), instantiate(cfg.split), holders, cfg.seed)
    data.check_batch_size(cfg.privacy.plan.batch_size)
    return data


@lru_cache(maxsize=2)
def untrained(overrides: str) -> nn.Module:
    """Return the model of an experiment."""
    cfg = composed(overrides)
    data = federation(overrides)
    make = instantiate(cfg.model, _partial_=True)
    return build(make, data.input_shape, data.num_classes, cfg.seed)


def make_server_app(overrides: str | None = None) -> ServerApp:
    """Return the ServerApp; without `overrides` the run config must have them."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        serve(_overrides(overrides, context), grid)

    return app


def make_client_app(overrides: str | None = None) -> ClientApp:
    """Return the ClientApp; without `overrides` the run config must have them."""

    def client_fn(context: Context) -> SafeDSHBClient:
        return make_client(_overrides(overrides, context), context)

    return private_client_app(client_fn)


def serve(overrides: str, grid: Grid) -> None:
    """Train on the nodes of the grid; the model is left in ``cfg.checkpoint``."""
    cfg = composed(overrides)
    rule = instantiate(cfg.aggregation)
    if _attacked(cfg):
        f = cfg.num_malicious_nodes
        grid = AdversarialGrid(grid, _attack(cfg), f, rule, cfg.seed)
    data = federation(overrides)
    rates = scheduled(cfg, data, untrained(overrides), rule)
    strategy = SafeDSHB(
        rule,
        cfg.num_malicious_nodes,
        server_learning_rate=rates.learning_rate,
        momentum=rates.momentum,
        output=cfg.output,
        min_available_nodes=cfg.num_nodes,
        node_timeout=cfg.engine.get("node_timeout", 600),
        authenticated_nodes=cfg.engine.get("authenticated_nodes", False),
        seed=cfg.seed,
        checkpoint=cfg.checkpoint,
        checkpoint_every=cfg.checkpoint_every,
    )
    # In process the clients load weights into the same model.
    model = copy.deepcopy(untrained(overrides))
    initial = ArrayRecord(model.state_dict())

    def evaluate_fn(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        if server_round % cfg.evaluate_every and server_round != cfg.steps:
            return None
        model.load_state_dict(arrays.to_torch_state_dict())
        # Nobody in a real federation sees the training loss; a simulation does.
        loss = training_loss(model, data.training, data.sizes, cfg.weight_decay)
        return MetricRecord({**evaluate(model, data.test), "training-loss": loss})

    strategy.start(grid, initial, cfg.steps, evaluate_fn=evaluate_fn)


def make_client(overrides: str, context: Context) -> SafeDSHBClient:
    """Return the client of a node, which holds one part of the data.

    It is the file ``data`` of the node's config, or else part ``partition-id`` of the
    experiment's data.
    """
    # Sums depend on the number of threads, and engines on equal sums.
    if torch.get_num_threads() != 1:  # to set it costs the next operations dearly
        torch.set_num_threads(1)
    config = context.node_config
    if "data" in config:
        mine = own_share(overrides, str(config["data"]))
    else:
        mine = share(overrides, int(config["partition-id"]))
    return SafeDSHBClient(
        mine.model,
        classification_loss,
        mine.examples,
        mine.plan,
        context,
        weight_decay=mine.weight_decay,
        max_epsilon=mine.max_epsilon,
        delta=mine.delta,
        randomness=mine.randomness,
        node_keys=("data",),
    )


def _attacked(cfg: DictConfig) -> bool:
    return "_target_" in cfg.attack


def _attack(cfg: DictConfig) -> Attack:
    return cast(Attack, instantiate(cfg.attack))


def _overrides(given: str | None, context: Context) -> str:
    """Return what this process was given, or else what the run's message says."""
    return plain(str(context.run_config[OVERRIDES])) if given is None else given


server_app = make_server_app()
client_app = make_client_app()
