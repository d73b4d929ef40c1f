"""Safe-DSHB, a client's half: the only place where the private data are.

One message, one step of Algorithm 1: charge the privacy ledger, draw a batch, clip each
example's gradient, average, add noise, update the momentum, keep it, send it. Nothing
else that depends on the data leaves: no loss, no norm, no text of an exception.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping, Sized
from functools import lru_cache
from logging import ERROR
from typing import cast

from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.common import log
from torch import nn

from flwr_safedshb.client.node import RefusedError, admit
from flwr_safedshb.client.step import Step, take_step
from flwr_safedshb.exchange.arrays import MARK, Arrays, read, written
from flwr_safedshb.exchange.model import ModelArrays
from flwr_safedshb.flower.compat import Mod, objection, refilled
from flwr_safedshb.privacy.clipping.gradients import (
    ClippedGradients,
    Loss,
    UnsupportedModelError,
)
from flwr_safedshb.privacy.gaussian import Data
from flwr_safedshb.privacy.ledger.ledger import BudgetExhausted, LedgerError
from flwr_safedshb.privacy.plan import Clipping, PrivacyPlan
from flwr_safedshb.privacy.randomness.noise import Randomness, SecureRandomness
from flwr_safedshb.words import is_plain

__all__ = ["PrivateClientApp", "RefusedError", "SafeDSHBClient", "client_app"]

Scalar = bool | bytes | float | int | str

_METRICS = MetricRecord({"num-examples": 0})


class SafeDSHBClient(NumPyClient):
    """A Flower client that sends the momentum of its private gradients.

    The noise, the clip, the batch size and the sampler are those of `plan` and of the
    node's own config; no message can change them.

    Parameters
    ----------
    model : nn.Module
        Its ``state_dict`` has the arrays that the server sends, in the same order.
        Entries that are not trained are answered with zeros.
    loss : callable (outputs, targets) -> Tensor
        One value per example, or a torch loss module.
    dataset : Dataset of (input, target), or a pair of tensors
        The private examples.
    plan : PrivacyPlan
    context : Context
        Of the node. Its config may hold ``state-dir``, the directory of the privacy
        ledger, and the rules of a `NodePolicy`.
    weight_decay : float
        lambda, of the L2 penalty.
    max_epsilon, delta : float, optional
        The budget that the run asks for; at most the policy's.
    randomness : Randomness, optional
        By default unpredictable; seeded for simulations.
    node_keys : collection of str
        Keys of the node's config that belong to the app. Every other key must be a rule
        of its policy, so that a misspelt rule is an error.
    trusted_mods : collection of mods
        Mods of the ClientApp that leave the reply as it is. Under any other that is not
        known to do so, the client refuses to work.

    Raises
    ------
    RefusedError
        If the node's policy forbids the plan, or the privacy of a run cannot be kept.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        dataset: Data,
        plan: PrivacyPlan,
        context: Context,
        *,
        weight_decay: float = 0.0,
        max_epsilon: float | None = None,
        delta: float | None = None,
        randomness: Randomness | None = None,
        node_keys: Collection[str] = (),
        trusted_mods: Collection[Mod] = (),
    ) -> None:
        size = len(dataset[0] if isinstance(dataset, tuple) else cast(Sized, dataset))
        if size != plan.num_examples:
            raise ValueError(
                f"num_examples={plan.num_examples} of the plan must be the size of the "
                f"dataset, {size}; make the plan for this dataset"
            )
        self.model = model
        self.dataset = dataset
        self.plan = plan
        self.context = context
        self.weight_decay = weight_decay
        self.max_epsilon, self.delta = max_epsilon, delta
        self.randomness = SecureRandomness() if randomness is None else randomness
        self.ledger = admit(
            context.node_config,
            plan,
            max_epsilon=max_epsilon,
            delta=delta,
            secure_noise=self.randomness.private,
            node_keys=node_keys,
        )
        self.trusted_mods = trusted_mods
        self.gradients, self.arrays = _prepared(
            model, loss, plan.clip_norm, plan.clipping
        )

    def fit(
        self, parameters: Arrays, config: Mapping[str, Scalar]
    ) -> tuple[Arrays, int, dict[str, Scalar]]:
        """Take one step.

        Parameters
        ----------
        parameters : list of arrays
            theta_t, as the ``state_dict`` of the model.
        config : mapping
            ``step`` (t), ``momentum`` (beta), and from `SafeDSHB` also ``session``,
            the name of the run, and ``anchor``, whether it may come back to this step.

        Returns
        -------
        momentum, num_examples, metrics
            m_t in float32, m, and the mark of a momentum.

        Raises
        ------
        RefusedError
        """
        if (reason := objection(self.trusted_mods)) is not None:
            raise RefusedError(reason)
        try:
            momentum = take_step(self, self.asked(parameters, config), parameters)
        except Exception as error:
            refused = refusal(error)
        else:
            return momentum, self.plan.num_examples, marked()
        # Outside the handler, so that no cause is attached.
        raise refused

    def asked(self, parameters: Arrays, config: Mapping[str, Scalar]) -> Step:
        """Return what a message asks for, or refuse it before anything is charged."""
        step, beta = config.get("step"), config.get("momentum")
        session = config.get("session", str(self.context.run_id))
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise RefusedError("the message must have step, an integer of at least 0")
        if not isinstance(beta, float | int) or not 0.0 <= beta < 1.0:
            raise RefusedError("the message must have momentum, a number in [0, 1)")
        if not isinstance(session, str) or not is_plain(session):
            raise RefusedError(
                "the message's session must be up to 64 letters, digits, '.', '_', '-'"
            )
        shapes = [array.shape for array in parameters]
        if shapes != self.arrays.shapes:
            raise RefusedError(
                f"the message has arrays of shapes {shapes}, and the model of this "
                f"client {self.arrays.shapes}; use the same model on both sides"
            )
        return Step(step, float(beta), session, bool(config.get("anchor", True)))


@lru_cache(maxsize=4)
def _prepared(
    model: nn.Module, loss: Loss, clip_norm: float, clipping: Clipping
) -> tuple[ClippedGradients, ModelArrays]:
    """Check and hook a model once: that costs more than a step."""
    return ClippedGradients(model, loss, clip_norm, clipping), ModelArrays(model)


def refusal(error: Exception) -> RefusedError:
    """Return what the server may know of an error: the texts of others may quote data.

    The rest is in the log of this node.
    """
    match error:
        case RefusedError():
            return error
        case BudgetExhausted():
            text = "the privacy budget of this node is spent; nothing was released"
        case LedgerError():
            log(ERROR, "%s", error)
            text = "the privacy ledger of this node cannot be used"
        case UnsupportedModelError():
            text = str(error)
        case _:
            log(ERROR, "The step failed", exc_info=error)
            text = "the step failed; the log of this node says why"
    return RefusedError(text)


ClientFn = Callable[[Context], SafeDSHBClient]


class PrivateClientApp(ClientApp):
    """A Message-API ClientApp around private clients; see `client_app`."""

    def __init__(self, client_fn: ClientFn) -> None:
        super().__init__()
        self.client_fn = client_fn
        self.train()(self._train)
        self.evaluate()(self._evaluate)

    def make_client(self, context: Context) -> SafeDSHBClient:
        """Make the client of a node; what fails is said in the node's log only."""
        try:
            return self.client_fn(context)
        except RefusedError:
            raise
        except Exception as error:
            log(ERROR, "The client could not be made", exc_info=error)
        raise RefusedError(
            "the client could not be made; the log of this node says why"
        )

    def _train(self, message: Message, context: Context) -> Message:
        arrays, config = content_of(message)
        client = self.make_client(context)
        momentum, num_examples, _ = client.fit(_readable(arrays), config)
        return reply_with(message, arrays, momentum, num_examples)

    def _evaluate(self, message: Message, context: Context) -> Message:
        arrays, config = content_of(message)
        client = self.make_client(context)
        if type(client).evaluate is NumPyClient.evaluate:
            raise RefusedError("this client does not evaluate models on its data")
        loss, count, more = client.evaluate(arrays.to_numpy_ndarrays(), dict(config))
        numbers = {k: v for k, v in more.items() if isinstance(v, int | float)}
        metrics = MetricRecord({**numbers, "loss": loss, "num-examples": count})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)


def client_app(client_fn: ClientFn) -> ClientApp:
    """Return a Message-API ClientApp around clients that `client_fn` makes.

    It trains, and evaluates if the client has an ``evaluate`` of its own: what that
    reports is outside the privacy guarantee.
    """
    return PrivateClientApp(client_fn)


def marked() -> dict[str, Scalar]:
    """Return the mark of a momentum, with a number that nobody can guess.

    A record travels under the hash of its bytes. One that others could guess they could
    send first, with parts that are not its own.
    """
    return {MARK: secrets.randbits(62)}


def reply_with(
    message: Message, arrays: ArrayRecord, momentum: Arrays, num_examples: int
) -> Message:
    """Return the momentum under the names of the model's arrays."""
    metrics = {"num-examples": num_examples, **marked()}
    records = {
        "arrays": written(arrays, momentum),
        "metrics": refilled(_METRICS, metrics),
    }
    return Message(refilled(message.content, records), reply_to=message)


def _readable(arrays: ArrayRecord) -> Arrays:
    try:
        return read(arrays)
    except ValueError as error:
        reason = str(error)  # about the bytes of the message, and nothing else
    raise RefusedError(f"the arrays of the message cannot be read: {reason}")


def content_of(message: Message) -> tuple[ArrayRecord, Mapping[str, Scalar]]:
    """Return the model and the config of a message, whatever their keys."""
    records = message.content.values()
    arrays = [record for record in records if isinstance(record, ArrayRecord)]
    configs = [record for record in records if isinstance(record, ConfigRecord)]
    if len(arrays) != 1 or len(configs) != 1:
        raise RefusedError("a message must have one ArrayRecord and one ConfigRecord")
    return arrays[0], cast(Mapping[str, Scalar], configs[0])
