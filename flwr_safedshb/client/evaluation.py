"""A client that tells what a model is worth on its data, within the privacy guarantee.

Each answer is charged to the node's ledger before the data are touched, beside the
steps of training and in the same accountant. Examples that are held out of training pay
for evaluations alone, and the others for training alone: which are which is decided by
their places, and a digest of the data in the node's order stands in every charge. Data
that have changed have another digest, and then each example pays for both.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from flwr.app import ConfigRecord, Context
from torch.utils.data import Dataset, Subset

from flwr_safedshb.client.node import RefusedError, keep_to_budget
from flwr_safedshb.client.step import check_shapes, load
from flwr_safedshb.exchange import evaluations as names
from flwr_safedshb.exchange.arrays import Arrays
from flwr_safedshb.privacy.accounting import limits
from flwr_safedshb.privacy.evaluation import (
    Counts,
    Question,
    Right,
    is_right,
    private_counts,
)
from flwr_safedshb.privacy.examples import Data, rows, tensors_of
from flwr_safedshb.privacy.gaussian import prepare, whole_tensors
from flwr_safedshb.privacy.ledger.ledger import Ledger, LedgerError
from flwr_safedshb.privacy.plan import PrivacyPlan
from flwr_safedshb.words import PLAIN

if TYPE_CHECKING:
    from flwr_safedshb.client.client import SafeDSHBClient

Metrics = dict[str, int | float | list[int] | list[float]]

# Which examples are held out: the same for the same number, whatever the data are.
_SPLIT_SEED = 20231118
_KEY_NAME = "safedshb.key"
_KEY_BYTES = 32
_STATE = "safedshb-evaluations"
# Seeded noise of evaluations is that of steps which no run takes.
_STEP_OF_NOISE = 2**40
_MAX_CLASSES = 10_000


@dataclass(frozen=True)
class PrivateEvaluation:
    """Whether and how a client evaluates models on its data.

    Attributes
    ----------
    noise_multiplier : float
        Noise of an answer, in units of what one example can change in it.
    held_out : int
        How many examples of the dataset are held out of training, and evaluated alone.
        With 0 all train, all are evaluated, and each pays for both.
    num_classes : int, optional
        Of the task; without it no answer is by class.
    right : callable (outputs, target) -> bool
        Whether the outputs for one example are right; by default, whether the largest
        is that of the target.
    """

    noise_multiplier: float
    held_out: int = 0
    num_classes: int | None = None
    right: Right = field(default=is_right)

    def __post_init__(self) -> None:
        noise = self.noise_multiplier
        limits.NOISE_MULTIPLIER.checked("noise_multiplier", noise)
        for name, least, most in (
            ("held_out", 0, limits.MAX_EXAMPLES),
            ("num_classes", 2, _MAX_CLASSES),
        ):
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool)
            if value is None and name == "num_classes":
                continue
            if not whole or not least <= value <= most:
                raise ValueError(
                    f"{name}={limits.short(value)} must be an integer from {least} to "
                    f"{most}"
                )

    def plan(self, num_examples: int) -> PrivacyPlan:
        """Return the plan of one answer about so many examples."""
        return PrivacyPlan(
            1.0, self.noise_multiplier, num_examples, num_examples, sampling="whole"
        )


@dataclass(frozen=True)
class Evaluator:
    """What a client evaluates models with: its settings, its data, and its plan."""

    settings: PrivateEvaluation
    dataset: Data
    plan: PrivacyPlan

    def released(self, context: Context) -> tuple[tuple[PrivacyPlan, int], ...]:
        """Return what a simulation without a ledger has answered so far."""
        record = context.state.get(_STATE)
        if not isinstance(record, ConfigRecord):
            return ()
        return ((self.plan, cast(int, record["count"])),)


def divided(dataset: Data, size: int, held_out: int) -> tuple[Data, Data]:
    """Return the examples that train, and those that evaluate."""
    if held_out >= size:
        raise ValueError(
            f"held_out={held_out} of {size} examples leaves none to train on; lower it"
        )
    order = np.random.default_rng(_SPLIT_SEED).permutation(size)
    aside, others = (np.sort(part) for part in np.split(order, [held_out]))
    return _some(dataset, others), _some(dataset, aside)


def _some(dataset: Data, which: np.ndarray) -> Data:
    tensors = whole_tensors(dataset)
    if tensors is None:
        return Subset(cast(Dataset[object], dataset), which.tolist())
    chosen = torch.from_numpy(which)
    return rows(tensors[0], chosen), rows(tensors[1], chosen)


def split_plans(
    plan: PrivacyPlan, evaluation: PrivacyPlan, data: Data, ledger: Ledger | None
) -> tuple[PrivacyPlan, PrivacyPlan]:
    """Return the plans of a node's two parts, under the digest of its data.

    Of data that are read one by one there is no digest: then each example pays for
    both.

    Parameters
    ----------
    plan, evaluation : PrivacyPlan
        For all examples.
    data : Data
        All of the node's, in its order.
    ledger : Ledger, optional
        None for a simulation.
    """
    tensors = whole_tensors(data)
    if tensors is None:
        return plan, evaluation
    digest = "0" * 16
    if ledger is not None:
        mark = hmac.new(_key(ledger.path.parent), digestmod=hashlib.sha256)
        about = [plan.num_examples, evaluation.num_examples, _SPLIT_SEED]
        mark.update(repr(about).encode())
        for tensor in tensors_of(*tensors):
            mark.update(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            mark.update(flat.view(torch.uint8).numpy().data)
        digest = mark.hexdigest()[:16]
    return (
        replace(plan, part=f"trained:{digest}"),
        replace(evaluation, part=f"held-out:{digest}"),
    )


def _key(folder: Path) -> bytes:
    """Return the node's key, made at the first call.

    Ledgers are shown to others, and a plain digest would tell whoever knows all
    examples but one which that is. With another key there is another digest, and
    each example pays for both parts.
    """
    path = folder / _KEY_NAME
    if not path.exists():
        with tempfile.NamedTemporaryFile(dir=folder) as file:  # for its owner alone
            file.write(os.urandom(_KEY_BYTES))
            file.flush()
            os.fsync(file.fileno())
            with suppress(FileExistsError):
                os.link(file.name, path)  # whole, and never in place of another
    key = path.read_bytes()
    if len(key) != _KEY_BYTES:
        raise LedgerError(f"the key {path} is damaged; remove it, at the cost of a sum")
    return key


def evaluate(
    client: SafeDSHBClient, parameters: Arrays, config: Mapping[str, object]
) -> Metrics:
    """Answer what a model is worth; charged first, and refused where it does not fit.

    Parameters
    ----------
    client : SafeDSHBClient
    parameters : list of arrays
        theta.
    config : mapping
        ``private-evaluation``, the number of the round, ``max-loss``, ``per-class`` and
        ``session``. Whatever they are, the answer is as private.
    """
    check_shapes(client, parameters)
    evaluator = client.evaluator
    if evaluator is None:
        raise RefusedError("this client does not evaluate models on its data")
    number, session, question = _asked(client, evaluator, config)
    prepare(client.gradients, evaluator.dataset)
    if client.ledger is not None:
        client.ledger.charge(evaluator.plan, 1, session)
    else:
        _count(client, evaluator)
    load(client.trained, parameters)
    node = int(client.context.node_config.get("partition-id", client.context.node_id))
    counts = private_counts(
        (client.model, client.loss),
        evaluator.dataset,
        evaluator.plan,
        client.randomness.for_step(node, _STEP_OF_NOISE + number),
        question,
        evaluator.settings.right,
    )
    return reported(counts, evaluator.plan.num_examples)


def _count(client: SafeDSHBClient, evaluator: Evaluator) -> None:
    """Keep a simulation without a ledger to its budget, evaluations included."""
    so_far = evaluator.released(client.context)
    count = so_far[0][1] if so_far else 0
    steps = _steps_of(client)
    others = ((client.plan, steps),) if steps else ()
    keep_to_budget(evaluator.plan, client.max_epsilon, client.delta, count, others)
    client.context.state[_STATE] = ConfigRecord({"count": count + 1})


def _steps_of(client: SafeDSHBClient) -> int:
    """Return how many steps a simulated client has taken, by the momentum it keeps."""
    record = client.context.state.get("safedshb")
    steps = record["steps"] if isinstance(record, ConfigRecord) else None
    return cast(list[int], steps)[0] + 1 if steps else 0


def _asked(
    client: SafeDSHBClient, evaluator: Evaluator, config: Mapping[str, object]
) -> tuple[int, str, Question]:
    """Return what a message asks for, or refuse it before anything is charged."""
    number, greatest = config.get(names.PRIVATE), config.get(names.MAX_LOSS)
    session = config.get("session", str(client.context.run_id))
    if (
        isinstance(number, bool)
        or not isinstance(number, int)
        or not 0 <= number < 2**40
    ):
        raise RefusedError(f"the message must have {names.PRIVATE}, a round's number")
    if not isinstance(session, str) or not PLAIN.fullmatch(session):
        raise RefusedError("the message's session must be a plain name")
    low, high = names.MIN_MAX_LOSS, names.MAX_MAX_LOSS
    if not isinstance(greatest, int | float) or not low <= greatest <= high:
        raise RefusedError(
            f"the message must have {names.MAX_LOSS}, from {low:g} to {high:g}"
        )
    classes = evaluator.settings.num_classes if config.get(names.PER_CLASS) else None
    if config.get(names.PER_CLASS) and classes is None:
        raise RefusedError("this client does not evaluate by class")
    return number, session, Question(float(greatest), classes)


def reported(counts: Counts, num_examples: int) -> Metrics:
    """Return the metrics of a reply: noisy sums, and what is public."""
    told: Metrics = {
        names.NUM_EXAMPLES: num_examples,
        names.CORRECT: counts.correct,
        names.LOSS: counts.loss,
        names.NOISE_STD: counts.noise_std,
    }
    if counts.classes is not None:
        by_class = zip(names.CLASS_SUMS, counts.classes.tolist(), strict=True)
        told.update(by_class)
    return told
