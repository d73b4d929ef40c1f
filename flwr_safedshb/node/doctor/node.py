"""The node: its config, its ledger, its client, and the run that it would join."""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from flwr.app import UserConfig, UserConfigValue

from flwr_safedshb.algorithm.budget import LEDGER_NAME, NODE_KEYS, LedgerBudget
from flwr_safedshb.algorithm.refusal import RefusedError
from flwr_safedshb.client import ClientFn, SafeDSHBClient
from flwr_safedshb.node.approvals import KEY, Approvals
from flwr_safedshb.node.doctor.app import make_client
from flwr_safedshb.node.doctor.check import Check
from flwr_safedshb.node.doctor.link import check_key
from flwr_safedshb.node.doctor.machine import (
    check_clock,
    check_entropy,
    check_state_dir,
    check_versions,
)
from flwr_safedshb.node.node_file import NodeFile
from flwr_safedshb.privacy import bad_examples as unusable
from flwr_safedshb.privacy.ledger import database
from flwr_safedshb.privacy.ledger.ledger import Ledger, LedgerError
from flwr_safedshb.privacy.ledger.snapshot import open_copy
from flwr_safedshb.privacy.policy import NodePolicy
from flwr_safedshb.privacy.private_gradient import private_gradient

# Words about examples that cannot be used.
_TOLD = 3
_RULES = {name.replace("_", "-") for name in NodePolicy.__dataclass_fields__}


def examine(
    node_config: UserConfig,
    client_fn: ClientFn,
    run_config: Mapping[str, UserConfigValue],
    steps: int | None = None,
) -> Iterator[Check]:
    """Check a node, and whether it would take part in a run.

    Parameters
    ----------
    node_config : mapping
        Of the node.
    client_fn : callable
        Makes its client.
    run_config : mapping
        Of the run.
    steps : int, optional
        T, how many steps the run would take.
    """
    yield from check_versions()
    yield check_entropy()
    with tempfile.TemporaryDirectory(prefix="safedshb-") as folder:
        aside = Path(folder)
        newest = None
        if "state-dir" in node_config:
            state_dir = Path(str(node_config["state-dir"]))
            yield from check_state_dir(state_dir, LEDGER_NAME)
            found, newest = _check_ledger(state_dir / LEDGER_NAME, aside)
            yield found
        yield check_clock(newest)
        # The client finds a copy of the ledger, or makes one that nobody sees.
        config = {**node_config, "state-dir": folder}
        if "state-dir" not in node_config:
            del config["state-dir"]
        yield from _check_client(client_fn, config, run_config, steps)


def examine_node(node: NodeFile) -> Iterator[Check]:
    """Check a node by itself, before it knows of any run."""
    yield from check_versions()
    yield check_entropy()
    try:
        known = [*NODE_KEYS, *node.config] if "data" in node.config else NODE_KEYS
        policy = NodePolicy.from_config(node.config, {*known} - _RULES)
        Approvals.of(node.config.get(KEY))
        told = {k: v for k, v in vars(policy).items() if v not in (None, False)}
        rules = ", ".join(f"{k.replace('_', '-')}={v}" for k, v in told.items())
        yield Check("policy", "ok", rules or "no rule")
    except ValueError as error:
        yield Check("policy", "failed", str(error))
    if "state-dir" not in node.config:
        yield Check("ledger", "failed", "state-dir is not set: no budget can be kept")
    else:
        with tempfile.TemporaryDirectory(prefix="safedshb-") as folder:
            state_dir = Path(str(node.config["state-dir"]))
            yield from check_state_dir(state_dir, LEDGER_NAME)
            yield _check_ledger(state_dir / LEDGER_NAME, Path(folder))[0]
    if node.connection is not None:
        yield check_key(node.connection.key)


def _check_ledger(path: Path, aside: Path) -> tuple[Check, str | None]:
    """Read the ledger, leave a copy `aside`, and return when it was last charged."""
    if not path.exists():
        return Check("ledger", "ok", "none yet; the first step makes it"), None
    copy = aside / LEDGER_NAME
    try:
        with open_copy(path, copy) as ledger:
            charges = ledger.charges()
            spent, limit = ledger.statement(), ledger.max_epsilon
    except LedgerError as error:
        copy.unlink(missing_ok=True)  # what comes next is looked at without it
        return Check("ledger", "failed", str(error)), None
    finding = (
        f"epsilon = {spent.epsilon:.4g} of {limit:g} is spent at "
        f"delta = {ledger.delta:g} ({ledger.unit}), in "
        f"{len({charge.run for charge in charges})} runs"
    )
    newest = charges[-1].time if charges else None
    return Check("ledger", "ok" if spent.epsilon < limit else "failed", finding), newest


def _check_client(
    client_fn: ClientFn,
    node_config: UserConfig,
    run_config: Mapping[str, UserConfigValue],
    steps: int | None,
) -> Iterator[Check]:
    with _heard() as words:
        try:
            client = make_client(client_fn, node_config, run_config)
        except RefusedError as refusal:
            yield Check("policy", "failed", "; ".join([str(refusal), *words]))
            return
        except Exception as error:
            yield Check("data and model", "failed", f"{type(error).__name__}: {error}")
            return
    plan = client.plan
    yield Check(
        "policy",
        "ok" if client.randomness.private else "warning",
        f"admits clip {plan.clip_norm:g}, noise multiplier {plan.noise_multiplier:g}, "
        f"{plan.batch_size} of {plan.num_examples} examples ({plan.sampling}, "
        f"{plan.adjacency}), noise "
        + ("that nobody can repeat" if client.randomness.private else "FROM A SEED"),
    )
    yield _check_step(client)
    if isinstance(client.budget, LedgerBudget):
        yield _check_budget(client, client.budget.ledger, steps)


def _check_step(client: SafeDSHBClient) -> Check:
    """Compute a private gradient, and throw it away."""
    name = "data and model"
    start = time.perf_counter()
    # Here the data's owner is told what no server is.
    with _heard(unusable.__name__, logging.WARNING) as words, unusable.log_causes():
        try:
            layers = private_gradient(
                client.source.gradients,
                client.dataset,
                client.plan,
                client.randomness.for_step(0, 0),
                client.source.weight_decay,
            )
        except Exception as error:
            return Check(name, "failed", f"{type(error).__name__}: {error}")
    seconds = time.perf_counter() - start
    size = sum(layer.size for layer in layers)
    found = f"a step of {size} parameters takes {seconds:.2g} s on this machine"
    told = "; ".join([found, *dict.fromkeys(words)][: _TOLD + 1])
    return Check(name, "warning" if words else "ok", told)


def _check_budget(client: SafeDSHBClient, ledger: Ledger, steps: int | None) -> Check:
    """Say how much of the run the budget allows, beside what is spent."""
    left = ledger.steps_left(client.plan)
    bound = f"within epsilon = {ledger.max_epsilon:g} at delta = {ledger.delta:g}"
    if steps is None:
        finding = f"{left} steps of this run fit {bound}"
        return Check("budget", "ok" if left else "failed", finding)
    if steps > left:
        return Check(
            "budget", "failed", f"{left} of the run's {steps} steps fit {bound}"
        )
    # On the copy, or on a ledger that nobody sees.
    ledger.commit([(client.plan, steps)], "doctor")
    ledger.charge(client.plan, steps, "doctor")
    after = ledger.epsilon()
    return Check(
        "budget", "ok", f"the run's {steps} steps fit {bound}: {after:.4g} after it"
    )


@contextmanager
def _heard(logger: str = "flwr", level: int = logging.ERROR) -> Iterator[list[str]]:
    """Collect what a client logs here and keeps from the server."""
    words: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            words.append(record.getMessage())

    listener = Listener(level)
    logging.getLogger(logger).addHandler(listener)
    # It tells of new ledgers, and the one made here is nobody's.
    makers = logging.getLogger(database.__name__)
    makers.disabled = True
    try:
        yield words
    finally:
        makers.disabled = False
        logging.getLogger(logger).removeHandler(listener)
