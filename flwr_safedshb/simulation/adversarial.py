"""Wrap a Grid to replace the replies of f adversarial nodes.

The attack is in the network, so every Flower strategy can be attacked unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from logging import WARNING

import numpy as np
from flwr.app import Error, Message, RecordDict
from flwr.common import log
from flwr.serverapp import Grid
from numpy.typing import NDArray

from flwr_safedshb.algorithm.wire import Arrays, decode_arrays, encode_array
from flwr_safedshb.attacks.base import Aggregate, Attack, Floats
from flwr_safedshb.flower.compat import (
    ErrorCode,
    copy_content,
    replace_entries_unchecked,
    set_message_id,
    shallow_copy,
)
from flwr_safedshb.flower.grid import WrappedGrid
from flwr_safedshb.simulation.fake_evaluation import (
    asks_for_private_evaluation,
    fake_evaluation,
)

# Maps honest vectors, (h, d), sorted by node id, to f vectors; an `Attack` is one.
AttackFunction = Callable[[Floats, int, np.random.Generator, Aggregate], Floats]
# Maps the arrays of the model that was sent to a gradient, (d,).
GradientFunction = Callable[[Arrays], NDArray[np.float64]]


class AssumedMean:
    """The mean in place of a rule that nobody stated; warns when it is first used."""

    def __init__(self) -> None:
        self._said = False

    def __call__(self, vectors: Floats, f: int) -> Floats:
        """Return the mean, (d,), of vectors, (n, d); f is ignored."""
        if not self._said:
            self._said = True
            log(
                WARNING,
                "AdversarialGrid has no aggregate=, so the adversaries assume that the "
                "server takes the plain mean; against another rule pass it, as in "
                "aggregate=SMEA(), or the attack is weaker than it could be",
            )
        return np.asarray(vectors.mean(axis=0))


class AdversarialGrid(WrappedGrid):
    """A Grid with f adversarial nodes.

    The nodes with the f largest ids never get their training messages. The adversaries
    see every honest reply to the same batch of messages, and then send what `attack`
    returns, in replies that otherwise look like those of an honest node. If no honest
    node has sent a vector, they reply with an error. Other messages pass unchanged, and
    so does everything under an attack on data, whose nodes run the honest protocol.

    Parameters
    ----------
    grid : Grid
    attack : Attack, or callable (honest, f, rng, aggregate) -> (f, d) array
        Any values; they are sent in the dtype of the honest vectors.
    num_malicious_nodes : int
        f.
    aggregate : callable, optional
        The rule that the adversaries assume the server to use, such as a `Rule`. By
        default the mean, with a warning if the attack makes use of it.
    seed : int
        Seeds the generator given to `attack`.
    gradient : callable, optional
        Maps the arrays of the model in a training message to the gradient of the loss
        on the adversaries' own examples, for an `Attack` that uses it; or of another
        goal, as a `PushPlanner` does. It is called once a round.
    """

    def __init__(
        self,
        grid: Grid,
        attack: AttackFunction,
        num_malicious_nodes: int,
        aggregate: Aggregate | None = None,
        seed: int = 0,
        gradient: GradientFunction | None = None,
    ) -> None:
        if num_malicious_nodes < 0:
            raise ValueError(
                f"num_malicious_nodes={num_malicious_nodes} must be at least 0"
            )
        super().__init__(grid)
        self._attack = attack
        self._intercepts = getattr(attack, "replaces_vectors", True)
        self._num_malicious = num_malicious_nodes
        self._aggregate = AssumedMean() if aggregate is None else aggregate
        self._rng = np.random.default_rng(seed)
        self._gradient = gradient
        self._steps: list[_PushedBatch] = []
        self._made: dict[str, Message] = {}
        self._intercepted = 0

    @property
    def malicious_node_ids(self) -> list[int]:
        """The f largest node ids."""
        nodes = sorted(self.grid.get_node_ids())
        return nodes[len(nodes) - self._num_malicious :]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Push the messages for honest nodes, and intercept the others."""
        messages = list(messages)
        step, passed = self._intercept(messages)
        pushed = list(self.grid.push_messages(passed))
        step.waiting = set(pushed)
        self._steps.append(step)
        kept = {id(message): name for name, message in step.intercepted.items()}
        others = iter(pushed)
        return [kept.get(id(message)) or next(others) for message in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Pull honest replies, and adversarial ones once all honest ones are known."""
        wanted = set(message_ids)
        asked = wanted & self._pending_ids()
        try:
            replies = list(self.grid.pull_messages(asked))
        except Exception:
            # Adversaries must not wait forever for an unreadable reply.
            for step in self._steps:
                step.waiting -= asked
            raise
        for step in self._steps:
            ids = step.waiting
            step.replies += [
                r for r in replies if r.metadata.reply_to_message_id in ids
            ]
            complete = ids <= {r.metadata.reply_to_message_id for r in step.replies}
            if complete and wanted & step.intercepted.keys():
                for reply in self._make_replies(step):
                    self._made[reply.metadata.reply_to_message_id] = reply
            step.done = complete and not step.intercepted
        self._steps = [step for step in self._steps if not step.done]
        # Only the replies that were asked for.
        made = [self._made.pop(i) for i in wanted & self._made.keys()]
        return replies + made

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Send to the honest nodes, wait for them, and add adversarial replies."""
        step, passed = self._intercept(messages)
        step.replies = list(self.grid.send_and_receive(passed, timeout=timeout))
        return [*step.replies, *self._make_replies(step)]

    def _pending_ids(self) -> set[str]:
        return set().union(*(step.waiting for step in self._steps))

    def _intercept(
        self, messages: Iterable[Message]
    ) -> tuple[_PushedBatch, list[Message]]:
        malicious = set(self.malicious_node_ids if self._intercepts else ())
        step, passed = _PushedBatch(), []
        for message in messages:
            training = message.metadata.message_type.split(".")[0] == "train"
            attacked = training or asks_for_private_evaluation(message)
            if attacked and message.metadata.dst_node_id in malicious:
                self._intercepted += 1
                message_id = f"intercepted-{self._intercepted}"
                set_message_id(message, message_id)
                step.intercepted[message_id] = message
            else:
                passed.append(message)
        return step, passed

    def _make_replies(self, step: _PushedBatch) -> Iterator[Message]:
        """Make the adversarial replies to a batch from its honest replies."""
        asked = list(step.intercepted.values())
        step.intercepted = {}
        if asked and asks_for_private_evaluation(asked[0]):
            yield from _attack_evaluation(asked, step.replies)
            return
        honest = [
            reply
            for reply in step.replies
            if reply.has_content() and reply.content.array_records
        ]
        if not honest:
            yield from map(_make_error_reply, asked)
            return
        if not asked:
            return
        honest.sort(key=lambda reply: reply.metadata.src_node_id)
        vectors = np.stack([flatten_arrays(reply.content) for reply in honest])
        attack = self._attack
        if self._gradient and isinstance(attack, Attack) and attack.wants_gradient:
            model = decode_arrays(next(iter(asked[0].content.array_records.values())))
            attack = attack.with_gradient(self._gradient(model))
        sent = attack(vectors, len(asked), self._rng, self._aggregate)
        for message, vector in zip(asked, sent, strict=True):
            reply = Message(replace_arrays(honest[0].content, vector), reply_to=message)
            set_message_id(reply, f"{message.metadata.message_id}-reply")
            yield reply


def _attack_evaluation(
    asked: list[Message], replies: list[Message]
) -> Iterator[Message]:
    content = fake_evaluation(replies)
    for message in asked:
        if content is None:
            yield _make_error_reply(message)
            continue
        reply = Message(content, reply_to=message)
        set_message_id(reply, f"{message.metadata.message_id}-reply")
        yield reply


def _make_error_reply(message: Message) -> Message:
    """Return an error reply, so that the server does not wait."""
    error = Error(
        ErrorCode.CLIENT_APP_RAISED_EXCEPTION,
        "there is no honest vector to base an attack on",
    )
    reply = Message(error, reply_to=message)
    set_message_id(reply, f"{message.metadata.message_id}-reply")
    return reply


@dataclass
class _PushedBatch:
    """Messages pushed together, and the replies so far."""

    waiting: set[str] = field(default_factory=set)
    intercepted: dict[str, Message] = field(default_factory=dict)
    replies: list[Message] = field(default_factory=list)
    done: bool = False


def flatten_arrays(content: RecordDict) -> NDArray[np.float64]:
    """Return all arrays of the first ArrayRecord as one vector, (d,)."""
    record = next(iter(content.array_records.values()))
    layers = [layer.reshape(-1) for layer in decode_arrays(record)]
    return np.concatenate(layers, dtype=np.float64)


def replace_arrays(content: RecordDict, vector: NDArray[np.floating]) -> RecordDict:
    """Return a copy whose first ArrayRecord holds the values of `vector`, (d,)."""
    key, record = next(iter(content.array_records.items()))
    arrays = {}
    start = 0
    for (name, array), old in zip(record.items(), decode_arrays(record), strict=True):
        part = vector[start : start + old.size]
        with np.errstate(over="ignore", invalid="ignore"):
            values = part.astype(old.dtype).reshape(old.shape)
        # Only the data change: arrays of a NumPyClient declare no shape and no dtype.
        arrays[name] = shallow_copy(array)
        arrays[name].data = encode_array(values).data
        start += old.size
    copy = copy_content(content)
    copy[key] = replace_entries_unchecked(record, arrays)
    return copy
