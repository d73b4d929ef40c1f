"""What a server may know of an error on a node."""

from __future__ import annotations

from logging import ERROR

from flwr.common import log

from flwr_safedshb.algorithm.budget import RefusedError
from flwr_safedshb.privacy.ledger.ledger import BudgetExhausted, LedgerError
from flwr_safedshb.privacy.losses import UnsupportedModelError
from flwr_safedshb.stop_signal import is_stop_signal


def refusal(error: BaseException) -> RefusedError:
    """Return what the server may know of an error: the texts of others may quote data.

    The rest is in the log of this node. Whatever is raised counts, also what is no
    `Exception`: data that end a process would tell of themselves by silence.

    Raises
    ------
    BaseException
        The error itself, if it is the owner who stops the node.
    """
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
