"""Aggregate private evaluations: noisy counts of n nodes, f of which may lie.

Every node reports sums over its own examples, with noise of a stated standard
deviation. Every node has weight one, however many examples it claims. The server
computes

- the median of the nodes' figures, and their mean without the f largest and smallest;
- an interval for the **median over the honest nodes** of their true figures, which
  holds with probability 95 % whatever f nodes say.

Proof of the interval. For each node take b - z s and b + z s, where b is its figure, s
its stated deviation, and z such that the true figures of all h = n - f honest nodes lie
between theirs with that probability (Bonferroni). The k-th smallest of the honest
figures is then at least the k-th smallest of all lower ends, because ends that are
added can only lower it, and at most the (k + f)-th smallest of all upper ends. A lie
about s is a lie like any other.  QED

**For f >= n/3 liars alone can take either end to its limit** (0 or 1 for an accuracy),
and no interval that always holds can prevent it: f of h <= 2f honest figures can be the
lower or the upper half, which a median lies between, and f liars can look like these.
The metrics say so (`ends-open-to-liars`). For f < n/3 both ends lie between those of
honest nodes.

**It says nothing of the pooled accuracy**, the share of right answers among the
examples of all honest nodes, which is another number where sizes and figures differ. No
useful interval for that follows from the replies: a node claims its own number of
examples, and one liar who claims a billion of them would be the pool.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from logging import INFO, WARNING
from statistics import NormalDist
from typing import cast

import numpy as np
from flwr.app import ConfigRecord, Message, MetricRecord
from flwr.common import log
from numpy.typing import NDArray

from flwr_safedshb.algorithm import wire
from flwr_safedshb.algorithm.screening import HONEST_FAILURES, match_replies
from flwr_safedshb.algorithm.wire import MOMENTUM_TAG

Floats = NDArray[np.float64]
Metrics = dict[str, int | float | list[int] | list[float]]

CONFIDENCE = 0.95
_MAX_CLASSES = 10_000


@dataclass(frozen=True)
class EvaluationSchedule:
    """When nodes evaluate the model privately, and how.

    Attributes
    ----------
    every : int
        Rounds from one evaluation to the next; the last model is always evaluated.
    max_loss : float
        Losses count up to this value; the noise in the mean loss is proportional to it.
    per_class : bool
    """

    every: int
    max_loss: float = 4.0
    per_class: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.every, bool) or not isinstance(self.every, int):
            raise ValueError(f"evaluate_every={self.every!r} must be a whole number")
        if self.every < 1:
            raise ValueError(
                f"evaluate_every={self.every} must be at least 1; leave it out to "
                "evaluate in no round"
            )
        low, high = wire.MAX_LOSS_RANGE
        if not low <= self.max_loss <= high:
            raise ValueError(
                f"evaluate_max_loss={self.max_loss} must lie in [{low:g}, {high:g}]"
            )

    @classmethod
    def from_settings(
        cls, every: int | None, max_loss: float, per_class: bool, fraction: float
    ) -> EvaluationSchedule | None:
        """Return the schedule that a strategy's arguments ask for, if any."""
        if every is None:
            return None
        if fraction > 0.0:
            raise ValueError(
                f"evaluate_every={every} and fraction_evaluate={fraction} are two ways "
                "to evaluate, and only the first is private; leave one of them out"
            )
        return cls(every, max_loss, per_class)

    def is_due(self, number: int, last: int) -> bool:
        """Return whether nodes evaluate the model after a round."""
        return number % self.every == 0 or number == last

    def make_config(self, number: int, session: str) -> ConfigRecord:
        """Return the config of the evaluation after a round."""
        return ConfigRecord(
            {
                wire.PRIVATE_EVALUATION: number,
                wire.MAX_LOSS: float(self.max_loss),
                wire.PER_CLASS: self.per_class,
                "session": session,
            }
        )


@dataclass(frozen=True)
class NodeCounts:
    """A node's noisy sums over its examples, (2,), and by class, (3, k).

    The two are the right answers and the losses; the three are `wire.CLASS_SUMS`.
    """

    num_examples: float
    noise_std: float
    sums: Floats
    classes: Floats | None


def aggregate_evaluation(
    schedule: EvaluationSchedule,
    sent: Sequence[Message],
    num_malicious: int,
    replies: Iterable[Message],
) -> Metrics | None:
    """Return the metrics of an evaluation; None if too few nodes answered.

    As in training, only a reply that is excluded for its content lowers f, and no reply
    makes this raise an exception.
    """
    reported, excluded = _screen_counts(schedule, sent, replies)
    proven = sum(n for reason, n in excluded.items() if reason not in HONEST_FAILURES)
    f = max(num_malicious - proven, 0)
    if len(reported) <= 2 * f:
        log(
            WARNING,
            "Evaluation skipped: %d nodes answered, and up to %d of them may lie",
            len(reported),
            f,
        )
        return None
    z = _quantile(len(reported) - f)
    found: Metrics = {
        "replies": len(reported),
        "excluded": excluded.total(),
        "num-malicious-nodes": f,
        "confidence": CONFIDENCE,
        "ends-open-to-liars": int(f > 0 and 3 * f >= len(reported)),
    }
    for i, (name, scale) in enumerate((("accuracy", 1.0), ("loss", schedule.max_loss))):
        bounds = scale * np.array([_bound_mean(one, i, z) for one in reported])
        found |= {
            f"median-node-{name}{k}": v for k, v in _median_interval(bounds, f).items()
        }
        kept = np.sort(bounds[:, 1])[f : len(bounds) - f]
        found[f"trimmed-mean-node-{name}"] = float(kept.mean())
        found[f"node-{name}-deviation"] = float(kept.std(ddof=min(1, len(kept) - 1)))
    if schedule.per_class:
        found |= _aggregate_classes(reported, f)
    log(INFO, "\t> %s", _describe_accuracy(found))
    return found


def _describe_accuracy(found: Metrics) -> str:
    """Describe the median accuracy and the interval of the honest nodes' median."""
    name = "median-node-accuracy"
    low, high = (cast(float, found[name + end]) for end in ("-low", "-high"))
    opened = bool(found["ends-open-to-liars"])
    interval = describe_interval(low, high, opened)
    text = (
        f"The median accuracy that nodes report is {found[name]:.3f}; the honest "
        f"nodes' median is {interval} with probability {CONFIDENCE:.0%}, each node "
        "counting once"
    )
    if opened:
        text += "; f >= n/3, so liars alone can take either end to 0 or 1"
    return text


def describe_interval(low: float, high: float, open_to_liars: bool) -> str:
    """Describe an interval of accuracies, without the ends that liars may have moved.

    Parameters
    ----------
    low, high : float
    open_to_liars : bool
        Whether f >= n/3, so that an end at 0 or 1 may be the liars' own.
    """
    if not open_to_liars or (low > 0.0 and high < 1.0):
        return f"{low:.2f}-{high:.2f}"
    if low > 0.0:
        return f"at least {low:.2f}"
    return f"at most {high:.2f}" if high < 1.0 else "anywhere"


def _quantile(honest: int) -> float:
    """Return z so that with 95 % all honest figures lie within z deviations."""
    return NormalDist().inv_cdf(1.0 - (1.0 - CONFIDENCE) / (2 * honest))


def _bound_mean(one: NodeCounts, which: int, z: float) -> Floats:
    """Return lower end, figure and upper end of a node's mean, (3,), in [0, 1]."""
    figure = one.sums[which] / one.num_examples
    reach = z * one.noise_std / one.num_examples
    ends: Floats = np.array([figure - reach, figure, figure + reach])
    return ends.clip(0.0, 1.0)


def _median_interval(bounds: Floats, f: int) -> dict[str, float]:
    """Return the median over n nodes, f of which may lie, and its interval.

    Parameters
    ----------
    bounds : ndarray of shape (n, 3)
        Lower ends, figures, upper ends.
    """
    low, figure, high = np.sort(bounds, axis=0).T
    honest = len(figure) - f
    return {
        "": float(np.median(figure)),
        "-low": float(low[(honest + 1) // 2 - 1]),
        "-high": float(high[honest // 2 + f]),
    }


def _aggregate_classes(reported: Sequence[NodeCounts], f: int) -> Metrics:
    """Return accuracies by class, for the number of classes that most nodes report.

    An accuracy is the ratio of two noisy sums. The ends of its interval are ratios of
    the ends of theirs, each of which may fail with half of the probability.
    """
    classes = [one.classes for one in reported if one.classes is not None]
    sizes = Counter(each.shape[1] for each in classes)
    size, votes = sizes.most_common(1)[0]
    if votes <= 2 * f:
        return {}
    z = _quantile(2 * (votes - f))
    reaches = [z * one.noise_std for one in reported]
    some = [p for p in zip(classes, reaches, strict=True) if p[0].shape[1] == size]
    rows: dict[str, list[float]] = {"": [], "-low": [], "-high": []}
    for k in range(size):
        bounds = np.array([_bound_ratio(c[0, k], c[1, k], reach) for c, reach in some])
        figures = _median_interval(bounds, f)
        for suffix, column in rows.items():
            column.append(figures[suffix])
    return {
        f"median-node-class-accuracy{suffix}": column for suffix, column in rows.items()
    }


def _bound_ratio(
    count: float, correct: float, reach: float
) -> tuple[float, float, float]:
    # The noise of half the count is in the right answers, too.
    wider = math.sqrt(1.25) * reach
    most, least = max(count + reach, 1.0), max(count - reach, 0.0)
    low = min(max((correct - wider) / most, 0.0), 1.0)
    high = min(max((correct + wider) / least, 0.0), 1.0) if least > 0.0 else 1.0
    figure = correct / count if count > 0.0 else 0.5
    return low, min(max(figure, low), high), high


def _screen_counts(
    schedule: EvaluationSchedule,
    sent: Sequence[Message],
    replies: Iterable[Message],
) -> tuple[list[NodeCounts], Counter[str]]:
    """Return the counts of the accepted replies, and the reasons of exclusion."""
    reported: list[NodeCounts] = []
    excluded: Counter[str] = Counter()
    answered, silent, _ = match_replies(sent, replies)
    for node, reply in answered:
        try:
            result = _read_counts(reply, schedule.per_class)
        except Exception:  # no reply may end the run
            result = "malformed"
        if isinstance(result, NodeCounts):
            reported.append(result)
        else:
            excluded[result] += 1
            log(INFO, "\t> Node %d is excluded from the evaluation: %s", node, result)
    if silent:
        excluded["missing"] = len(silent)
    return reported, excluded


def _read_counts(reply: Message, per_class: bool) -> NodeCounts | str:
    """Return the counts in a reply, or the reason why it is excluded."""
    if reply.has_error():
        return "error"
    records = list(reply.content.values())
    if len(records) != 1 or not isinstance(records[0], MetricRecord):
        return "extra-record"
    record: Mapping[str, object] = records[0]
    expected = {wire.NUM_EXAMPLES, wire.NOISE_STD, *wire.SUMS, MOMENTUM_TAG}
    if set(record) != expected | (set(wire.CLASS_SUMS) if per_class else set()):
        return "wrong-keys"
    numbers = [
        _read_number(record[name]) for name in (wire.NUM_EXAMPLES, wire.NOISE_STD)
    ]
    sums = np.array([_read_number(record[name]) for name in wire.SUMS])
    classes = _read_classes(record) if per_class else None
    values = [*numbers, *sums, *(() if classes is None else classes.ravel())]
    if not np.isfinite(values).all():
        return "not-finite"
    if numbers[0] < 1.0 or numbers[1] < 0.0:
        return "malformed"
    return NodeCounts(numbers[0], numbers[1], sums, classes)


def _read_number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("not a number")
    return float(value)


def _read_classes(record: Mapping[str, object]) -> Floats:
    columns = [record[name] for name in wire.CLASS_SUMS]
    if not all(isinstance(c, list) and 2 <= len(c) <= _MAX_CLASSES for c in columns):
        raise ValueError("not a list of classes")
    found = np.array(columns, np.float64)
    if found.ndim != 2:
        raise ValueError("lists of different lengths")
    return found
