"""What a node knows of itself, for its owner: its budget, its answers, its workers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from logging import INFO, WARNING
from pathlib import Path

from flwr.common import log

from flwr_safedshb.algorithm.budget import LEDGER_NAME
from flwr_safedshb.node.metrics import (
    METRICS_PATH,
    Page,
    Sample,
    make_metrics_page,
)
from flwr_safedshb.node.status_page import guard_page, make_text_page
from flwr_safedshb.privacy.ledger.database import LedgerError
from flwr_safedshb.privacy.ledger.snapshot import open_snapshot
from flwr_safedshb.privacy.plan import describe_unit

# Between two readings: to read the ledger takes more than to answer a message.
_REPORT_SECONDS = 60.0


@dataclass(frozen=True)
class BudgetStatus:
    """What is spent and left of a ledger's budget."""

    steps: int
    spent: float
    limit: float
    delta: float
    unit: str

    @classmethod
    def read(cls, path: Path) -> BudgetStatus:
        """Read it from a copy of the ledger.

        Raises
        ------
        LedgerError
        """
        with open_snapshot(path) as ledger:
            steps = sum(charge.steps for charge in ledger.charges())
            spent, limit = ledger.statement(), ledger.max_epsilon
            unit = describe_unit(spent.unit)
            return cls(steps, spent.epsilon, limit, ledger.delta, unit)

    @property
    def left(self) -> float:
        """The epsilon that is left."""
        return max(self.limit - self.spent, 0.0)

    def __str__(self) -> str:
        """Return it in words."""
        return (
            f"{self.steps} steps charged: epsilon = {self.spent:.4g} of "
            f"{self.limit:g} spent at delta = {self.delta:g} for {self.unit}, "
            f"{self.left:.4g} left"
        )


class NodeStatus:
    """Count what a node does; log it once a minute if there is news, and serve it.

    Parameters
    ----------
    state_dir : Path or None
        Where the node's ledger is; None if it keeps none.
    """

    def __init__(self, state_dir: Path | None) -> None:
        self._ledger = None if state_dir is None else state_dir / LEDGER_NAME
        self._reported_at, self._num_reported = time.monotonic(), 0
        self._budget: BudgetStatus | None = None
        self._problem = ""
        self.num_answered = self.num_workers = self.num_restarts = 0
        self.last_answered = "nothing yet"
        self.answered_at = 0.0

    def note_answer(self, about: str) -> None:
        """Note that a message was answered."""
        self.num_answered += 1
        self.last_answered, self.answered_at = about, time.time()

    def report(self) -> None:
        """Report in a thread, so that messages do not wait for it."""
        now = time.monotonic()
        is_early = now - self._reported_at < _REPORT_SECONDS
        if self.num_answered == self._num_reported or is_early:
            return
        self._reported_at, self._num_reported = now, self.num_answered
        threading.Thread(target=self._report, daemon=True).start()

    def _report(self) -> None:
        text = "%d messages answered, the last in %s"
        log(INFO, text, self.num_answered, self.last_answered)
        self.read_budget()
        if self._problem:
            log(WARNING, "%s", self._problem)
        elif self._budget is not None:
            log(INFO, "%s", self._budget)

    def read_budget(self) -> None:
        """Read the ledger anew."""
        try:
            if self._ledger is not None and self._ledger.exists():
                self._budget = BudgetStatus.read(self._ledger)
            self._problem = ""
        except LedgerError as error:
            self._problem = f"The ledger cannot be read: {error}"

    def make_pages(self) -> dict[str, Page]:
        """Return the page and the metrics, with the budget of at most a minute ago."""
        self.read_budget()
        return {
            "/": guard_page(self._page),
            METRICS_PATH: guard_page(make_metrics_page(self.collect)),
        }

    def _page(self) -> tuple[str, bytes]:
        budget = "no ledger yet" if self._budget is None else str(self._budget)
        lines = [
            f"{self.num_answered} messages answered, the last: {self.last_answered}",
            self._problem or budget,
            f"{self.num_workers} workers, SuperNode restarted {self.num_restarts} "
            "times",
        ]
        return make_text_page("Node", lines)

    def collect(self) -> Iterator[Sample]:
        """Yield the metrics."""
        yield Sample(
            "safedshb_node_messages",
            "Messages answered.",
            self.num_answered,
            kind="counter",
        )
        yield Sample(
            "safedshb_node_last_answer_timestamp_seconds",
            "When the last one was; 0 if there was none.",
            self.answered_at,
        )
        yield Sample("safedshb_node_workers", "Workers.", self.num_workers)
        yield Sample(
            "safedshb_node_supernode_restarts",
            "How often the SuperNode has ended by itself.",
            self.num_restarts,
            kind="counter",
        )
        yield Sample(
            "safedshb_node_ledger_readable",
            "0 if the ledger cannot be read.",
            float(not self._problem),
        )
        if (budget := self._budget) is not None:
            yield Sample(
                "safedshb_node_steps",
                "Private steps charged to the ledger.",
                budget.steps,
                kind="counter",
            )
            for name, help_, value in (
                ("spent", "Epsilon spent of the ledger.", budget.spent),
                ("left", "Epsilon left.", budget.left),
                ("limit", "Epsilon that may be spent.", budget.limit),
            ):
                yield Sample(f"safedshb_node_epsilon_{name}", help_, value)
