"""The foreman: hands the tasks of a SuperNode to the workers of their runs.

See `flwr_safedshb.node.worker_pool` for who does what, and what is guaranteed.
"""

from __future__ import annotations

import select
import socket
import time
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field
from logging import INFO, WARNING
from typing import TYPE_CHECKING

from flwr_safedshb.node.approvals import Approvals
from flwr_safedshb.node.log_tail import Voice
from flwr_safedshb.node.worker_pool import Nursery, Words, receive, send

if TYPE_CHECKING:
    from flwr_safedshb.node.flower_patches.runtime_client import Claim, SuperNode

# Runs that are served at a time, and seconds of silence after which one is over.
_MAX_WORKERS = 8
_SILENCE = 900.0


@dataclass(eq=False)
class _Hand:
    """The foreman's side of a worker."""

    link: socket.socket
    seen: float
    waiting: list[Claim] = field(default_factory=list)
    claim: Claim | None = None
    head: bytes = b""
    about: str = "a message"


class Foreman:
    """Hands the tasks of a SuperNode to the workers of their runs.

    Parameters
    ----------
    nursery : Nursery
    supernode : SuperNode
    approvals : Approvals
        Which apps may be run.
    """

    def __init__(
        self, nursery: Nursery, supernode: SuperNode, approvals: Approvals
    ) -> None:
        self._nursery, self._supernode = nursery, supernode
        self._approvals = approvals
        self._hands: OrderedDict[int, _Hand] = OrderedDict()
        self.served, self.last = 0, ""

    def assign(self, claim: Claim) -> None:
        """Give a task to the worker of its run, a new one if need be."""
        hand = self._hands.get(claim.run_id)
        if hand is None:
            hand = _Hand(self._nursery.worker(), time.monotonic())
            self._hands[claim.run_id] = hand
        self._hands.move_to_end(claim.run_id)
        hand.waiting.append(claim)
        self._next(hand)

    def attend(self, seconds: float, *others: Voice) -> None:
        """Listen to workers and others for a while; let go of workers that are over.

        Returns as soon as anybody has said something.
        """
        links = {hand.link: run for run, hand in self._hands.items()}
        speakers: list[socket.socket | Voice] = [*links, *others]
        for one in select.select(speakers, [], [], seconds)[0]:
            if isinstance(one, Voice):
                one.hear()
            else:
                self._hear(links[one])
        now = time.monotonic()
        idle = [r for r, h in self._hands.items() if h.claim is None]
        over = [r for r in idle if now - self._hands[r].seen > _SILENCE]
        over += idle[: max(len(self._hands) - _MAX_WORKERS, 0)]
        for run in {*over}:
            self._hands.pop(run).link.close()

    def close(self) -> None:
        """End all workers."""
        for hand in self._hands.values():
            hand.link.close()
        self._hands.clear()

    def _next(self, hand: _Hand) -> None:
        if hand.claim is not None or not hand.waiting:
            return
        hand.claim, hand.head = hand.waiting.pop(0), b""
        words: Words = {
            "address": self._supernode.address,
            "token": hand.claim.token,
            "approved": self._approvals.words(),
        }
        with suppress(OSError):  # it has died, which `_hear` will find
            send(hand.link, words)

    def _hear(self, run: int) -> None:
        from flwr.common import log

        hand = self._hands[run]
        hand.seen = time.monotonic()
        try:
            words = receive(hand.link)
        except OSError:
            words = None
        if words is None:
            log(WARNING, "The worker of run %d has died", run)
            hand.link.close()
            del self._hands[run]
            self._bury(hand)
            for claim in hand.waiting:
                self.assign(claim)
        elif "head" in words:
            hand.head = bytes.fromhex(str(words["head"]))
            hand.about = str(words["about"])
        else:
            self.served, self.last = self.served + 1, f"{hand.about} of run {run}"
            log(INFO, "Answered: %s", self.last)
            hand.claim = None
            self._next(hand)

    def _bury(self, hand: _Hand) -> None:
        from flwr.common import log

        from flwr_safedshb.node.flower_patches.runtime_client import give_up

        if hand.claim is None:
            return
        try:
            reason = "the process of the ClientApp has died"
            give_up(self._supernode, hand.claim.token, hand.head, reason)
        except Exception as error:
            log(WARNING, "No error could be sent for it: %s", type(error).__name__)
