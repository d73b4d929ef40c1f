"""The node: its config, its ledger, its client, and the run it would join."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from flwr.app import UserConfig, UserConfigValue

from flwr_safedshb.algorithm.admission import NODE_KEYS, open_node_ledger
from flwr_safedshb.algorithm.budget import LEDGER_NAME, LedgerBudget, RunTerms
from flwr_safedshb.algorithm.expectation import make_load
from flwr_safedshb.algorithm.refusal import RefusedError
from flwr_safedshb.app import ClientFn
from flwr_safedshb.client import SafeDSHBClient
from flwr_safedshb.node.approvals import KEY, Approvals
from flwr_safedshb.node.doctor.app import make_client
from flwr_safedshb.node.doctor.machine import (
    CheckResult,
    check_clock,
    check_entropy,
    check_key,
    check_link,
    check_state_dir,
    check_versions,
)
from flwr_safedshb.node.node_file import NodeFile
from flwr_safedshb.privacy import bad_examples
from flwr_safedshb.privacy.inspection import inspect_examples
from flwr_safedshb.privacy.ledger import database
from flwr_safedshb.privacy.ledger.ledger import Ledger, LedgerError
from flwr_safedshb.privacy.ledger.snapshot import open_copy
from flwr_safedshb.privacy.plan import describe_unit
from flwr_safedshb.privacy.policy import NodePolicy, get_rule_names
from flwr_safedshb.privacy.private_gradient import private_gradient

# Warnings about examples that cannot be used.
_MAX_WARNINGS = 3
_RULES = get_rule_names()
# The rules that a ledger is made with.
_LIMITS = ("max-epsilon", "delta", "unit")


def check_node_for_run(
    node_config: UserConfig,
    client_fn: ClientFn,
    run_config: Mapping[str, UserConfigValue],
    steps: int | None = None,
) -> Iterator[CheckResult]:
    """Check a node, and whether it would take part in a run of so many steps (T)."""
    yield from check_versions()
    yield check_entropy()
    with tempfile.TemporaryDirectory(prefix="safedshb-") as folder:
        newest = None
        if "state-dir" in node_config:
            state_dir = Path(str(node_config["state-dir"]))
            yield from check_state_dir(state_dir, LEDGER_NAME)
            result, newest = _check_ledger(state_dir / LEDGER_NAME, Path(folder))
            yield result
        yield check_clock(newest)
        config = dict(node_config)
        if "state-dir" in node_config:  # a copy of the ledger, or one that nobody sees
            config["state-dir"] = folder
        yield from _check_client(client_fn, config, run_config, steps)


def check_node(node: NodeFile, does_connect: bool) -> Iterator[CheckResult]:
    """Check a node by itself, before it knows of any run.

    The rules are read and the ledger is opened by what every message is admitted by.

    Parameters
    ----------
    node : NodeFile
    does_connect : bool
        Whether to try the way to the federation, too. A node that serves waits for it.
    """
    yield from check_versions()
    yield check_entropy()
    yield from check_rules(node.config)
    newest = None
    if "state-dir" not in node.config:
        yield CheckResult(
            "ledger", "failed", "state-dir is not set: no budget can be kept"
        )
    else:
        with tempfile.TemporaryDirectory(prefix="safedshb-") as folder:
            state_dir = Path(str(node.config["state-dir"]))
            yield from check_state_dir(state_dir, LEDGER_NAME)
            result, newest = _check_ledger(state_dir / LEDGER_NAME, Path(folder))
            yield result
            if result.verdict == "ok":
                yield from _check_limits(node.config, folder)
    yield check_clock(newest)
    if does_connect:
        yield from check_connection(node)
    elif node.connection is not None:
        yield check_key(node.connection.key)


def check_rules(config: UserConfig) -> Iterator[CheckResult]:
    """Check the policy and the approvals in a node's config."""
    others = sorted({*config} - {*NODE_KEYS, *_RULES})
    misspelt = [key for key in others if get_close_matches(key, _RULES, 1, 0.75)]
    try:
        policy = NodePolicy.from_config(
            config, {*NODE_KEYS, *others}.difference(misspelt)
        )
        rules = ", ".join(
            f"{key.replace('_', '-')}={value}"
            for key, value in vars(policy).items()
            if value not in (None, False)
        )
        yield CheckResult("policy", "ok", rules or "no rule")
    except ValueError as error:
        yield CheckResult("policy", "failed", str(error))
    if foreign := [key for key in others if key not in ("data", *misspelt)]:
        finding = (
            f"{', '.join(foreign)}: no rule; unless the app names it in node_keys, "
            "every step is refused"
        )
        yield CheckResult("keys of the app", "warning", finding)
    data = config.get("data")
    if isinstance(data, str) and os.sep in data:
        readable = os.access(data, os.R_OK)
        finding = data if readable else f"{data} is not there, or may not be read"
        yield CheckResult("data", "ok" if readable else "failed", finding)
    try:
        hashes = Approvals.parse(config.get(KEY)).hashes
        if hashes is not None:
            verdict: Literal["ok", "failed"] = "ok" if hashes else "failed"
            finding = f"{len(hashes)} apps may run"
            yield CheckResult(KEY, verdict, finding)
    except ValueError as error:
        yield CheckResult(KEY, "failed", str(error))


def check_approval(config: UserConfig, bundle_hash: str) -> CheckResult:
    """Check whether a node runs the app with this hash."""
    reason = Approvals.parse(config.get(KEY)).find_refusal(bundle_hash)
    return CheckResult(
        KEY, "failed" if reason else "ok", reason or f"runs {bundle_hash}"
    )


def check_connection(node: NodeFile) -> Iterator[CheckResult]:
    """Check a node's key and its way to the federation."""
    if node.connection is not None:
        yield check_key(node.connection.key)
        yield from check_link(
            node.connection.superlink, node.connection.root_certificates
        )


def _check_limits(config: UserConfig, folder: str) -> Iterator[CheckResult]:
    """Open a copy of the ledger, or a new one, with the limits in the config."""
    limits = {key: config[key] for key in _LIMITS if key in config}
    try:
        policy = NodePolicy.from_config(limits)
    except ValueError:
        return  # `check_rules` has said so
    if not limits and not (Path(folder) / LEDGER_NAME).exists():
        return  # the first run says which
    with _collect_logs() as lines:
        try:
            open_node_ledger(folder, policy, RunTerms()).close()
        except RefusedError as refusal:
            finding = "; ".join([str(refusal), *lines])
            yield CheckResult("limits of the ledger", "failed", finding)


def _check_ledger(path: Path, folder: Path) -> tuple[CheckResult, str | None]:
    """Check a copy of the ledger in a folder; also return when it was last charged."""
    if not path.exists():
        return CheckResult("ledger", "ok", "none yet; the first step makes it"), None
    copy = folder / LEDGER_NAME
    try:
        with open_copy(path, copy) as ledger:
            charges = ledger.charges()
            spent, limit = ledger.statement(), ledger.max_epsilon
    except LedgerError as error:
        copy.unlink(missing_ok=True)  # the next checks do without it
        return CheckResult("ledger", "failed", str(error)), None
    finding = (
        f"epsilon = {spent.epsilon:.4g} of {limit:g} is spent at "
        f"delta = {ledger.delta:g} for {describe_unit(spent.unit)} ({ledger.unit}), in "
        f"{len({charge.run for charge in charges})} runs"
    )
    newest = charges[-1].time if charges else None
    return CheckResult(
        "ledger", "ok" if spent.epsilon < limit else "failed", finding
    ), newest


def _check_client(
    client_fn: ClientFn,
    node_config: UserConfig,
    run_config: Mapping[str, UserConfigValue],
    steps: int | None,
) -> Iterator[CheckResult]:
    with _collect_logs() as lines:
        try:
            client = make_client(client_fn, node_config, run_config)
        except RefusedError as refusal:
            yield CheckResult("policy", "failed", "; ".join([str(refusal), *lines]))
            return
        except Exception as error:
            yield CheckResult(
                "data and model", "failed", f"{type(error).__name__}: {error}"
            )
            return
    plan = client.plan
    yield CheckResult(
        "policy",
        "ok" if client.randomness.private else "warning",
        f"admits clip {plan.clip_norm:g}, noise multiplier {plan.noise_multiplier:g}, "
        f"{plan.batch_size} of {plan.num_examples} {plan.unit}s ({plan.sampling}, "
        f"{plan.adjacency}), noise "
        + ("that nobody can repeat" if client.randomness.private else "FROM A SEED"),
    )
    step = _check_step(client)
    yield step
    if step.verdict != "failed":
        yield _check_examples(client)
    if steps is None and client.target is not None:
        steps = client.target.steps
    if steps is not None:
        yield _check_noise(client, steps)
    if isinstance(client.budget, LedgerBudget):
        yield _check_budget(client, client.budget.ledger, steps)


def _check_step(client: SafeDSHBClient) -> CheckResult:
    """Compute a private gradient, and throw it away."""
    name = "data and model"
    start = time.perf_counter()
    # The owner of the data is told here what no server is told.
    with (
        _collect_logs(bad_examples.__name__, logging.WARNING) as lines,
        bad_examples.log_causes(),
    ):
        try:
            layers = private_gradient(
                client.source.gradients,
                client.dataset,
                client.plan,
                client.randomness.for_step(0, 0),
                client.source.weight_decay,
            )
        except Exception as error:
            return CheckResult(name, "failed", f"{type(error).__name__}: {error}")
    seconds = time.perf_counter() - start
    size = sum(layer.size for layer in layers)
    speed = f"a step of {size} parameters takes {seconds:.2g} s on this machine"
    finding = "; ".join([speed, *dict.fromkeys(lines)][: _MAX_WARNINGS + 1])
    return CheckResult(name, "warning" if lines else "ok", finding)


def _check_examples(client: SafeDSHBClient) -> CheckResult:
    """Count the examples that cannot be used, which only their owner is told."""
    name = "examples"
    try:
        found = inspect_examples(client.source.gradients, client.dataset)
    except Exception as error:
        return CheckResult(name, "failed", f"{type(error).__name__}: {error}")
    if found.is_hopeless:
        return CheckResult(name, "failed", str(found))
    finding = str(found) or f"all {found.seen:,} can be used"
    return CheckResult(name, "warning" if found.causes else "ok", finding)


def _check_noise(client: SafeDSHBClient, steps: int) -> CheckResult:
    """Say how many nodes like this one a training needs against its noise."""
    size = client.source.gradients.size
    found = make_load(client.plan, steps, size, 1)
    most, enough = found.find_nodes(1.0), found.find_nodes()
    finding = (
        f"for {size:,} weights and {steps} steps: most trainings learn with {enough:,} "
        f"or more honest nodes like this one, and none with fewer than {most:,}"
    )
    return CheckResult("noise", "warning" if most > 1 else "ok", finding)


def _check_budget(
    client: SafeDSHBClient, ledger: Ledger, steps: int | None
) -> CheckResult:
    """Check how much of the run the budget allows, beside what is spent."""
    left = ledger.steps_left(client.plan)
    bound = f"within epsilon = {ledger.max_epsilon:g} at delta = {ledger.delta:g}"
    if steps is None:
        finding = f"{left} steps of this run fit {bound}"
        return CheckResult("budget", "ok" if left else "failed", finding)
    if steps > left:
        return CheckResult(
            "budget", "failed", f"{left} of the run's {steps} steps fit {bound}"
        )
    # On the copy, or on a ledger that nobody sees.
    ledger.commit([(client.plan, steps)], "doctor")
    ledger.charge(client.plan, steps, "doctor")
    after = ledger.epsilon()
    return CheckResult(
        "budget", "ok", f"the run's {steps} steps fit {bound}: {after:.4g} after it"
    )


@contextmanager
def _collect_logs(
    logger: str = "flwr", level: int = logging.ERROR
) -> Iterator[list[str]]:
    """Collect what a client logs here and keeps from the server."""
    lines: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    collector = Collector(level)
    logging.getLogger(logger).addHandler(collector)
    # It reports new ledgers, and the one made here is nobody's.
    ledger_logger = logging.getLogger(database.__name__)
    ledger_logger.disabled = True
    try:
        yield lines
    finally:
        ledger_logger.disabled = False
        logging.getLogger(logger).removeHandler(collector)
