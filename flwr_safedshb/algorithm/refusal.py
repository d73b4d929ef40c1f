"""Turn errors on a node into refusals that reveal nothing about its data."""

from __future__ import annotations

from logging import ERROR

from flwr.common import log

from flwr_safedshb.privacy.ledger.ledger import BudgetExhausted, LedgerError
from flwr_safedshb.stop_signal import is_stop_signal


class RefusedError(RuntimeError):
    """The client refuses a request.

    The text is sent to the server. It names the broken rule and reveals nothing about
    the data.
    """


def to_refusal(error: BaseException) -> RefusedError:
    """Return a refusal that quotes no data; log the error itself on this node.

    Also for a `BaseException`: if data could end the process, the node's silence would
    reveal something about them.

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
