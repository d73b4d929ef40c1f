"""The ServerApp and ClientApp of an experiment: the same two on every engine.

Both sides compose the configuration from one string of Hydra overrides, which is all
that Flower has to carry: ``hydra-overrides`` in the run config, or an argument where an
engine cannot carry a run config.
"""

from __future__ import annotations

import copy
import math
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from omegaconf import DictConfig

from flwr_safedshb.algorithm.privacy_card import PrivacyCard, privacy_card
from flwr_safedshb.algorithm.progress import RunResult
from flwr_safedshb.app import client_app as private_client_app
from flwr_safedshb.client import SafeDSHBClient
from flwr_safedshb.simulation.adversarial import AdversarialGrid
from flwr_safedshb.simulation.batched import BatchedGrid
from simulations.adversaries import inform_attack
from simulations.attacks import Worst
from simulations.check import check
from simulations.config import compose_config
from simulations.experiment import (
    build_untrained,
    is_attacked,
    load_federation,
    make_attack,
    make_own_share,
    make_share,
    make_strategy,
)
from simulations.models import evaluate_model, training_loss
from simulations.overrides import check_plain
from simulations.plans import make_plans, state_privacy

OVERRIDES = "hydra-overrides"


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
    check(overrides)
    cfg, data = compose_config(overrides), load_federation(overrides)
    result = train(overrides, grid)
    if result.card is not None and cfg.checkpoint is not None:
        card = add_plan(result.card, cfg, data.sizes)
        card.write(Path(cfg.checkpoint).with_suffix(".privacy"))


def rehearse(overrides: str, attack: Worst) -> str:
    """Run an experiment with each attack; return its overrides with the worst one."""
    cfg, losses = compose_config(overrides), dict[str, float]()
    other = {"seed": cfg.seed + attack.seed, "engine": "batched", "checkpoint": "null"}
    for name in attack.attacks:
        text = _replace(overrides, attack=name, **other)
        grid = BatchedGrid(make_client_app(text), cfg.num_nodes, seed=cfg.seed)
        model, data = copy.deepcopy(build_untrained(text)), load_federation(text)
        model.load_state_dict(train(text, grid).arrays.to_torch_state_dict())
        loss = training_loss(model, data.training, data.sizes, cfg.weight_decay)
        losses[name] = loss if math.isfinite(loss) else math.inf
    chosen = max(losses, key=lambda name: losses[name])
    said = ", ".join(f"{name} {loss:.4g}" for name, loss in losses.items())
    print(f"attack=worst is {chosen}; losses in the rehearsal: {said}")
    return _replace(overrides, attack=chosen)


def _replace(overrides: str, **values: object) -> str:
    """Return overrides with other values, and without settings below these names."""
    below = re.compile(rf"[+~]*({'|'.join(values)})[.=@]")
    kept = [one for one in shlex.split(overrides) if not below.match(one)]
    return shlex.join([*kept, *(f"{name}={value}" for name, value in values.items())])


def train(overrides: str, grid: Grid) -> RunResult:
    """Train on the nodes of the grid, under the attack of the experiment if any."""
    cfg, data = compose_config(overrides), load_federation(overrides)
    strategy = make_strategy(overrides)
    if is_attacked(cfg):
        f, rule = cfg.num_malicious_nodes, strategy.settings.aggregation
        if isinstance(attack := make_attack(cfg), Worst):
            overrides = rehearse(overrides, attack)
        attack, known = inform_attack(overrides, strategy)
        grid = AdversarialGrid(grid, attack, f, rule, cfg.seed, known)
    model = copy.deepcopy(build_untrained(overrides))
    initial = ArrayRecord(model.state_dict())
    rounds = cfg.steps // cfg.local_steps

    def evaluate_fn(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        done, before = (k * cfg.local_steps for k in (server_round, server_round - 1))
        due = done // cfg.evaluate_every > before // cfg.evaluate_every
        if not due and server_round != rounds:
            return None
        model.load_state_dict(arrays.to_torch_state_dict())
        # Nobody in a real federation sees the training loss; a simulation does.
        loss = training_loss(model, data.training, data.sizes, cfg.weight_decay)
        return MetricRecord({**evaluate_model(model, data.test), "training-loss": loss})

    return strategy.start(grid, initial, rounds, evaluate_fn=evaluate_fn)


def add_plan(card: PrivacyCard, cfg: DictConfig, sizes: Sequence[int]) -> PrivacyCard:
    """Add to the card what only the experiment knows: its plans and its noise."""
    plans = make_plans(cfg, min(sizes))
    note: tuple[str, ...] = ()
    if min(sizes) < max(sizes):
        note = ("The plan is that of the node with the fewest examples.",)
    return privacy_card(
        card,
        plans.training,
        state_privacy(plans.charges, cfg.privacy.delta),
        noise="seeded" if cfg.engine.seeded_noise else "secure",
        not_covered=note,
    )


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
        mine = make_own_share(overrides, str(config["data"]))
    else:
        mine = make_share(overrides, int(config["partition-id"]))
    return SafeDSHBClient(
        mine.model,
        mine.loss,
        mine.examples,
        mine.plan,
        context,
        weight_decay=mine.weight_decay,
        max_epsilon=mine.max_epsilon,
        delta=mine.delta,
        randomness=mine.randomness,
        node_keys=("data",),
        evaluation=mine.evaluation,
    )


def _overrides(given: str | None, context: Context) -> str:
    """Return what this process was given, or else what the run's message says."""
    return check_plain(str(context.run_config[OVERRIDES])) if given is None else given


server_app = make_server_app()
client_app = make_client_app()
