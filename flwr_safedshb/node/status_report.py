"""What the terminal of a node says: what was served, what is spent, what is left."""

from __future__ import annotations

import threading
import time
from logging import INFO, WARNING
from pathlib import Path

# To read the ledger takes more than to answer a message.
_SECONDS = 60.0


class Report:
    """Says so once a minute, if anything was served since.

    Parameters
    ----------
    state_dir : Path or None
        Where the node's ledger is; None if it keeps none.
    """

    def __init__(self, state_dir: Path | None) -> None:
        self._state_dir = state_dir
        self._said, self._served = time.monotonic(), 0

    def tell(self, served: int, last: str) -> None:
        """Say what was served, in a thread of its own: messages do not wait for it."""
        if served == self._served or time.monotonic() - self._said < _SECONDS:
            return
        self._said, self._served = time.monotonic(), served
        threading.Thread(target=self._tell, args=(served, last), daemon=True).start()

    def _tell(self, served: int, last: str) -> None:
        from flwr.common import log

        from flwr_safedshb.algorithm.budget import LEDGER_NAME
        from flwr_safedshb.privacy.ledger.database import LedgerError

        log(INFO, "%d messages answered, the last in %s", served, last)
        try:
            if self._state_dir and (path := self._state_dir / LEDGER_NAME).exists():
                log(INFO, "%s", budget(path))
        except LedgerError as error:
            log(WARNING, "The ledger cannot be read: %s", error)


def budget(path: Path) -> str:
    """Return what is spent and left of a ledger's budget, in words."""
    from flwr_safedshb.privacy.ledger.snapshot import open_snapshot

    with open_snapshot(path) as ledger:
        spent, limit = ledger.epsilon(), ledger.max_epsilon
        steps = sum(charge.steps for charge in ledger.charges())
        return (
            f"{steps} steps charged: epsilon = {spent:.4g} of {limit:g} spent at "
            f"delta = {ledger.delta:g}, {max(limit - spent, 0.0):.4g} left"
        )
