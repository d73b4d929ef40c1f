"""Flower's mods that must not stand around a private client.

A mod wraps a ClientApp and may change what it replies. Nothing tells an app which mods
are around it, and they can be given in many places, so the client looks at who is
calling it: a mod that is at work is one of its callers.
"""

from __future__ import annotations

import sys
from types import CodeType, FrameType

from flwr.client import mod as client_mods
from flwr.clientapp import mod as clientapp_mods

from flwr_safedshb.client.node import RefusedError

_CLIPS = (
    "clips the difference of the reply and the model, and this client's reply is a "
    "momentum, which is private already and must arrive as it is"
)
_HIDES = (
    "hides the single replies, which the server needs to tell the adversarial ones; "
    "the momenta are private without it"
)
_REFUSED: dict[CodeType, tuple[str, str]] = {
    code: (name, reason)
    for name, code, reason in (
        ("LocalDpMod", clientapp_mods.LocalDpMod.__call__.__code__, _CLIPS),
        ("LocalDpMod", client_mods.LocalDpMod.__call__.__code__, _CLIPS),
        ("fixedclipping_mod", clientapp_mods.fixedclipping_mod.__code__, _CLIPS),
        ("fixedclipping_mod", client_mods.fixedclipping_mod.__code__, _CLIPS),
        ("adaptiveclipping_mod", clientapp_mods.adaptiveclipping_mod.__code__, _CLIPS),
        ("adaptiveclipping_mod", client_mods.adaptiveclipping_mod.__code__, _CLIPS),
        ("secaggplus_mod", client_mods.secaggplus_mod.__code__, _HIDES),
    )
}


def refuse_mods() -> None:
    """Refuse to work under a mod that spoils the reply.

    Raises
    ------
    RefusedError
        Naming the mod. Nothing has been charged or released by then.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _REFUSED:
            name, reason = _REFUSED[frame.f_code]
            raise RefusedError(f"{name} {reason}; remove it from the ClientApp's mods")
        frame = frame.f_back
