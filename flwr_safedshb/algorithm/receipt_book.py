"""Check the receipts of a round, and record the round for others to check."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flwr_safedshb.aggregation.gram import centred_gram_matrix
from flwr_safedshb.aggregation.rule import Weighing
from flwr_safedshb.algorithm.npz import Arrays
from flwr_safedshb.algorithm.receipts import (
    KnownNode,
    SignedReceipt,
    StepFacts,
    find_problems,
    hash_arrays,
)
from flwr_safedshb.algorithm.round_record import Receipts, RoundRecord
from flwr_safedshb.algorithm.wire import decode_arrays

if TYPE_CHECKING:
    from flwr.app import ArrayRecord

    from flwr_safedshb.algorithm.screening import Accepted


class ReceiptBook:
    """What the server knows of the nodes' receipts in a run.

    Parameters
    ----------
    folder : Path
        Of the records.
    keeps : {"gram", "momentums"}
    rounds_done : int
        Earlier rounds, whose records are in the folder.

    Raises
    ------
    RecordError
        If one of these records is missing.
    """

    def __init__(self, folder: Path, keeps: Receipts, rounds_done: int) -> None:
        self._folder, self._keeps = folder, keeps
        self._known: dict[int, KnownNode] = {}
        for number in range(1, rounds_done + 1):
            for node, receipt in RoundRecord.read(folder, number).replies:
                self._known[node] = KnownNode(receipt.key, receipt.parse()[1])

    def open_page(
        self, number: int, session: str, local_steps: int, model: ArrayRecord
    ) -> ReceiptPage:
        """Return the page of a round, from 1 on, in which a model is sent."""
        return ReceiptPage(self, number, session, local_steps, model)

    def check(self, expected: StepFacts, receipt: SignedReceipt) -> bool:
        """Return whether a receipt is in order, and remember it if so."""
        before = self._known.get(expected.node)
        known, problems = find_problems(receipt, vars(expected), before)
        if known is None or problems:
            return False
        self._known[expected.node] = known
        return True

    def write(self, record: RoundRecord) -> None:
        """Write the record of a round."""
        record.write(self._folder)

    def select_arrays(
        self, model: ArrayRecord, replies: Sequence[Accepted], num_malicious: int
    ) -> Arrays:
        """Return what is kept of the model and of the momentums."""
        if self._keeps == "gram":
            # No rule is asked with fewer, and a centre may not exist.
            if len(replies) <= 2 * num_malicious:
                return {}
            layers = [reply.layers for reply in replies]
            return {"gram": centred_gram_matrix(layers, num_malicious)}
        kept: Arrays = dict(
            zip((f"model/{n}" for n in model), decode_arrays(model), strict=True)
        )
        for i, reply in enumerate(replies):
            kept |= {f"{i}/{n}": x for n, x in zip(model, reply.layers, strict=True)}
        return kept


@dataclass(frozen=True)
class ReceiptPage:
    """The part of a book about one round.

    Attributes
    ----------
    book : ReceiptBook
    number : int
    session : str
    local_steps : int
    model : ArrayRecord
    """

    book: ReceiptBook
    number: int
    session: str
    local_steps: int
    model: ArrayRecord

    def accepts(self, node: int, reply: Accepted) -> bool:
        """Return whether a reply has a receipt that is in order."""
        receipt = SignedReceipt.from_records(reply.records)
        if receipt is None:
            return False
        facts = StepFacts(
            node,
            self.session,
            (self.number - 1) * self.local_steps,
            self.local_steps,
            hash_arrays(decode_arrays(self.model)),
            hash_arrays(reply.layers),
        )
        return self.book.check(facts, receipt)

    def record(
        self,
        replies: Sequence[tuple[int, Accepted]],
        num_malicious: int,
        weighing: Weighing | None,
        learning_rate: float,
        skipped: bool,
    ) -> None:
        """Write what the server did with the replies."""
        kappa = math.inf if weighing is None else weighing.kappa
        signed = [(n, SignedReceipt.from_records(r.records)) for n, r in replies]
        self.book.write(
            RoundRecord(
                self.number,
                self.session,
                hash_arrays(decode_arrays(self.model)),
                num_malicious,
                learning_rate,
                skipped,
                None if weighing is None else weighing.weights.tolist(),
                kappa if kappa is not None and kappa < math.inf else None,
                [(node, receipt) for node, receipt in signed if receipt is not None],
                self.book.select_arrays(
                    self.model, [reply for _, reply in replies], num_malicious
                ),
            )
        )
