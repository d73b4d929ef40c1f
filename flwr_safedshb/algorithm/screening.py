"""Screen the replies of a round: decode the arrays of each, or say why it is excluded.

Each reply is screened alone and trusted in nothing. Sizes are compared with the
model's before anything is decoded. The decoded values are checked, not the shape and
dtype that the reply declares. Nothing is unpickled. Weights and metrics that a client
reports are not read. No reply makes the screening raise an exception.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from logging import INFO, WARNING
from typing import Literal

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common import log
from numpy.typing import NDArray

from flwr_safedshb.algorithm.wire import MOMENTUM_TAG, Template, TemplateMismatchError
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
    "no-receipt",
]

# An honest client can be slow or fail, and a node whose state-dir was lost signs with
# another key. Every other reason proves an adversary.
HONEST_FAILURES: frozenset[Reason] = frozenset({"missing", "error", "no-receipt"})

# The dtype of a momentum on the wire.
DTYPE = np.dtype("<f4")
# The most records that a Flower client sends beside its arrays. A Message-API client
# sends one MetricRecord; a NumPyClient sends one, and two ConfigRecords (its metrics
# and its status).
_MAX_METRIC_RECORDS = 1
_MAX_CONFIG_RECORDS = 2
# Appended to the error of a NumPyClient that was sent a message of the Message API.
_NUMPY_CLIENT_REMEDY = "; put it into client_app(client_fn), or use ClassicStrategy"
# Characters of a node's error message that the log quotes.
_MAX_ERROR_LENGTH = 300


class ForeignClientsError(RuntimeError):
    """More than f replies have no momentum tag: honest clients send something else."""

    def __init__(self, count: int, num_malicious: int) -> None:
        super().__init__(
            f"{count} replies do not carry the tag of a SafeDSHBClient's momentum, and "
            f"only {num_malicious} can come from adversaries; trained weights, say, "
            "must not be aggregated as momentums. Use SafeDSHBClient on the nodes, or "
            "set foreign_clients=True if your own clients send momentums, too"
        )


@dataclass(frozen=True)
class Excluded:
    """A reply that is not aggregated, and the reason."""

    reason: Reason

    @property
    def proves_adversary(self) -> bool:
        """Whether the reply proves that its sender is an adversary."""
        return self.reason not in HONEST_FAILURES


@dataclass(frozen=True)
class Accepted:
    """The decoded content of a reply that is aggregated.

    Attributes
    ----------
    layers : list of float32 arrays
        The momentum: finite, in the order and shapes of the model's arrays.
    encoded : tuple of bytes
        The same arrays in the bytes that were sent; replies are sorted by these.
    records : list of records
        The whole reply; only its arrays were checked.
    """

    layers: list[NDArray[np.float32]]
    encoded: tuple[bytes, ...]
    records: list[Record]


@dataclass(frozen=True)
class ScreeningResult:
    """The result of screening all replies of a round.

    Attributes
    ----------
    accepted : list of (node, Accepted)
    excluded : Counter of reasons
    proven_adversaries : int
        How many excluded replies prove that their sender is an adversary.
    ignored : int
        How many messages did not answer a message of this round.
    failed : set of int
        The nodes that sent nothing or an error.
    reasons : dict of int to reason
        Why each excluded node was.
    """

    accepted: list[tuple[int, Accepted]]
    excluded: Counter[Reason]
    proven_adversaries: int
    ignored: int
    failed: set[int]
    reasons: dict[int, Reason]


def match_replies(
    sent: Sequence[Message], replies: Iterable[Message]
) -> tuple[list[tuple[int, Message]], list[int], int]:
    """Match each reply to its message; only the first reply to a message counts.

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
        How many replies match no message of this round, or are second replies to one.
    """
    waiting = {m.metadata.message_id: m.metadata.dst_node_id for m in sent}
    answered: list[tuple[int, Message]] = []
    ignored = 0
    for reply in replies:
        message_id = reply.metadata.reply_to_message_id
        node = waiting.get(message_id)
        if node is None or not is_reply_to(reply, message_id, node):
            log(WARNING, "\t> Ignored a reply that matches no message of this round")
            ignored += 1
        else:
            answered.append((waiting.pop(message_id), reply))
    return answered, list(waiting.values()), ignored


def screen_replies(
    template: Template,
    sent: Sequence[Message],
    replies: Iterable[Message],
    foreign: bool = False,
    norm_bound: float = math.inf,
    has_receipt: Callable[[int, Accepted], bool] | None = None,
) -> ScreeningResult:
    """Screen the replies to the messages of a round.

    Accepted replies are sorted by their bytes: the rounding of a sum depends on its
    order, and node ids and the order of arrival differ between engines.

    Parameters
    ----------
    template : Template
        Names and shapes of the model's arrays.
    sent : sequence of Message
    replies : iterable of Message
    foreign : bool
        Whether replies without the momentum tag are accepted, because the clients are
        not SafeDSHBClients.
    norm_bound : float
        The largest L2 norm of an honest reply; longer replies are excluded.
    has_receipt : callable (node, Accepted) -> bool, optional
        Whether a reply has a receipt that is in order; others are excluded.
    """
    accepted: list[tuple[int, Accepted]] = []
    excluded: Counter[Reason] = Counter()
    failed: set[int] = set()
    reasons: dict[int, Reason] = {}
    answered, silent, ignored = match_replies(sent, replies)
    for node, reply in answered:
        result = screen_reply(template, reply, foreign, norm_bound)
        if isinstance(result, Accepted) and has_receipt is not None:
            result = result if has_receipt(node, result) else Excluded("no-receipt")
        if isinstance(result, Accepted):
            accepted.append((node, result))
            continue
        excluded[result.reason] += 1
        reasons[node] = result.reason
        if not result.proves_adversary:
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
        reasons |= dict.fromkeys(silent, "missing")
        log(INFO, "\t> No reply from %s", ", ".join(map(str, silent)))
    accepted.sort(key=lambda pair: pair[1].encoded)
    num_proven = sum(
        n for reason, n in excluded.items() if Excluded(reason).proves_adversary
    )
    return ScreeningResult(accepted, excluded, num_proven, ignored, failed, reasons)


def check_first_round(metrics: Mapping[str, object], num_malicious: int) -> None:
    """Raise if the first round has no usable reply, so that no run trains nothing.

    Raises
    ------
    RuntimeError
        If no reply was accepted and more than `num_malicious` were excluded.
    """
    reasons = {
        name.removeprefix("excluded-"): count
        for name, count in metrics.items()
        if name.startswith("excluded-") and name != "excluded-missing"
    }
    num_excluded = sum(n for n in reasons.values() if isinstance(n, int))
    if not metrics["replies"] and num_excluded > num_malicious:
        listed = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
        raise RuntimeError(
            f"no node could take the first step ({listed}), so nothing was trained; "
            "see the nodes' errors in the log above, and the nodes' own logs"
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
        decoded, encoded = template.decode_untrusted(arrays[0], DTYPE)
    except TemplateMismatchError as error:
        return Excluded(error.reason)
    layers = [layer.view(np.float32) for layer in decoded]
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
    """Quote a node's error message in one line that is safe to print."""
    message = getattr(reply.error, "reason", "") if reply.has_error() else ""
    if not isinstance(message, str) or not message:
        return ""
    # The node may be hostile, and a terminal executes escape sequences.
    start = message[:_MAX_ERROR_LENGTH]
    printable = "".join(c if c.isprintable() else " " for c in start)
    ellipsis = "..." if len(message) > _MAX_ERROR_LENGTH else ""
    remedy = _NUMPY_CLIENT_REMEDY if "'fitins." in printable else ""
    return f": {printable}{ellipsis}{remedy}"
