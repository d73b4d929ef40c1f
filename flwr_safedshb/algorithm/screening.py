"""Screen the replies of a round: decode the arrays of each, or say why it is excluded.

Each reply is screened alone, and nothing in it is trusted: the decoded values are
checked, not the shape and dtype that are declared beside them; sizes are compared with
the model's before anything is decoded; nothing is ever unpickled. Weights and metrics
that a client reports are not read. No reply makes this raise.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from logging import INFO, WARNING
from typing import Literal

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common import log
from numpy.typing import NDArray

from flwr_safedshb.algorithm.wire import MOMENTUM_TAG, MisfitError, Template
from flwr_safedshb.flower.compat import Record, is_reply_to

Reason = Literal[
    "missing",
    "error",
    "malformed",
    "no-arrays",
    "extra-record",
    "wrong-keys",
    "too-large",
    "wrong-dtype",
    "wrong-shape",
    "not-finite",
    "unmarked",
    "too-long",
]

# Honest clients can be slow or fail; they never cause the other reasons.
INNOCENT: frozenset[Reason] = frozenset({"missing", "error"})

DTYPE = np.dtype("<f4")
# What a Flower client sends beside its arrays: a Message-API client its number of
# examples, a NumPyClient that, its metrics and its status.
_MAX_METRIC_RECORDS = 1
_MAX_CONFIG_RECORDS = 2
# For a NumPyClient, which cannot read messages for clients of the Message API.
_NUMPY_CLIENT_REMEDY = "; put it into client_app(client_fn), or use ClassicStrategy"
# Characters of a node's own words in the log.
_MAX_WORDS = 300


class ForeignClientsError(RuntimeError):
    """Raised if more clients than can be adversaries send no momentums."""

    def __init__(self, count: int, num_malicious: int) -> None:
        super().__init__(
            f"{count} replies are no momentums of a SafeDSHBClient, and at most "
            f"{num_malicious} can be of adversaries; trained weights, say, must not be "
            "taken for momentums. Use SafeDSHBClient on the nodes, or say "
            "foreign_clients=True if your own clients send momentums, too"
        )


@dataclass(frozen=True)
class Excluded:
    """Why a reply is not aggregated."""

    reason: Reason

    @property
    def is_proof(self) -> bool:
        """Whether only an adversary sends such a reply."""
        return self.reason not in INNOCENT


@dataclass(frozen=True)
class Accepted:
    """The decoded content of a reply that is aggregated.

    Attributes
    ----------
    layers : list of float32 arrays
        Finite, in the shapes and the order of the model's.
    encoded : tuple of bytes
        The same values as they were sent; replies are ordered by them.
    records : list of records
        The whole reply, of which nothing but the arrays is checked.
    """

    layers: list[NDArray[np.float32]]
    encoded: tuple[bytes, ...]
    records: list[Record]


@dataclass(frozen=True)
class Screened:
    """The screened replies of a round.

    Attributes
    ----------
    accepted : list of (node, Accepted)
    excluded : Counter of reasons
    proven : int
        How many excluded replies only an adversary sends.
    ignored : int
        How many messages were no replies of this round.
    failed : set of int
        The nodes that sent nothing, or an error.
    """

    accepted: list[tuple[int, Accepted]]
    excluded: Counter[Reason]
    proven: int
    ignored: int
    failed: set[int]


def match_replies(
    sent: Sequence[Message], replies: Iterable[Message]
) -> tuple[list[tuple[int, Message]], list[int], int]:
    """Match replies to the messages of a round; a message counts one reply.

    Parameters
    ----------
    sent : sequence of Message
        The messages, each to a node of its own.
    replies : iterable of Message

    Returns
    -------
    answered : list of (node, reply)
    silent : list of int
        The nodes without a reply.
    ignored : int
        How many messages reply to nothing in this round, or a second time.
    """
    waiting = {m.metadata.message_id: m.metadata.dst_node_id for m in sent}
    answered: list[tuple[int, Message]] = []
    ignored = 0
    for reply in replies:
        name = reply.metadata.reply_to_message_id
        node = waiting.get(name)
        if node is None or not is_reply_to(reply, name, node):
            log(WARNING, "\t> A message that answers nothing of this round: ignored")
            ignored += 1
        else:
            answered.append((waiting.pop(name), reply))
    return answered, list(waiting.values()), ignored


def screen_replies(
    template: Template,
    sent: Sequence[Message],
    replies: Iterable[Message],
    foreign: bool = False,
    norm_bound: float = math.inf,
) -> Screened:
    """Screen the replies to the messages of a round.

    What passes is ordered by content: node ids and the order of arrival differ between
    engines, and the rounding of a sum depends on its order.

    Parameters
    ----------
    template : Template
        Of the model.
    sent : sequence of Message
    replies : iterable of Message
    foreign : bool
        Whether clients that are not ours are expected, whose replies have no tag.
    norm_bound : float
        No honest reply is longer.
    """
    accepted: list[tuple[int, Accepted]] = []
    excluded: Counter[Reason] = Counter()
    failed: set[int] = set()
    answered, silent, ignored = match_replies(sent, replies)
    for node, reply in answered:
        result = screen_reply(template, reply, foreign, norm_bound)
        if isinstance(result, Accepted):
            accepted.append((node, result))
            continue
        excluded[result.reason] += 1
        if not result.is_proof:
            failed.add(node)
        log(
            INFO,
            "\t> Node %d is excluded: %s%s",
            node,
            result.reason,
            _quote_error(reply),
        )
    if silent:
        excluded["missing"] = len(silent)
        failed.update(silent)
        log(INFO, "\t> No reply from %s", ", ".join(map(str, silent)))
    accepted.sort(key=lambda pair: pair[1].encoded)
    proven = sum(n for reason, n in excluded.items() if Excluded(reason).is_proof)
    return Screened(accepted, excluded, proven, ignored, failed)


def check_first_round(metrics: Mapping[str, object], num_malicious: int) -> None:
    """End a run whose first round has no usable reply.

    Raises
    ------
    RuntimeError
        If more replies were excluded than adversaries could have sent, and none passed.
    """
    reasons = {
        name.removeprefix("excluded-"): count
        for name, count in metrics.items()
        if name.startswith("excluded-") and name != "excluded-missing"
    }
    failed = sum(count for count in reasons.values() if isinstance(count, int))
    if not metrics["replies"] and failed > num_malicious:
        told = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
        raise RuntimeError(
            f"no node could take the first step ({told}), so nothing was trained; what "
            "they said is in the log above, and the rest in the logs of the nodes"
        )


def screen_reply(
    template: Template,
    reply: Message,
    foreign: bool = False,
    norm_bound: float = math.inf,
) -> Accepted | Excluded:
    """Decode the layers of a reply, or return the reason why it is excluded."""
    try:
        return _decode_reply(template, reply, foreign, norm_bound)
    except Exception:  # no reply may end the run
        return Excluded("malformed")


def _decode_reply(
    template: Template, reply: Message, foreign: bool, norm_bound: float
) -> Accepted | Excluded:
    if reply.has_error():
        return Excluded("error")
    records = list(reply.content.values())
    arrays = [record for record in records if isinstance(record, ArrayRecord)]
    if not arrays:
        return Excluded("no-arrays")
    if (
        len(arrays) > 1
        or _count_records(records, MetricRecord) > _MAX_METRIC_RECORDS
        or _count_records(records, ConfigRecord) > _MAX_CONFIG_RECORDS
    ):
        return Excluded("extra-record")
    try:
        found, encoded = template.decode_untrusted(arrays[0], DTYPE)
    except MisfitError as error:
        return Excluded(error.reason)
    layers = [layer.view(np.float32) for layer in found]
    if not all(np.isfinite(layer).all() for layer in layers):
        return Excluded("not-finite")
    if not foreign and not any(MOMENTUM_TAG in record for record in records):
        return Excluded("unmarked")
    if norm_bound < math.inf and l2_norm(layers) > norm_bound:
        return Excluded("too-long")
    return Accepted(layers, encoded, records)


def l2_norm(layers: Iterable[NDArray[np.floating]]) -> float:
    """Return the L2 norm of all layers as one vector, computed in float64."""
    return math.hypot(*(np.linalg.norm(x.astype(np.float64)) for x in layers))


def _count_records(records: Sequence[object], kind: type) -> int:
    return sum(isinstance(record, kind) for record in records)


def _quote_error(reply: Message) -> str:
    """Quote the error of a node, made safe for one line of a log."""
    words = getattr(reply.error, "reason", "") if reply.has_error() else ""
    if not isinstance(words, str) or not words:
        return ""
    # The node may be hostile, and a terminal obeys some characters.
    plain = "".join(c if c.isprintable() else " " for c in words[:_MAX_WORDS])
    cure = _NUMPY_CLIENT_REMEDY if "'fitins." in plain else ""
    return f": {plain}{'...' if len(words) > _MAX_WORDS else ''}{cure}"
