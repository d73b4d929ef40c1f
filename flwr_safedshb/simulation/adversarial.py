"""The adversary lives in the network: a Grid that replaces what f nodes reply.

So every Flower strategy can be attacked unchanged, and no strategy holds attack code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
from flwr.app import Error, Message, RecordDict
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
from flwr_safedshb.simulation.evaluation_attack import asks_for_counts, lie_like

# From honest vectors of shape (h, d), by node id, to f vectors; an `Attack` is one.
AttackFunction = Callable[[Floats, int, np.random.Generator, Aggregate], Floats]
# From the arrays of the model that was sent to a gradient, (d,).
GradientFunction = Callable[[Arrays], NDArray[np.float64]]


def mean(vectors: Floats, f: int) -> Floats:
    """Average, (d,), of vectors, (n, d), whatever f."""
    return np.asarray(vectors.mean(axis=0))


class AdversarialGrid(WrappedGrid):
    """A Grid of which f nodes are adversarial.

    The nodes with the f largest ids never get their training messages. In their place
    the adversaries, having seen every honest reply to the same batch of messages, send
    what `attack` says, in replies that otherwise look like those of an honest node;
    where no honest node has sent a vector, they answer with an error as well.
    Messages that are not for training pass, and so does everything under an attack on
    data: its nodes run the honest protocol.

    Parameters
    ----------
    grid : Grid
    attack : Attack, or callable (honest, f, rng, aggregate) -> (f, d) array
        Any values; they are sent in the dtype of the honest vectors.
    num_malicious_nodes : int
        f.
    aggregate : callable, optional
        The rule the adversaries believe the server to use; a `Rule` will do. By default
        the mean.
    seed : int
        Of the generator given to `attack`.
    gradient : callable, optional
        From the arrays of the model that a training message carries to the gradient of
        the loss on the adversaries' own examples, for an `Attack` that makes use of it.
    """

    def __init__(
        self,
        grid: Grid,
        attack: AttackFunction,
        num_malicious_nodes: int,
        aggregate: Aggregate = mean,
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
        self._aggregate = aggregate
        self._rng = np.random.default_rng(seed)
        self._gradient = gradient
        self._steps: list[_Step] = []
        self._made: dict[str, Message] = {}
        self._intercepted = 0

    @property
    def malicious_node_ids(self) -> list[int]:
        """The f largest node ids."""
        nodes = sorted(self.grid.get_node_ids())
        return nodes[len(nodes) - self._num_malicious :]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Push what is for honest nodes and keep the rest."""
        messages = list(messages)
        step, passed = self._intercept(messages)
        pushed = list(self.grid.push_messages(passed))
        step.waiting = set(pushed)
        self._steps.append(step)
        kept = {id(message): name for name, message in step.intercepted.items()}
        others = iter(pushed)
        return [kept.get(id(message)) or next(others) for message in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Pull honest replies; adversarial ones come when all of those are there."""
        wanted = set(message_ids)
        asked = wanted & self._waiting()
        try:
            replies = list(self.grid.pull_messages(asked))
        except Exception:
            # Adversaries would wait for ever for a reply that cannot be read.
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
                for reply in self._adversarial(step):
                    self._made[reply.metadata.reply_to_message_id] = reply
            step.done = complete and not step.intercepted
        self._steps = [step for step in self._steps if not step.done]
        # Only what was asked for: the rest may be asked for one by one.
        made = [self._made.pop(i) for i in wanted & self._made.keys()]
        return replies + made

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Send to the honest nodes, wait for them, and add what adversaries send."""
        step, passed = self._intercept(messages)
        step.replies = list(self.grid.send_and_receive(passed, timeout=timeout))
        return [*step.replies, *self._adversarial(step)]

    def _waiting(self) -> set[str]:
        return set().union(*(step.waiting for step in self._steps))

    def _intercept(self, messages: Iterable[Message]) -> tuple[_Step, list[Message]]:
        malicious = set(self.malicious_node_ids if self._intercepts else ())
        step, passed = _Step(), []
        for message in messages:
            training = message.metadata.message_type.split(".")[0] == "train"
            attacked = training or asks_for_counts(message)
            if attacked and message.metadata.dst_node_id in malicious:
                self._intercepted += 1
                message_id = f"intercepted-{self._intercepted}"
                set_message_id(message, message_id)
                step.intercepted[message_id] = message
            else:
                passed.append(message)
        return step, passed

    def _adversarial(self, step: _Step) -> Iterator[Message]:
        """Attack with what the honest nodes of the step have sent."""
        asked = list(step.intercepted.values())
        step.intercepted = {}
        if asked and asks_for_counts(asked[0]):
            yield from _lies(asked, step.replies)
            return
        honest = [
            reply
            for reply in step.replies
            if reply.has_content() and reply.content.array_records
        ]
        if not honest:
            yield from map(_failed, asked)
            return
        if not asked:
            return
        honest.sort(key=lambda reply: reply.metadata.src_node_id)
        vectors = np.stack([flattened(reply.content) for reply in honest])
        attack = self._attack
        if self._gradient and isinstance(attack, Attack) and attack.wants_gradient:
            model = decode_arrays(next(iter(asked[0].content.array_records.values())))
            attack = attack.with_gradient(self._gradient(model))
        sent = attack(vectors, len(asked), self._rng, self._aggregate)
        for message, vector in zip(asked, sent, strict=True):
            reply = Message(replaced(honest[0].content, vector), reply_to=message)
            set_message_id(reply, f"{message.metadata.message_id}-reply")
            yield reply


def _lies(asked: list[Message], replies: list[Message]) -> Iterator[Message]:
    content = lie_like(replies)
    for message in asked:
        if content is None:
            yield _failed(message)
            continue
        reply = Message(content, reply_to=message)
        set_message_id(reply, f"{message.metadata.message_id}-reply")
        yield reply


def _failed(message: Message) -> Message:
    """Return an error, so that nobody waits for what will not come."""
    error = Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "no honest vector to go by")
    reply = Message(error, reply_to=message)
    set_message_id(reply, f"{message.metadata.message_id}-reply")
    return reply


@dataclass
class _Step:
    """Messages pushed together, and what has come back."""

    waiting: set[str] = field(default_factory=set)
    intercepted: dict[str, Message] = field(default_factory=dict)
    replies: list[Message] = field(default_factory=list)
    done: bool = False


def flattened(content: RecordDict) -> NDArray[np.float64]:
    """Return all arrays of the first ArrayRecord as one vector, (d,)."""
    record = next(iter(content.array_records.values()))
    layers = [layer.reshape(-1) for layer in decode_arrays(record)]
    return np.concatenate(layers, dtype=np.float64)


def replaced(content: RecordDict, vector: NDArray[np.floating]) -> RecordDict:
    """Return a copy whose first ArrayRecord holds the values of `vector`, (d,)."""
    key, record = next(iter(content.array_records.items()))
    arrays = {}
    start = 0
    for (name, array), old in zip(record.items(), decode_arrays(record), strict=True):
        part = vector[start : start + old.size]
        with np.errstate(over="ignore", invalid="ignore"):
            values = part.astype(old.dtype).reshape(old.shape)
        # What a NumPyClient sends declares neither shape nor dtype.
        arrays[name] = shallow_copy(array)
        arrays[name].data = encode_array(values).data
        start += old.size
    copy = copy_content(content)
    copy[key] = replace_entries_unchecked(record, arrays)
    return copy
