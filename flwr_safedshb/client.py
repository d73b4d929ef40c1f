"""A client of Safe-DSHB, the only place where the private data are, and its ClientApp.

One message, one step of Algorithm 1: charge the privacy ledger, draw a batch, clip each
example's gradient, average, add noise, update the momentum, keep it, send it (`step`).
What leaves a node is that momentum under the names of the model's arrays, a mark that
it is one, and the number of examples; or a refusal, whose text says nothing about data.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from logging import ERROR
from typing import cast

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType
from flwr.client import Client
from flwr.clientapp import ClientApp
from flwr.common import log
from torch import nn
from torch.nn.modules.loss import _Loss

from flwr_safedshb.algorithm.answer_evaluation import (
    Evaluator,
    PrivateEvaluation,
    answer,
)
from flwr_safedshb.algorithm.budget import (
    PLACE,
    RefusedError,
    admit,
    admit_evaluation,
    allows_plain_evaluation,
    check_unit,
    commit_for_life,
)
from flwr_safedshb.algorithm.evaluation_names import PRIVATE
from flwr_safedshb.algorithm.held_out import divided, split_plans
from flwr_safedshb.algorithm.model_arrays import trained
from flwr_safedshb.algorithm.step import Scalar, Steps
from flwr_safedshb.algorithm.wire import Arrays, Template, reply_with
from flwr_safedshb.flower.compat import Mod, unwrap_numpy_client
from flwr_safedshb.privacy.bad_examples import log_causes
from flwr_safedshb.privacy.clipping.gradients import ClippedGradients
from flwr_safedshb.privacy.datasets import DatasetError, Unpack, make_examples
from flwr_safedshb.privacy.losses import Loss, UnsupportedModelError, is_rowwise_loss
from flwr_safedshb.privacy.map_dataset import ItemExamples
from flwr_safedshb.privacy.plan import ALL, Clipping, PrivacyPlan
from flwr_safedshb.privacy.randomness.noise import Randomness, SecureRandomness
from flwr_safedshb.stop_signal import is_stop_signal

__all__ = ["RefusedError", "SafeDSHBClient", "client_app"]

Evaluate = Callable[[Message, Context], Message]

_shared_losses: dict[object, Loss] = {}


class SafeDSHBClient(Steps):
    """A Flower client that sends the momentum of its private gradients.

    The noise, the clip, the batch size and the sampler are those of `plan` and of the
    node's own config; no message can change them.

    Parameters
    ----------
    model : nn.Module
        Its parameters with ``requires_grad`` are trained, and cross the wire by name.
    loss : callable (outputs, targets) -> Tensor
        One value per example, or a torch loss module.
    dataset : Dataset, sequence, or pair of arrays
        The private examples: items that are pairs (input, target) or dicts, or whole
        arrays of inputs and targets, all of them also nested.
    plan : PrivacyPlan
    context : Context
        Of the node. Its config may hold ``state-dir``, the directory of the privacy
        ledger, and the rules of a `NodePolicy`.
    target : str, optional
        Of items that are dicts, the key of the target. What is left is the input: a
        dict of several entries is given to the model as keywords.
    unpack : callable, optional
        From an item of any other kind to its input and its target.
    like : (input, target), optional
        Of a dataset of items, a made-up example, such as ``(torch.zeros(1, 28, 28),
        0)``: all items have its shapes and types, and others are left out. Without
        seeded randomness it must be given, because no item may decide about others.
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
    evaluation : PrivateEvaluation, optional
        Answer what models are worth on the data, with noise and charged as steps are.
        Examples that it holds out do not train: the plan is for the others.

    Raises
    ------
    RefusedError
        If the node's policy forbids the plan, or the privacy of a run cannot be kept.
    ValueError
        If the first items of the dataset are not what was said.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        dataset: object,
        plan: PrivacyPlan,
        context: Context,
        *,
        target: str | None = None,
        unpack: Unpack | None = None,
        like: tuple[object, object] | None = None,
        weight_decay: float = 0.0,
        max_epsilon: float | None = None,
        delta: float | None = None,
        randomness: Randomness | None = None,
        node_keys: Collection[str] = (),
        trusted_mods: Collection[Mod] = (),
        evaluation: PrivateEvaluation | None = None,
    ) -> None:
        if plan.part != ALL:
            raise ValueError(f"part={plan.part!r} of the plan is for the client to say")
        _refuse_unmade(model, loss, randomness)
        self.randomness = SecureRandomness() if randomness is None else randomness
        with log_causes(not self.randomness.private):
            data = make_examples(dataset, target, unpack, like)
            if self.randomness.private:
                data.refuse_undeclared()
        self.dataset = evaluated = data
        held_out = 0 if evaluation is None else evaluation.held_out
        if held_out:
            self.dataset, evaluated = divided(data, held_out)
        if (size := data.size - held_out) != plan.num_examples:
            raise ValueError(
                f"num_examples={plan.num_examples} of the plan must be the size of the "
                f"dataset, {size}; make the plan for this dataset"
            )
        self.model, self.loss, self.plan, self.context = model, loss, plan, context
        self.weight_decay, self.trusted_mods = weight_decay, trusted_mods
        self.max_epsilon, self.delta = max_epsilon, delta
        rules = tuple(e for e in context.node_config.items() if e[0] not in PLACE)
        self.ledger = admit(
            rules, plan, max_epsilon, delta, self.randomness.private, tuple(node_keys)
        )
        if isinstance(data, ItemExamples):
            with log_causes(not self.randomness.private):
                data.refuse_unread(self.ledger is None)
        self.evaluator = None
        if evaluation is not None:
            second = evaluation.plan(evaluated.size)
            admit_evaluation(rules, second, tuple(node_keys))
            if self.ledger is not None:
                check_unit(second, self.ledger)
            if held_out:
                self.plan, second = split_plans(plan, second, data, self.ledger)
            self.evaluator = Evaluator(evaluation, evaluated, second)
        if self.ledger is not None:
            other = None if self.evaluator is None else self.evaluator.plan
            commit_for_life(rules, self.ledger, self.plan, other)
        if not allows_plain_evaluation(context.node_config, node_keys):
            # On the object, so that no way to ask a client goes round it.
            vars(self)["evaluate"] = _refuse_plain_evaluation
        self.gradients, self.template, self.trained = _prepared(
            model, _shared(loss), plan.clip_norm, plan.clipping
        )


def _refuse_plain_evaluation(
    parameters: object, config: object
) -> tuple[float, int, dict[str, Scalar]]:
    """Stand in for a client's own ``evaluate`` where the node keeps a ledger."""
    raise RefusedError(
        "this node keeps a privacy budget, and an evaluation without noise is outside "
        "of it; ask for a private evaluation (evaluate_every of the strategy), or let "
        "the node's owner set allow-plain-evaluation=true"
    )


@lru_cache(maxsize=4)
def _prepared(
    model: nn.Module, loss: Loss, clip_norm: float, clipping: Clipping
) -> tuple[ClippedGradients, Template, list[nn.Parameter]]:
    """Check and hook a model once: that costs more than a step."""
    held = trained(model)
    template = Template(tuple(held), tuple(tuple(p.shape) for p in held.values()))
    gradients = ClippedGradients(model, loss, clip_norm, clipping)
    return gradients, template, [*held.values()]


def _refuse_unmade(model: object, loss: object, randomness: object) -> None:
    """Refuse a class, a name or a number where an object belongs."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model={model!r} must be a module, such as Net()")
    if not callable(loss) or isinstance(loss, type):
        raise ValueError(f"loss={loss!r} must be one that is made, as nn.MSELoss() is")
    if randomness is not None and not hasattr(randomness, "for_step"):
        raise ValueError(f"randomness={randomness!r} must be SeededRandomness(0), say")


def _shared(loss: Loss) -> Loss:
    """Return one object for equal losses of torch, and any other loss as it is.

    Apps make them anew for every message, and what was checked is the very object.
    """
    if not isinstance(loss, _Loss) or not is_rowwise_loss(loss):
        return loss
    if any(weight is not None for weight in loss._buffers.values()):
        return loss
    told = {name: v for name, v in vars(loss).items() if not name.startswith("_")}
    # A copy: the app may change its own.
    return _shared_losses.setdefault((type(loss), *told.items()), copy.copy(loss))


ClientFn = Callable[[Context], SafeDSHBClient | Client]


class PrivateClientApp(ClientApp):
    """A Message-API ClientApp around private clients; see `client_app`."""

    def __init__(self, client_fn: ClientFn) -> None:
        super().__init__()
        self.client_fn = client_fn
        # Of the older API: other names of records, and the same clients.
        self._older = ClientApp(
            client_fn=lambda context: self.make_client(context).to_client()
        )
        self.train()(self._train)
        # Aside, so that an app may have an evaluation of its own.
        self._evaluation, self._has_own = ClientApp(), False
        self._evaluation.evaluate()(self._evaluate)

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer a message."""
        kind, _, action = message.metadata.message_type.partition(".")
        if kind == MessageType.EVALUATE:
            configs = message.content.config_records.values()
            # Whoever asks for noise gets no numbers without it.
            if not self._has_own or any(PRIVATE in config for config in configs):
                return self._evaluation(message, context)
        # Whatever else an app answers by itself is outside of the guarantee.
        private = kind == MessageType.TRAIN and action in ("", "default")
        if not private and not allows_plain_evaluation(context.node_config):
            _refuse_plain_evaluation(None, None)
        return super().__call__(message, context)

    def evaluate(
        self, action: str = "default", *, mods: list[Mod] | None = None
    ) -> Callable[[Evaluate], Evaluate]:
        """Return a decorator for an evaluation of the app's own."""
        self._has_own = True
        return super().evaluate(action, mods=mods)

    def make_client(self, context: Context) -> SafeDSHBClient:
        """Make the client of a node; what fails is said in the node's log only."""
        try:
            return private_client(self.client_fn(context))
        except RefusedError:
            raise
        except UnsupportedModelError as error:
            reason = f": {error}"  # of made-up examples, and nothing else
        except DatasetError as error:  # which says what to change, and where
            log(ERROR, "The client could not be made: %s", error)
            reason = "; the log of this node says why"
        except BaseException as error:
            if is_stop_signal(error):
                raise
            log(ERROR, "The client could not be made: %s", error, exc_info=error)
            reason = "; the log of this node says why"
        raise RefusedError(f"the client could not be made{reason}")

    def _train(self, message: Message, context: Context) -> Message:
        if _is_older(message):
            return self._older(message, context)
        record, config = content_of(message)
        client = self.make_client(context)
        names, arrays = readable(client, record)
        return reply_with(message, names, *client.fit(arrays, config))

    def _evaluate(self, message: Message, context: Context) -> Message:
        if _is_older(message):
            return self._older(message, context)
        record, config = content_of(message)
        client = self.make_client(context)
        return answer(client, message, readable(client, record)[1], config)


def client_app(client_fn: ClientFn) -> ClientApp:
    """Return a Message-API ClientApp around clients that `client_fn` makes.

    They may be as they are, or turned by ``.to_client()``. The app trains, and
    evaluates if the client has an ``evaluate`` of its own, or the app by
    ``@app.evaluate()``: what these report is outside the privacy guarantee, and a node
    with a ledger refuses it unless its own config has ``allow-plain-evaluation=true``.
    """
    return PrivateClientApp(client_fn)


def private_client(client: object) -> SafeDSHBClient:
    """Return a private client, also out of what ``.to_client()`` made of it.

    Raises
    ------
    RefusedError
        If it is another kind of client: this app would make it private by name alone.
    """
    if not isinstance(client, SafeDSHBClient):
        client = unwrap_numpy_client(client)
    if isinstance(client, SafeDSHBClient):
        return client
    raise RefusedError(
        f"the client_fn makes a {type(client).__name__}, and no SafeDSHBClient"
    )


def _is_older(message: Message) -> bool:
    return any(key.endswith("ins.parameters") for key in message.content)


def readable(
    client: SafeDSHBClient, record: ArrayRecord
) -> tuple[tuple[str, ...], Arrays]:
    """Return names and values of a message in the order of the client's model."""
    try:
        return client.template.decode(record)
    except ValueError as error:
        reason = str(error)  # about the bytes of the message, and nothing else
    raise RefusedError(reason)


def content_of(message: Message) -> tuple[ArrayRecord, Mapping[str, Scalar]]:
    """Return the model and the config of a message, whatever their keys."""
    records = message.content.values()
    arrays = [record for record in records if isinstance(record, ArrayRecord)]
    configs = [record for record in records if isinstance(record, ConfigRecord)]
    if len(arrays) != 1 or len(configs) != 1:
        raise RefusedError("a message must have one ArrayRecord and one ConfigRecord")
    return arrays[0], cast(Mapping[str, Scalar], configs[0])
