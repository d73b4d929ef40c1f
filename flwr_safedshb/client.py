"""Safe-DSHB, a client's half: the only place where the private data are.

One message, one step of Algorithm 1: charge the privacy ledger, draw a batch, clip each
example's gradient, average, add noise, update the momentum, keep it, send it. Nothing
else that depends on the data leaves: no loss, no norm, no text of an exception.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sized
from functools import lru_cache
from logging import ERROR
from typing import cast

import numpy as np
import torch
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
from flwr.supercore import log
from numpy.typing import NDArray
from torch import nn

from flwr_safedshb import npy
from flwr_safedshb.memory import Vector, keep, recall
from flwr_safedshb.mods import refuse_mods
from flwr_safedshb.node import RefusedError, admit
from flwr_safedshb.privacy.gradients import (
    ClippedGradients,
    Loss,
    UnsupportedModelError,
)
from flwr_safedshb.privacy.ledger import BudgetExhausted, LedgerError
from flwr_safedshb.privacy.mechanism import Data, PrivateDataError, private_gradient
from flwr_safedshb.privacy.noise import Randomness, SecureRandomness
from flwr_safedshb.privacy.plan import Clipping, PrivacyPlan
from flwr_safedshb.records import refilled

__all__ = ["RefusedError", "SafeDSHBClient", "client_app"]

Scalar = bool | bytes | float | int | str

_MAX_SESSION = 64


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
        Further keys of the node's config that are no rules.

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
        self.randomness = SecureRandomness() if randomness is None else randomness
        self.ledger = admit(
            context.node_config,
            plan,
            max_epsilon=max_epsilon,
            delta=delta,
            secure_noise=self.randomness.private,
            node_keys=node_keys,
        )
        self._prepared = _prepare(model, loss, plan.clip_norm, plan.clipping)

    def fit(
        self, parameters: list[NDArray[np.generic]], config: Mapping[str, Scalar]
    ) -> tuple[list[NDArray[np.generic]], int, dict[str, Scalar]]:
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
            m_t in float32, m, and no metrics.

        Raises
        ------
        RefusedError
        """
        refuse_mods()
        try:
            momentum = self._step(parameters, config)
        except RefusedError:
            raise
        except BudgetExhausted:
            refusal = "the privacy budget of this node is spent; nothing was released"
        except LedgerError as error:
            log(ERROR, "%s", error)
            refusal = "the privacy ledger of this node cannot be used"
        except (PrivateDataError, UnsupportedModelError) as error:
            refusal = str(error)
        except Exception as error:
            log(ERROR, "The step failed", exc_info=error)
            refusal = "the step failed; the log of this node says why"
        else:
            return momentum, self.plan.num_examples, {}
        # Outside the handlers, so that no cause is attached.
        raise RefusedError(refusal)

    def _step(
        self, parameters: list[NDArray[np.generic]], config: Mapping[str, Scalar]
    ) -> list[NDArray[np.generic]]:
        step, beta, session, anchor = self._asked(config)
        prepared = self._prepared
        if [array.shape for array in parameters] != prepared.shapes:
            raise RefusedError(
                f"the message has arrays of shapes {[a.shape for a in parameters]}, "
                f"and the model of this client {prepared.shapes}; use the same model "
                "on both sides"
            )
        # First of all, so that a crash may waste budget and never hides a release.
        if self.ledger is not None:
            self.ledger.charge(self.plan, run=session)
        prepared.load(parameters)
        gradient = private_gradient(
            prepared.gradients,
            self.dataset,
            self.plan,
            self.randomness.for_step(self._number(), step),
            self.weight_decay,
        )
        memory = recall(session, self.context, self.ledger)
        momentum = memory.before(step).advanced(prepared.flatten(gradient), beta)
        keep(session, memory.after(step, momentum, anchor), self.context, self.ledger)
        return prepared.split(momentum)

    def _asked(self, config: Mapping[str, Scalar]) -> tuple[int, float, str, bool]:
        step, beta = config.get("step"), config.get("momentum")
        session = config.get("session", str(self.context.run_id))
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise RefusedError("the message must have step, an integer of at least 0")
        if not isinstance(beta, float | int) or not 0.0 <= beta < 1.0:
            raise RefusedError("the message must have momentum, a number in [0, 1)")
        if not isinstance(session, str) or len(session) > _MAX_SESSION:
            raise RefusedError("the message's session must be a short text")
        return step, float(beta), session, bool(config.get("anchor", True))

    def _number(self) -> int:
        """Return the partition of a simulation: node ids differ between engines."""
        return int(self.context.node_config.get("partition-id", self.context.node_id))


ClientFn = Callable[[Context], SafeDSHBClient]


def client_app(client_fn: ClientFn) -> ClientApp:
    """Return a Message-API ClientApp around clients that `client_fn` makes.

    It trains, and evaluates if the client has an ``evaluate`` of its own: what that
    reports is outside the privacy guarantee.
    """
    app = ClientApp()

    def made(context: Context) -> SafeDSHBClient:
        try:
            return client_fn(context)
        except RefusedError:
            raise
        except Exception as error:
            log(ERROR, "The client could not be made", exc_info=error)
        raise RefusedError(
            "the client could not be made; the log of this node says why"
        )

    @app.train()
    def train(message: Message, context: Context) -> Message:
        arrays, config = _content(message)
        client = made(context)
        model = [npy.decode(array) for array in arrays.values()]
        layers, num_examples, _ = client.fit(model, config)
        names = zip(arrays, layers, strict=True)
        momentum = refilled(arrays, {name: npy.encode(layer) for name, layer in names})
        metrics = MetricRecord({"num-examples": num_examples})
        content = refilled(message.content, {"arrays": momentum, "metrics": metrics})
        return Message(content, reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        arrays, config = _content(message)
        client = made(context)
        if type(client).evaluate is NumPyClient.evaluate:
            raise RefusedError("this client does not evaluate models on its data")
        loss, count, more = client.evaluate(arrays.to_numpy_ndarrays(), dict(config))
        numbers = {k: v for k, v in more.items() if isinstance(v, int | float)}
        metrics = MetricRecord({**numbers, "loss": loss, "num-examples": count})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


def _content(message: Message) -> tuple[ArrayRecord, Mapping[str, Scalar]]:
    """Return the model and the config of a message, whatever their keys."""
    records = message.content.values()
    arrays = [record for record in records if isinstance(record, ArrayRecord)]
    configs = [record for record in records if isinstance(record, ConfigRecord)]
    if len(arrays) != 1 or len(configs) != 1:
        raise RefusedError("a message must have one ArrayRecord and one ConfigRecord")
    return arrays[0], cast(Mapping[str, Scalar], configs[0])


class _Prepared:
    """A model with its hooks, and where its parameters are among the arrays sent."""

    def __init__(self, gradients: ClippedGradients) -> None:
        self.gradients = gradients
        model = gradients.model
        self._entries = list(model.state_dict(keep_vars=True).values())
        self.shapes = [tuple(entry.shape) for entry in self._entries]
        trained = [p for p in model.parameters() if p.requires_grad]
        position = {id(parameter): i for i, parameter in enumerate(trained)}
        self._positions = [position.get(id(entry)) for entry in self._entries]

    def load(self, parameters: list[NDArray[np.generic]]) -> None:
        """Give the model the weights that were sent."""
        for entry, array in zip(self._entries, parameters, strict=True):
            entry.detach().copy_(torch.from_numpy(array.copy()))

    def flatten(self, gradient: list[Vector]) -> NDArray[np.float64]:
        """Return the gradient, (d,), with zeros where nothing is trained."""
        return np.concatenate(
            [
                np.zeros(math.prod(shape)) if i is None else gradient[i].reshape(-1)
                for shape, i in zip(self.shapes, self._positions, strict=True)
            ],
            dtype=np.float64,
        )

    def split(self, vector: Vector) -> list[NDArray[np.generic]]:
        """Return a vector, (d,), as the arrays of the model."""
        layers: list[NDArray[np.generic]] = []
        start = 0
        for shape in self.shapes:
            stop = start + math.prod(shape)
            layers.append(vector[start:stop].reshape(shape))
            start = stop
        return layers


@lru_cache(maxsize=4)
def _prepare(
    model: nn.Module, loss: Loss, clip_norm: float, clipping: Clipping
) -> _Prepared:
    """Check and hook a model once: that costs more than a step."""
    return _Prepared(ClippedGradients(model, loss, clip_norm, clipping))
