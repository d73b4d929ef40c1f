"""Which mods around a ClientApp leave the reply of a private client as it is.

A mod of Flower wraps a ClientApp and may change what it replies. This client's reply is
a momentum, which must arrive as it was sent, so it works only under mods that are known
to look and not to touch: those below, and those that the user names.
"""

from __future__ import annotations

from collections.abc import Collection

from flwr.client import mod as client_mods
from flwr.clientapp import mod as clientapp_mods

from flwr_safedshb.flower.compat import Mod, mods_at_work

_CLIPS = (
    "clips the difference of the reply and the model, and this client's reply is a "
    "momentum, which is private already and must arrive as it is;"
)
_HIDES = (
    "hides the single replies, which the server needs to tell the adversarial ones; "
    "the momentums are private without it;"
)
_UNKNOWN = (
    "is no mod that is known to leave the reply as it is; if it does, name it in "
    "trusted_mods of the SafeDSHBClient, else"
)
# By kind: to tell a user why is kinder than to say that a mod is not known.
_LOCAL_DP = (clientapp_mods.LocalDpMod, client_mods.LocalDpMod)
_CLIPPING = (
    clientapp_mods.fixedclipping_mod,
    clientapp_mods.adaptiveclipping_mod,
    client_mods.fixedclipping_mod,
    client_mods.adaptiveclipping_mod,
)
_SECURE_AGGREGATION = (client_mods.secagg_mod, client_mods.secaggplus_mod)
_HARMLESS = (
    clientapp_mods.message_size_mod,
    clientapp_mods.arrays_size_mod,
    client_mods.message_size_mod,
    client_mods.arrays_size_mod,
)


def objection(trusted: Collection[Mod] = ()) -> str | None:
    """Say why the caller must not work under the mods around it, if it must not.

    Parameters
    ----------
    trusted : collection of mods
        Which leave the reply as it is, says the user.
    """
    for mod in mods_at_work():
        if mod in _HARMLESS or mod in trusted:
            continue
        name = getattr(mod, "__name__", type(mod).__name__)
        if isinstance(mod, _LOCAL_DP) or mod in _CLIPPING:
            reason = _CLIPS
        else:
            reason = _HIDES if mod in _SECURE_AGGREGATION else _UNKNOWN
        return f"{name} {reason} remove it from the ClientApp's mods"
    return None
