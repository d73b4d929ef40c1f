"""Safe-DSHB, a client's half: the only place where the private data are.

One message, one step of Algorithm 1: charge the privacy ledger, draw a batch, clip each
example's gradient, average, add noise, update the momentum, keep it, send it. Nothing
else that depends on the data leaves: no loss, no norm, no text of an exception.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence, Sized
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
from flwr.supercore import log
from torch import nn

from flwr_safedshb.client.mods import refuse_mods
from flwr_safedshb.client.momentum import keep, recall
from flwr_safedshb.client.node import RefusedError, admit
from flwr_safedshb.client.prepared import prepare
from flwr_safedshb.client.step import Arrays, Ask, Scalar, Step, fit_together
from flwr_safedshb.flower import codec
from flwr_safedshb.flower.compat import refilled
from flwr_safedshb.privacy.clipping.gradients import Loss
from flwr_safedshb.privacy.gaussian import Data, Draw, Vector
from flwr_safedshb.privacy.plan import PrivacyPlan
from flwr_safedshb.privacy.randomness.noise import Randomness, SecureRandomness

__all__ = ["PrivateClientApp", "RefusedError", "SafeDSHBClient", "client_app"]

_MAX_SESSION = 64
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
        self.prepared = prepare(model, loss, plan.clip_norm, plan.clipping)

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
            m_t in float32, m, and no metrics.

        Raises
        ------
        RefusedError
        """
        refuse_mods()
        (momentum,) = fit_together([Ask(self, parameters, config)])
        if isinstance(momentum, RefusedError):
            raise momentum
        return momentum, self.plan.num_examples, {}

    def begin(self, parameters: Arrays, config: Mapping[str, Scalar]) -> Step:
        """Check what is asked, and charge the ledger for it."""
        step = self._asked(config)
        shapes = [array.shape for array in parameters]
        if shapes != self.prepared.shapes:
            raise RefusedError(
                f"the message has arrays of shapes {shapes}, and the model of this "
                f"client {self.prepared.shapes}; use the same model on both sides"
            )
        # First of all, so that a crash may waste budget and never hides a release.
        if self.ledger is not None:
            self.ledger.charge(self.plan, run=step.session)
        return step

    def draw(self, step: Step) -> Draw:
        """Return what the private gradient of a step is made of."""
        # The partition of a simulation: node ids differ between engines.
        config = self.context.node_config
        number = int(config.get("partition-id", self.context.node_id))
        source = self.randomness.for_step(number, step.number)
        return Draw(self.dataset, self.plan, source)

    def finish(self, step: Step, gradient: Vector) -> Arrays:
        """Update the momentum with a private gradient, keep it, return it."""
        memory = recall(step.session, self.context, self.ledger)
        before = memory.before(step.number)
        momentum = before.advanced(self.prepared.flatten(gradient), step.momentum)
        after = memory.after(step.number, momentum, step.anchor)
        keep(step.session, after, self.context, self.ledger)
        return self.prepared.split(momentum)

    def _asked(self, config: Mapping[str, Scalar]) -> Step:
        step, beta = config.get("step"), config.get("momentum")
        session = config.get("session", str(self.context.run_id))
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise RefusedError("the message must have step, an integer of at least 0")
        if not isinstance(beta, float | int) or not 0.0 <= beta < 1.0:
            raise RefusedError("the message must have momentum, a number in [0, 1)")
        if not isinstance(session, str) or len(session) > _MAX_SESSION:
            raise RefusedError("the message's session must be a short text")
        return Step(step, float(beta), session, bool(config.get("anchor", True)))


ClientFn = Callable[[Context], SafeDSHBClient]


class PrivateClientApp(ClientApp):
    """A Message-API ClientApp around private clients; see `client_app`."""

    def __init__(self, client_fn: ClientFn) -> None:
        super().__init__()
        self.client_fn = client_fn
        self.train()(self._train)
        self.evaluate()(self._evaluate)

    def train_together(
        self, messages: Sequence[Message], contexts: Sequence[Context]
    ) -> list[Message | Exception]:
        """Answer training messages for several nodes of this process at once.

        The arrays that messages share are decoded once.

        Returns
        -------
        list of (reply, or what the app would have raised)
        """
        results: list[Message | Exception | None] = [None] * len(messages)
        asked: dict[int, tuple[SafeDSHBClient, ArrayRecord]] = {}
        asks: list[Ask] = []
        models: dict[tuple[int, ...], Arrays] = {}
        for i, (message, context) in enumerate(zip(messages, contexts, strict=True)):
            try:
                arrays, config = _content(message)
                key = tuple(id(array.data) for array in arrays.values())
                model = models.get(key) or models.setdefault(key, _decoded(arrays))
                client = self._made(context)
                if type(client).fit is SafeDSHBClient.fit:
                    asked[i] = client, arrays
                    asks.append(Ask(client, model, config))
                else:
                    fitted = client.fit(model, config)
                    results[i] = _reply(message, arrays, *fitted[:2])
            except Exception as error:
                results[i] = error
        for i, momentum in zip(asked, fit_together(asks), strict=True):
            client, arrays = asked[i]
            results[i] = (
                momentum
                if isinstance(momentum, RefusedError)
                else _reply(messages[i], arrays, momentum, client.plan.num_examples)
            )
        return [result for result in results if result is not None]

    def _made(self, context: Context) -> SafeDSHBClient:
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
        arrays, config = _content(message)
        client = self._made(context)
        return _reply(message, arrays, *client.fit(_decoded(arrays), config)[:2])

    def _evaluate(self, message: Message, context: Context) -> Message:
        arrays, config = _content(message)
        client = self._made(context)
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


def _decoded(arrays: ArrayRecord) -> Arrays:
    return [codec.decode(array) for array in arrays.values()]


def _reply(
    message: Message, arrays: ArrayRecord, momentum: Arrays, num_examples: int
) -> Message:
    """Return the momentum under the names of the model's arrays."""
    layers = zip(arrays, momentum, strict=True)
    records = {
        "arrays": refilled(
            arrays, {name: codec.encode(layer) for name, layer in layers}
        ),
        "metrics": refilled(_METRICS, {"num-examples": num_examples}),
    }
    return Message(refilled(message.content, records), reply_to=message)


def _content(message: Message) -> tuple[ArrayRecord, Mapping[str, Scalar]]:
    """Return the model and the config of a message, whatever their keys."""
    records = message.content.values()
    arrays = [record for record in records if isinstance(record, ArrayRecord)]
    configs = [record for record in records if isinstance(record, ConfigRecord)]
    if len(arrays) != 1 or len(configs) != 1:
        raise RefusedError("a message must have one ArrayRecord and one ConfigRecord")
    return arrays[0], cast(Mapping[str, Scalar], configs[0])
