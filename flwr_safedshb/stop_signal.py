"""Tell the owner who stops a process from data that raise errors of any kind."""

from __future__ import annotations

import signal
from dis import opmap
from traceback import walk_tb

# An owner ends a process by these. SIGALRM is not one of them: a dataset may limit its
# own time with it.
_STOP_SIGNALS = [
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")
    if hasattr(signal, name)
]
# Flower's handlers of these signals put the earlier handlers back, and then raise a
# SystemExit in this module.
_FLOWER_EXIT = "flwr.supercore.exit"
_RAISE = {opmap[name] for name in ("RAISE_VARARGS", "RERAISE")}


def is_stop_signal(error: BaseException) -> bool:
    """Return whether the owner stops the process, by Ctrl-C or another signal.

    A `KeyboardInterrupt` or `SystemExit` that a dataset or a model raises is not one.
    """
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    handlers = [signal.getsignal(number) for number in _STOP_SIGNALS]
    codes = {getattr(handler, "__code__", None) for handler in handlers} - {None}
    if codes & {frame.f_code for frame in frames}:
        return True
    if isinstance(error, SystemExit):
        modules = [str(frame.f_globals.get("__name__")) for frame in frames]
        return any(module.startswith(_FLOWER_EXIT) for module in modules)
    return isinstance(error, KeyboardInterrupt) and not _has_raise_statement(error)


def _has_raise_statement(error: BaseException) -> bool:
    """Return whether a ``raise`` statement, not the interpreter, raised an error."""
    last = error.__traceback__
    if last is None:
        return True
    while last.tb_next is not None:
        last = last.tb_next
    return last.tb_frame.f_code.co_code[last.tb_lasti] in _RAISE


def reraise_stop(error: BaseException) -> None:
    """Raise an error again if the owner stops the process with it.

    Anything else that reading or using an example raises, such as `SystemExit` or the
    panic of an extension module, makes that example unusable.
    """
    if is_stop_signal(error):
        raise error
