"""What must hold after any fault; each check returns what does not."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Collection
from functools import cache
from pathlib import Path

import numpy as np

from flwr_safedshb.algorithm.budget import LEDGER_NAME
from flwr_safedshb.algorithm.refusal import RefusedError
from flwr_safedshb.algorithm.wire import MOMENTUM_TAG
from flwr_safedshb.privacy.ledger.ledger import Ledger
from simulations.chaos.problem import (
    DELTA,
    EXAMPLES,
    HONEST,
    HOSTILE,
    MAX_EPSILON,
    PLAN,
    compute_momentum,
    find_optimum,
)
from simulations.chaos.tolerance import Tolerance
from simulations.chaos.trace import Received
from simulations.chaos.trial import WHOLE, FaultTrial

# All that is said of an error: fixed words of nodes, of the gate, and of Flower.
_REASONS = (
    re.escape(f"{RefusedError}:<'the privacy ledger of this node cannot be used'>"),
    r"Error: Node Unavailable .*",
    r"the node was started again, and its message is lost",
)
# What only a node's own log may say: where its ledger is, and what is wrong with it.
_CANARIES = (LEDGER_NAME, "disk is full", "a charge was changed")
_ANSI = re.compile(r"\x1b\[\d+m")


def check_all(
    trial: FaultTrial, tolerance: Tolerance, died_charged: Collection[int] = ()
) -> list[str]:
    """Return all that does not hold of an ended trial, whatever its faults."""
    problems = [
        *check_ended(trial),
        *check_charges(trial, died_charged),
        *check_leaks(trial),
        *check_hostile_node(trial),
    ]
    if not (off := measure_distance(trial)) <= tolerance.limit:
        problems.append(f"the model is {off:.3f} off, and without a fault {tolerance}")
    return problems


@cache
def epsilon_of(steps: int) -> float:
    """Return the epsilon of so many steps."""
    return PLAN.epsilon(steps, DELTA) if steps else 0.0


@cache
def stated_epsilon(committed: int, charged: int) -> float:
    """Return what a ledger states of a run that was committed and charged so."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Ledger(Path(folder) / LEDGER_NAME, MAX_EPSILON, DELTA) as ledger,
    ):
        ledger.commit([(PLAN, committed)], "run")
        if charged:
            ledger.charge(PLAN, charged, "run")
        return ledger.epsilon("run")


def check_ended(trial: FaultTrial) -> list[str]:
    """Check that the run has done all its steps and skipped none."""
    progress = trial.load_progress()
    if progress is None or progress.step != trial.steps:
        return [f"the run stopped after {progress and progress.step} steps"]
    skipped = [number for number, m in progress.train.items() if m["skipped"]]
    return [f"rounds {skipped} were skipped"] if skipped else []


def check_charges(trial: FaultTrial, died_charged: Collection[int] = ()) -> list[str]:
    """Check that ledgers hold no fewer steps than left the nodes, by both traces.

    Those that died after a charge must hold that one, too: no other is to hide in it.
    """
    problems = []
    for node in HONEST:
        charged, computed = trial.count_charges(node), len(trial.list_released(node))
        replies = [r for r in trial.read_replies(node) if r[1].error is None]
        # To a step that is asked for again a node sends the same reply, charged once.
        asked = {reply.to for _, reply in replies}
        different = {(step, str(reply.arrays)) for step, reply in replies}
        received = len(replies) - max(len(asked) - len(different), 0)
        left = max(computed, received) + (node in died_charged)
        if charged < left or not received:
            problems.append(
                f"node {node} has charged {charged} steps, computed {computed} "
                f"messages and delivered {received}"
            )
        with Ledger(trial.federation.state_dir(node) / LEDGER_NAME) as ledger:
            total = ledger.epsilon()
        if total < epsilon_of(left):
            problems.append(f"node {node}'s ledger says {total} for {left} steps")
    return problems


def check_leaks(trial: FaultTrial) -> list[str]:
    """Check that replies are private momentums or fixed words, and logs know no more.

    A momentum is private if it is, to rounding, what Algorithm 1 computes from the
    noise of the steps that the node took.
    """
    problems = []
    models = trial.read_models()
    for node in HONEST:
        taken = trial.list_released(node)
        for step, reply in trial.read_replies(node):
            name = f"node {node}'s reply in step {step}"
            if reply.error is not None:
                if not any(re.fullmatch(reason, reply.error) for reason in _REASONS):
                    problems.append(f"{name} says {reply.error!r}")
                continue
            before = sorted({number for number in taken if number <= step})
            expected = compute_momentum(node, before, models, trial.seed)
            steps = range(len(before), trial.count_charges(node) + 1)
            epsilons = {stated_epsilon(trial.steps, n) for n in steps}
            odd = _inspect_reply(reply, expected, epsilons)
            problems += [f"{name} {problem}" for problem in odd]
    superlink = trial.federation.log("superlink", WHOLE)
    for name, text in {"server": trial.read_log(), "superlink": superlink}.items():
        told = [canary for canary in _CANARIES if canary in text]
        problems += [f"the log of the {name} says {canary!r}" for canary in told]
    return problems


def _inspect_reply(
    reply: Received, expected: np.ndarray, epsilons: Collection[float]
) -> list[str]:
    """Return what a reply should not hold of a node that may state these epsilons."""
    problems = []
    if reply.records != ["arrays", "metrics"]:
        problems.append(f"holds {reply.records}")
    # All that is told must follow from the plan and the number of steps.
    told = reply.metrics.get("metrics")
    if not isinstance(told, dict):
        told = {}
    public = {"num-examples": EXAMPLES, MOMENTUM_TAG: told.get(MOMENTUM_TAG)}
    if "epsilon" in told:  # in the last round
        allowed = told["epsilon"] if told["epsilon"] in epsilons else None
        public |= {"epsilon": allowed, "delta": DELTA}
    if told != public:
        problems.append(f"reports {reply.metrics}")
    if list(reply.arrays) != ["arrays/weight"]:
        problems.append(f"has the arrays {list(reply.arrays)}")
    elif not np.allclose(reply.arrays["arrays/weight"], expected, atol=1e-5):
        problems.append("is not the momentum of its noisy gradients")
    return problems


def check_hostile_node(trial: FaultTrial) -> list[str]:
    """Check that no round used what the hostile node sent."""
    progress = trial.load_progress()
    mine = trial.federation.node_ids[HOSTILE]
    problems = []
    for number, metrics in progress.train.items() if progress else []:
        if metrics["skipped"]:
            continue  # nobody had a part in it
        left_out = metrics.get("left-out", [])
        excluded = {"excluded-not-finite", "excluded-wrong-shape"} & set(metrics)
        if not excluded and not (isinstance(left_out, list) and mine in left_out):
            problems.append(f"round {number} used the hostile node's vector")
    return problems


def measure_distance(trial: FaultTrial) -> float:
    """Return how far the final model is from the honest nodes' optimum."""
    return float(np.linalg.norm(trial.load_model() - find_optimum(trial.seed)))


def find_line(trial: FaultTrial, log: str, line: str, node: int) -> str | None:
    """Return the first line of a log that tells of a fault, with names for ids."""
    text = trial.read_log() if log == "server" else trial.federation.log(log, WHOLE)
    ids = trial.federation.node_ids
    pattern = re.compile(line.replace("{node}", str(ids[node])))
    lines = (_ANSI.sub("", found).strip() for found in text.splitlines())
    told = next((found for found in lines if pattern.search(found)), None)
    if told is None:
        return None
    for index, number in ids.items():
        told = told.replace(str(number), f"<node {index}>")
    return told.replace(str(trial.folder), "<folder>")
