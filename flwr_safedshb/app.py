"""The ClientApp around private clients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from logging import ERROR
from typing import cast

from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.client import Client
from flwr.clientapp import ClientApp
from flwr.common import log

from flwr_safedshb.algorithm.admission import allows_plain_evaluation
from flwr_safedshb.algorithm.answer_evaluation import Metrics
from flwr_safedshb.algorithm.refusal import RefusedError
from flwr_safedshb.algorithm.wire import PRIVATE_EVALUATION, Arrays, reply_with
from flwr_safedshb.client import SafeDSHBClient, Scalar, refuse_plain_evaluation
from flwr_safedshb.flower.compat import Mod, unwrap_numpy_client
from flwr_safedshb.privacy.datasets import DatasetError
from flwr_safedshb.privacy.losses import UnsupportedModelError
from flwr_safedshb.stop_signal import is_stop_signal

Evaluate = Callable[[Message, Context], Message]
ClientFn = Callable[[Context], SafeDSHBClient | Client]


class PrivateClientApp(ClientApp):
    """A Message-API ClientApp around private clients; see `client_app`."""

    def __init__(self, client_fn: ClientFn) -> None:
        super().__init__()
        self.client_fn = client_fn
        # Answers messages in the format of NumPyClients with the same clients.
        self._numpy_app = ClientApp(
            client_fn=lambda context: self.make_client(context).to_client()
        )
        self.train()(self._train)
        # An app of its own, because the user may register another evaluation here.
        self._evaluation_app, self._has_user_evaluation = ClientApp(), False
        self._evaluation_app.evaluate()(self._evaluate)

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer a message."""
        kind, _, action = message.metadata.message_type.partition(".")
        if kind == MessageType.EVALUATE:
            configs = message.content.config_records.values()
            # A request for a private evaluation never reaches the user's own function,
            # which adds no noise.
            is_private = any(PRIVATE_EVALUATION in config for config in configs)
            if not self._has_user_evaluation or is_private:
                return self._evaluation_app(message, context)
        # The privacy guarantee covers nothing else that an app answers.
        private = kind == MessageType.TRAIN and action in ("", "default")
        if not private and not allows_plain_evaluation(context.node_config):
            refuse_plain_evaluation(None, None)
        return super().__call__(message, context)

    def evaluate(
        self, action: str = "default", *, mods: list[Mod] | None = None
    ) -> Callable[[Evaluate], Evaluate]:
        """Return a decorator that registers the user's own evaluation."""
        self._has_user_evaluation = True
        return super().evaluate(action, mods=mods)

    def make_client(self, context: Context) -> SafeDSHBClient:
        """Make the client of a node; errors that may quote data stay in its log."""
        try:
            return to_private_client(self.client_fn(context))
        except RefusedError:
            raise
        except UnsupportedModelError as error:
            reason = f": {error}"  # it comes from synthetic examples
        except DatasetError as error:  # its text names the remedy
            log(ERROR, "The client could not be made: %s", error)
            reason = "; the log of this node says why"
        except BaseException as error:
            if is_stop_signal(error):
                raise
            log(ERROR, "The client could not be made: %s", error, exc_info=error)
            reason = "; the log of this node says why"
        raise RefusedError(f"the client could not be made{reason}")

    def _train(self, message: Message, context: Context) -> Message:
        if _is_numpy_client_message(message):
            return self._numpy_app(message, context)
        record, config = parse_message(message)
        client = self.make_client(context)
        names, arrays = decode_weights(client, record)
        return reply_with(message, names, *client.fit(arrays, config))

    def _evaluate(self, message: Message, context: Context) -> Message:
        if _is_numpy_client_message(message):
            return self._numpy_app(message, context)
        record, config = parse_message(message)
        client = self.make_client(context)
        _, arrays = decode_weights(client, record)
        if PRIVATE_EVALUATION in config:
            metrics = client.evaluate_privately(arrays, config)
        else:
            metrics = _evaluate_plainly(client, arrays, config)
        content = RecordDict({"metrics": MetricRecord(metrics)})
        return Message(content, reply_to=message)


def client_app(client_fn: ClientFn) -> ClientApp:
    """Return a Message-API ClientApp around clients that `client_fn` makes.

    `client_fn` returns a `SafeDSHBClient`, with or without ``.to_client()``. The app
    trains. It evaluates if the client overrides ``evaluate``, or if a function is
    registered by ``@app.evaluate()``. What these report is outside the privacy
    guarantee, and a node with a ledger refuses it unless its own config has
    ``allow-plain-evaluation=true``.
    """
    return PrivateClientApp(client_fn)


def to_private_client(client: object) -> SafeDSHBClient:
    """Return the private client, unwrapped if ``.to_client()`` wrapped it.

    Raises
    ------
    RefusedError
        If it is another kind of client, whose training would not be private.
    """
    if not isinstance(client, SafeDSHBClient):
        client = unwrap_numpy_client(client)
    if isinstance(client, SafeDSHBClient):
        return client
    raise RefusedError(
        f"the client_fn returns a {type(client).__name__}, not a SafeDSHBClient"
    )


def _evaluate_plainly(
    client: SafeDSHBClient, arrays: Arrays, config: Mapping[str, Scalar]
) -> Metrics:
    """Return what a client's own ``evaluate`` reports, outside of the guarantee."""
    # Copies, because the user's code may write to them.
    copies = [array.copy() for array in arrays]
    loss, num_examples, metrics = client.evaluate(copies, dict(config))
    numbers = {k: v for k, v in metrics.items() if isinstance(v, int | float)}
    return {**numbers, "loss": loss, "num-examples": num_examples}


def _is_numpy_client_message(message: Message) -> bool:
    return any(key.endswith("ins.parameters") for key in message.content)


def decode_weights(
    client: SafeDSHBClient, record: ArrayRecord
) -> tuple[tuple[str, ...], Arrays]:
    """Return names and values of a message in the order of the client's model."""
    try:
        return client.template.decode(record)
    except ValueError as error:
        reason = str(error)  # it quotes only the message, no data
    raise RefusedError(reason)


def parse_message(message: Message) -> tuple[ArrayRecord, Mapping[str, Scalar]]:
    """Return the model and the config of a message, whatever their keys."""
    records = message.content.values()
    arrays = [record for record in records if isinstance(record, ArrayRecord)]
    configs = [record for record in records if isinstance(record, ConfigRecord)]
    if len(arrays) != 1 or len(configs) != 1:
        raise RefusedError("a message must have one ArrayRecord and one ConfigRecord")
    return arrays[0], cast(Mapping[str, Scalar], configs[0])
