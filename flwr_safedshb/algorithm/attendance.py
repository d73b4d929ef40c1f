"""Track nodes that failed to answer, and ask them again with exponential backoff.

Absence and refusal do not prove an adversary, so they do not change f. But an adversary
may fail on purpose, or answer and fail in turn. The damage is bounded:

- A node that failed its last round does not count as present, and while at most 2f
  other nodes are present nobody else is asked: an absent node wastes one step of the
  others, not one in every round.
- The k-th failure of a node excludes it from the next 2^(k-1) - 1 rounds, at most 63,
  and only eight answers in a row take one failure off that count. So a node that
  answers and fails in turn spoils fewer and fewer rounds, in the long run at most one
  in nine; and only where there are at most 2f others, so that it could spoil every
  round by staying away.
- A node that is asked again is drawn like all others: failures never raise its
  probability to be in a round.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

# Answers in a row that take one failure off a node's count.
FORGIVEN_AFTER = 8
# A node that keeps failing is asked at least once in 2**6 rounds.
_MOST_DOUBLINGS = 6

FAILING_NODES = "failing-nodes"
FAILURES, ANSWERS, ASKED_AGAIN = (
    "failing-failures",
    "failing-answers",
    "failing-asked-again",
)


@dataclass(frozen=True)
class FailingNode:
    """The record of a node that failed, until enough answers forgive it.

    Attributes
    ----------
    failures : int
        k, how often it failed, minus the failures that were forgiven.
    answers : int
        Its answers in a row since the last failure.
    asked_again : int
        The first round in which it is asked again.
    """

    failures: int = 0
    answers: int = 0
    asked_again: int = 0

    def after_answer(self) -> FailingNode:
        """Return the record after one more answer."""
        answers = self.answers + 1
        forgiven = int(answers % FORGIVEN_AFTER == 0)
        return replace(self, failures=self.failures - forgiven, answers=answers)

    def after_failure(self, number: int) -> FailingNode:
        """Return the record after a failure in round `number`."""
        wait = 2 ** min(self.failures, _MOST_DOUBLINGS)
        return FailingNode(self.failures + 1, 0, number + wait)


@dataclass(frozen=True)
class Attendance:
    """The nodes of a run that failed; every other node answered every message.

    It is kept in the metrics of the rounds, where users see it, and in the checkpoint.
    """

    failing: Mapping[int, FailingNode] = field(default_factory=dict)

    @classmethod
    def from_metrics(cls, metrics: Mapping[str, object]) -> Attendance:
        """Read the attendance from the metrics of a round; by default nobody failed."""
        names = (FAILING_NODES, FAILURES, ANSWERS, ASKED_AGAIN)
        columns = [cast(Sequence[int], metrics.get(name, ())) for name in names]
        rows = zip(*columns, strict=False)
        return cls({node: FailingNode(*record) for node, *record in rows})

    def to_metrics(self) -> dict[str, list[int]]:
        """Return the metrics that name the nodes which failed; empty if none did."""
        if not self.failing:
            return {}
        nodes = sorted(self.failing)
        records = [self.failing[node] for node in nodes]
        return {
            FAILING_NODES: nodes,
            FAILURES: [record.failures for record in records],
            ANSWERS: [record.answers for record in records],
            ASKED_AGAIN: [record.asked_again for record in records],
        }

    def split(
        self, nodes: Sequence[int], number: int | None = None
    ) -> tuple[list[int], list[int]]:
        """Split nodes into those that count as present, and those to ask again.

        Parameters
        ----------
        nodes : sequence of int
            The connected nodes.
        number : int or None
            The number of the round; None asks all nodes that failed, however recently.
        """
        usable, returning = [], []
        for node in nodes:
            record = self.failing.get(node)
            if record is None or record.answers:
                usable.append(node)
            elif number is None or record.asked_again <= number:
                returning.append(node)
        return usable, returning

    def after_round(
        self, number: int, asked: Collection[int], failed: Collection[int]
    ) -> Attendance:
        """Return the attendance after a round in which `failed` of `asked` failed."""
        failing = dict(self.failing)
        for node in asked:
            if node in failed:
                record = failing.get(node, FailingNode())
                failing[node] = record.after_failure(number)
            elif node in failing:
                failing[node] = failing[node].after_answer()
                if not failing[node].failures:
                    del failing[node]
        return Attendance(failing)
