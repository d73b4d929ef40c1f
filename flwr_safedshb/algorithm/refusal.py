"""What a node refuses, and what the server may know of an error on a node."""

from __future__ import annotations

from logging import ERROR

from flwr.common import log

from flwr_safedshb.privacy.ledger.ledger import BudgetExhausted, LedgerError
from flwr_safedshb.stop_signal import is_stop_signal


class RefusedError(RuntimeError):
    """The client does not take the step.

    Its text reaches the server: it says which rule was broken and nothing about data.
    """


def to_refusal(error: BaseException) -> RefusedError:
    """Turn an error into a refusal that quotes no data; log the rest on this node.

    Every error counts, also one that is not an `Exception`: data that could end the
    process would reveal themselves by the silence of their node.

    Raises
    ------
    BaseException
        The error itself, if the node's owner stops the node.
    """
    # Needs torch, which servers do not need.
    from flwr_safedshb.privacy.losses import UnsupportedModelError

    match error:
        case RefusedError():
            return error
        case BudgetExhausted():
            text = "the privacy budget of this node is spent; nothing was released"
        case LedgerError():
            log(ERROR, "%s", error)
            text = "the privacy ledger of this node cannot be used"
        case UnsupportedModelError():
            text = str(error)
        case _ if is_stop_signal(error):
            raise error
        case _:
            log(ERROR, "The step failed", exc_info=error)
            text = "the step failed; the log of this node says why"
    return RefusedError(text)
