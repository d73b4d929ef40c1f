"""Tell the owner who stops a process from data that raise errors of any kind."""

from __future__ import annotations

import signal
from dis import opmap
from types import FrameType

# An owner ends a process by these. SIGALRM is not one of them: a dataset may limit its
# own time with it.
_STOP_SIGNALS = [
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")
    if hasattr(signal, name)
]
_RAISE = {opmap[name] for name in ("RAISE_VARARGS", "RERAISE")}


def is_stop_signal(error: BaseException) -> bool:
    """Return whether the owner stops the process, by Ctrl-C or another signal.

    A `KeyboardInterrupt` or `SystemExit` that a dataset or a model raises is not one.
    """
    calls = []
    traceback = error.__traceback__
    while traceback is not None:
        calls.append((traceback.tb_frame, traceback.tb_lasti))
        traceback = traceback.tb_next
    if not calls:
        return False
    handlers = [signal.getsignal(number) for number in _STOP_SIGNALS]
    codes = {getattr(handler, "__code__", None) for handler in handlers} - {None}
    if any(frame.f_code in codes for frame, _ in calls):
        return True
    frame, instruction = calls[-1]
    if isinstance(error, SystemExit):
        # Flower's handlers put the earlier ones back, and then exit by their own code.
        return _is_of_flower(frame) and any(_is_handler(frame) for frame, _ in calls)
    # Ctrl-C interrupts between two instructions, a program raises by a statement.
    raised_by_statement = frame.f_code.co_code[instruction] in _RAISE
    return isinstance(error, KeyboardInterrupt) and not raised_by_statement


def _is_of_flower(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] == "flwr"


def _is_handler(frame: FrameType) -> bool:
    """Return whether Flower was called as Python calls the handler of a stop signal.

    Any of its functions may exit, also one that a dataset calls for an example.
    """
    code = frame.f_code
    if code.co_argcount != 2 or not _is_of_flower(frame):
        return False
    number, interrupted = (frame.f_locals.get(n) for n in code.co_varnames[:2])
    return number in _STOP_SIGNALS and isinstance(interrupted, FrameType)


def reraise_stop(error: BaseException) -> None:
    """Raise an error again if the owner stops the process with it.

    Anything else that reading or using an example raises, such as `SystemExit` or the
    panic of an extension module, makes that example unusable.
    """
    if is_stop_signal(error):
        raise error
