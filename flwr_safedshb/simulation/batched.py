"""Compute the gradients of all clients of a round in one batch: the fastest engine.

Each client runs the same `algorithm.step.training_step` as in other engines. Only the
gradients are computed here, together for all clients that were sent the same model.
"""

from __future__ import annotations

import gc
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from flwr.app import Context, Message, MessageType

from flwr_safedshb.algorithm.model_arrays import load_weights
from flwr_safedshb.algorithm.step import GradientRequest, GradientSource, resume_step
from flwr_safedshb.algorithm.wire import Arrays, reply_with
from flwr_safedshb.app import PrivateClientApp, decode_weights, parse_message
from flwr_safedshb.client import FitResult, SafeDSHBClient
from flwr_safedshb.flower.compat import copy_context, set_message_id
from flwr_safedshb.privacy.bad_examples import ignore_warnings, log_causes
from flwr_safedshb.privacy.batches import (
    concat_batches,
    get_spec,
    index_batch,
    tensors_of,
)
from flwr_safedshb.privacy.clipping.gradients import ClippedGradients
from flwr_safedshb.privacy.datasets import DrawnBatch
from flwr_safedshb.privacy.private_gradient import (
    BatchSource,
    Vector,
    add_noise,
    draw_batch,
    private_vector,
)
from flwr_safedshb.simulation.in_process import InProcessGrid
from flwr_safedshb.stop_signal import is_stop_signal


class BatchedGrid(InProcessGrid):
    """An `InProcessGrid` that computes the gradients of a round in one batch.

    It takes the same arguments. Each node's reply is the one it would send alone, up to
    the rounding of floating-point sums: equal for equal seeds, but not equal to the bit
    to those of other engines. Clients of other apps than `client_app`'s train one by
    one.
    """

    def answer(self, messages: list[Message]) -> list[Message]:
        """Return the replies to messages, in their order."""
        kinds = {message.metadata.message_type for message in messages}
        if kinds != {MessageType.TRAIN} or not isinstance(self._app, PrivateClientApp):
            return super().answer(messages)
        with _gc_disabled():
            return self._train_together(self._app, messages)

    def deliver_reply(
        self, reply: Message, message_id: str, working: Context
    ) -> tuple[Message, Context]:
        """Return a reply without a copy: a private app does not keep it."""
        if not isinstance(self._app, PrivateClientApp):
            return super().deliver_reply(reply, message_id, working)
        set_message_id(reply, message_id)
        return reply, copy_context(working)

    def _train_together(
        self, app: PrivateClientApp, messages: list[Message]
    ) -> list[Message]:
        replies: list[Message | None] = [None] * len(messages)
        asked: dict[int, Context] = {}
        for i, message in enumerate(messages):
            message_id, context = self.make_message_id(), self.find_context(message)
            if context is None:
                replies[i] = self.reply_unavailable(message, message_id)
            else:
                set_message_id(message, message_id)
                asked[i] = copy_context(context)
        results = train_clients(app, [messages[i] for i in asked], list(asked.values()))
        for (i, working), result in zip(asked.items(), results, strict=True):
            replies[i] = self.finish_message(messages[i], working, result)
        return [reply for reply in replies if reply is not None]


@dataclass
class _ClientRun:
    """A client in the middle of a training step, waiting for a gradient.

    In the end `result` is its reply, or the exception that its app would have raised.
    """

    message: Message
    names: tuple[str, ...]
    source: GradientSource
    steps: Generator[GradientRequest, Vector, FitResult]
    request: GradientRequest | None = None
    result: Message | Exception | None = None

    def resume(self, found: Vector | BaseException | None) -> None:
        """Send a gradient or an error into the step, and run to its next request."""
        try:
            if found is None:
                self.request = next(self.steps)
            else:
                self.request = resume_step(self.steps, found)
        except StopIteration as done:
            self.request = None
            self.result = reply_with(self.message, self.names, *done.value)
        except Exception as error:
            self.request, self.result = None, error


def train_clients(
    app: PrivateClientApp, messages: list[Message], contexts: list[Context]
) -> list[Message | Exception]:
    """Answer training messages for several nodes of this process at once.

    Arrays that messages share are decoded once. A client that refuses does not change
    the replies of the others.

    Returns
    -------
    list of (reply, or what the app would have raised)
    """
    results: list[Message | Exception | None] = [None] * len(messages)
    runs: dict[int, _ClientRun] = {}
    models: dict[tuple[object, ...], tuple[tuple[str, ...], Arrays]] = {}
    for i, (message, context) in enumerate(zip(messages, contexts, strict=True)):
        try:
            record, config = parse_message(message)
            client = app.make_client(context)
            same = (id(array.data) for array in record.values())
            key = (client.template, *record, *same)
            if key not in models:
                models[key] = decode_weights(client, record)
            names, weights = models[key]
            if type(client).fit is not SafeDSHBClient.fit:
                fitted = client.fit(weights, config)
                results[i] = reply_with(message, names, *fitted)
                continue
            steps = client.take_steps(weights, config)
            runs[i] = _ClientRun(message, names, client.source, steps)
            runs[i].resume(None)
        except Exception as error:
            results[i] = error
    while waiting := [run for run in runs.values() if run.request is not None]:
        groups: dict[tuple[int, int, float], list[_ClientRun]] = {}
        for run in waiting:
            weights = cast(GradientRequest, run.request).weights
            key = id(run.source.gradients), id(weights), run.source.weight_decay
            groups.setdefault(key, []).append(run)
        for group in groups.values():
            for run, found in zip(group, _compute_gradients(group), strict=True):
                run.resume(found)
    finished = {i: run.result for i, run in runs.items()}
    return [
        cast("Message | Exception", finished.get(i, result))
        for i, result in enumerate(results)
    ]


def _compute_gradients(group: list[_ClientRun]) -> list[Vector | BaseException]:
    """Compute the private gradients of a group at once; if that fails, one by one."""
    source = group[0].source
    requests = [cast(GradientRequest, run.request) for run in group]
    try:
        load_weights(source.trained, requests[0].weights)
        draws = [
            run.source.draw(request.step)
            for run, request in zip(group, requests, strict=True)
        ]
        # Only in a simulation may the log say what is wrong with the examples.
        private = any(run.source.randomness.private for run in group)
        with log_causes(not private):
            return [*private_vectors(source.gradients, draws, source.weight_decay)]
    except BaseException as error:
        if is_stop_signal(error):
            raise
        if len(group) == 1:
            return [error]
    return [found for run in group for found in _compute_gradients([run])]


def private_vectors(
    gradients: ClippedGradients, draws: Sequence[BatchSource], weight_decay: float = 0.0
) -> list[Vector]:
    """Return the private gradient of every draw, computed as one batch.

    Each equals `private_vector` of the draw, up to the rounding of sums, and depends on
    its own draw alone.
    """
    if len(draws) == 1:
        return [private_vector(gradients, draws[0], weight_decay)]
    batches = [draw_batch(gradients, draw) for draw in draws]
    some = _pad_batches([batch for batch in batches if batch is not None])
    kinds = {get_spec(x, y) for x, y, _ in some}
    with ignore_warnings():
        if len(some) == len(draws) and len(kinds) == 1:
            inputs = concat_batches([x for x, _, _ in some])
            targets = concat_batches([y for _, y, _ in some])
            masks = [good for _, _, good in some if good is not None]
            usable = torch.cat(masks) if masks else None
            sums = [*gradients.consume_batch((inputs, targets), len(draws), usable)]
        else:
            nothing = torch.zeros(gradients.size)
            sums = [
                nothing.clone() if each is None else gradients.flat_sum(*each)
                for each in batches
            ]
    pairs = zip(sums, draws, strict=True)
    return [add_noise(gradients, total, draw, weight_decay) for total, draw in pairs]


def _pad_batches(batches: Sequence[DrawnBatch]) -> list[DrawnBatch]:
    """Pad batches, such as Poisson batches, to one size; padding contributes zero."""
    sizes = [len(tensors_of(y)[0]) for _, y, _ in batches]
    plain = all(good is None for _, _, good in batches)
    if plain and len({*sizes}) == 1:
        return [*batches]
    places = torch.arange(max(sizes, default=0))
    levelled: list[DrawnBatch] = []
    for (x, y, good), size in zip(batches, sizes, strict=True):
        index = places.clamp(max=size - 1)
        counts = places < size if good is None else good[index] & (places < size)
        levelled.append((index_batch(x, index), index_batch(y, index), counts))
    return levelled


@contextmanager
def _gc_disabled() -> Iterator[None]:
    """Disable the garbage collector, which takes a third of a round of 1,000 nodes."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
