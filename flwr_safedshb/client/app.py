"""The ClientApp of private clients: from a message to a reply.

What leaves a node is a momentum under the names of the model's arrays, a mark that it
is one, and the number of examples; or a refusal, whose text says nothing about data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
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
from flwr.client import Client, NumPyClient
from flwr.clientapp import ClientApp
from flwr.common import log

from flwr_safedshb.client.client import SafeDSHBClient, Scalar, marked
from flwr_safedshb.client.dataset import DatasetError
from flwr_safedshb.client.node import RefusedError
from flwr_safedshb.exchange.arrays import DELTA, EPSILON, MARK, Arrays, written
from flwr_safedshb.exchange.evaluations import PRIVATE
from flwr_safedshb.flower.compat import Mod, numpy_client_of, refilled
from flwr_safedshb.privacy.examples import UnsupportedModelError

Evaluate = Callable[[Message, Context], Message]
ClientFn = Callable[[Context], SafeDSHBClient | Client]

_METRICS = MetricRecord({"num-examples": 0})


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
        if message.metadata.message_type.split(".")[0] == MessageType.EVALUATE:
            configs = message.content.config_records.values()
            # Whoever asks for noise gets no numbers without it.
            if not self._has_own or any(PRIVATE in config for config in configs):
                return self._evaluation(message, context)
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
        except Exception as error:
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
        if PRIVATE in config:
            counts = client.count(readable(client, record)[1], config)
            answer = MetricRecord({**counts, **_number()})
            return Message(RecordDict({"metrics": answer}), reply_to=message)
        if type(client).evaluate is NumPyClient.evaluate:
            raise RefusedError("this client does not evaluate models on its data")
        # Not those of the message itself: a client of one's own may write to them.
        arrays = [array.copy() for array in readable(client, record)[1]]
        loss, count, more = client.evaluate(arrays, dict(config))
        numbers = {k: v for k, v in more.items() if isinstance(v, int | float)}
        metrics = MetricRecord({**numbers, "loss": loss, "num-examples": count})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)


def client_app(client_fn: ClientFn) -> ClientApp:
    """Return a Message-API ClientApp around clients that `client_fn` makes.

    They may be as they are, or turned by ``.to_client()``. The app trains, and
    evaluates if the client has an ``evaluate`` of its own, or the app by
    ``@app.evaluate()``: what these report is outside the privacy guarantee.
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
        client = numpy_client_of(client)
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
        return client.template.read(record)
    except ValueError as error:
        reason = str(error)  # about the bytes of the message, and nothing else
    raise RefusedError(reason)


def reply_with(
    message: Message,
    names: Iterable[str],
    momentum: Arrays,
    num_examples: int,
    said: Mapping[str, object],
) -> Message:
    """Return the momentum under the names of the model's arrays.

    Of what the client says beside it, only its mark and the cost of the run go along.
    """
    kept = {name: said[name] for name in (EPSILON, DELTA, MARK) if name in said}
    metrics = {"num-examples": num_examples, **kept}
    records = {
        "arrays": written(names, momentum),
        "metrics": refilled(_METRICS, metrics),
    }
    return Message(refilled(message.content, records), reply_to=message)


def _number() -> dict[str, int]:
    """Return the mark of a client's answer, a number that nobody can guess."""
    return {name: int(value) for name, value in marked().items()}


def content_of(message: Message) -> tuple[ArrayRecord, Mapping[str, Scalar]]:
    """Return the model and the config of a message, whatever their keys."""
    records = message.content.values()
    arrays = [record for record in records if isinstance(record, ArrayRecord)]
    configs = [record for record in records if isinstance(record, ConfigRecord)]
    if len(arrays) != 1 or len(configs) != 1:
        raise RefusedError("a message must have one ArrayRecord and one ConfigRecord")
    return arrays[0], cast(Mapping[str, Scalar], configs[0])
