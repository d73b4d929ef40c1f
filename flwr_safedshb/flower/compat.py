"""Every name of Flower that its documentation does not have, in one file.

The public packages of Flower are ``flwr.app``, ``flwr.clientapp``, ``flwr.serverapp``,
``flwr.client``, ``flwr.common`` and ``flwr.simulation``; a release may change
everything else. What an app needs of that is here; `assumptions` checks it, and `fleet`
has what the gate needs.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping
from importlib import import_module, metadata
from types import CodeType, FrameType
from typing import Any, TypeVar, cast

from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    Metadata,
    MetricRecord,
    RecordDict,
    UserConfig,
)
from flwr.client import mod as client_mods
from flwr.clientapp import mod as clientapp_mods
from flwr.serverapp import Grid

VERSION = metadata.version("flwr")
REMEDY = "install flwr>=1.41,<2 as in constraints.txt"

try:
    from flwr.client.mod.utils import make_ffn
    from flwr.clientapp.typing import Mod
    from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode, SType
    from flwr.supercore.run import Run
    from flwr.supercore.task_identity import TaskIdentity
except ImportError as error:
    raise ImportError(
        f"flwr {VERSION} lacks a name that flwr_safedshb needs ({error}); {REMEDY}"
    ) from error

__all__ = [
    "SUPERLINK_NODE_ID",
    "ErrorCode",
    "Mod",
    "Run",
    "TaskIdentity",
    "make_ffn",
]

NUMPY = SType.NUMPY

T = TypeVar("T", Array, Metadata)
Record = ArrayRecord | ConfigRecord | MetricRecord
R = TypeVar("R", ArrayRecord, ConfigRecord, MetricRecord, RecordDict)


def set_process_run(run_id: int) -> None:
    """Say which run the messages belong to that this process makes from now on."""
    TaskIdentity.run_id = run_id
    TaskIdentity.node_id = SUPERLINK_NODE_ID
    TaskIdentity.task_id = 1


def set_message_id(message: Message, message_id: str) -> None:
    """Give a message the id that a SuperLink would give it."""
    message.metadata.__dict__["_message_id"] = message_id


def set_run_id(message: Message, run_id: int) -> None:
    """Make a message one of a run, sent by its server.

    Its constructor asks the process, for which another run may have been named since.
    """
    message.metadata.__dict__.update(_run_id=run_id, _src_node_id=SUPERLINK_NODE_ID)


def is_reply_to(reply: Message, message_id: str, node: int) -> bool:
    """Whether a reply answers a message, and comes from the node that was asked.

    That a node was lost is said by the SuperLink.
    """
    about = reply.metadata
    if about.reply_to_message_id != message_id:
        return False
    lost = reply.has_error() and about.src_node_id == SUPERLINK_NODE_ID
    return about.src_node_id == node or lost


def set_reply_to(reply: Message, message_id: str) -> None:
    """Make a reply the answer to another message, as only an adversary does."""
    reply.metadata.__dict__["_reply_to_message_id"] = message_id


# ---- shortcuts around constructors, each with what it saves -------------------------
# Measured by `python -m simulations.benchmarks.ablation`, in processor time: how much
# longer a round of 7 nodes in process, or of 1000 in a BatchedGrid, takes without them.


def replace_entries_unchecked(record: R, entries: Mapping[str, object]) -> R:
    """Return a record of the same kind with these entries, which are not checked."""
    # Without it 26 % longer, and 39 %.
    copy = record.copy()
    copy.__dict__["_data"] = dict(entries)
    return copy


def make_array_unchecked(dtype: str, shape: tuple[int, ...], data: bytes) -> Array:
    """Return the same as ``Array(dtype, shape, NUMPY, data)``."""
    # Without it no longer in process, and 9 % in a BatchedGrid.
    array = Array.__new__(Array)
    array.__dict__.update(dtype=dtype, shape=shape, stype=NUMPY, data=data)
    return array


def shallow_copy(thing: T) -> T:
    """Return a copy that shares nothing mutable; the bytes of arrays are immutable."""
    copy = type(thing).__new__(type(thing))
    copy.__dict__.update(thing.__dict__)
    return copy


def copy_content(content: RecordDict) -> RecordDict:
    """Return a copy of a message's content that shares nothing mutable."""
    # Without it and `copy_for_delivery` 16 % longer, and 10 %.
    records = {key: _copied_record(record) for key, record in content.items()}
    return replace_entries_unchecked(content, records)


def copy_for_delivery(
    message: Message, message_id: str, context: Context
) -> tuple[Message, Context]:
    """Give a message its id; return it and a node's Context as the other side's own."""
    set_message_id(message, message_id)
    content = copy_content(message.content) if message.has_content() else None
    copy = Message.__new__(Message)
    copy.__dict__.update(message.__dict__)
    copy.__dict__.update(_metadata=shallow_copy(message.metadata), _content=content)
    return copy, copy_context(context)


def copy_context(context: Context) -> Context:
    """Return a copy of a node's Context that shares nothing mutable."""
    return Context(
        context.run_id,
        context.node_id,
        dict(context.node_config),
        copy_content(context.state),
        dict(context.run_config),
    )


def _copied_record(record: Record) -> Record:
    if isinstance(record, ArrayRecord):
        return replace_entries_unchecked(
            record, {name: shallow_copy(array) for name, array in record.items()}
        )
    values = record.items()
    entries = {k: list(v) if isinstance(v, list) else v for k, v in values}
    return replace_entries_unchecked(
        cast(ConfigRecord, record), entries
    )  # of the record's own kind


# ---- mods ---------------------------------------------------------------------------
# A mod wraps a ClientApp and may change what it replies. A private client replies with
# a momentum, which must arrive as it was sent.


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


def check_mods(trusted: Collection[Mod] = ()) -> str | None:
    """Say why the caller must not work under the mods around it, if it must not.

    Parameters
    ----------
    trusted : collection of mods
        Which leave the reply as it is, says the user.
    """
    for mod in active_mods():
        if mod in _HARMLESS or mod in trusted:
            continue
        name = getattr(mod, "__name__", type(mod).__name__)
        if isinstance(mod, _LOCAL_DP) or mod in _CLIPPING:
            reason = _CLIPS
        else:
            reason = _HIDES if mod in _SECURE_AGGREGATION else _UNKNOWN
        return f"{name} {reason} remove it from the ClientApp's mods"
    return None


def active_mods() -> Iterator[Mod]:
    """Yield every mod that the caller works under, the innermost first.

    Nothing tells an app which mods are around it. But a mod that is at work is among
    the callers, and one function of Flower calls them all.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CALLS_MODS:
            yield frame.f_locals["_mod"]
        frame = frame.f_back


def _idle_mod(message: Message, context: Context, call_next: Any) -> Message:
    return cast(Message, call_next(message, context))


def _idle_app(message: Message, context: Context) -> Message:
    return message


_CALLS_MODS: CodeType = make_ffn(_idle_app, [_idle_mod]).__code__


# ---- clients of the older API -------------------------------------------------------


def unwrap_numpy_client(client: object) -> object:
    """Return the NumPyClient in what its ``to_client()`` made; anything else as is."""
    return getattr(client, "numpy_client", client)


# ---- Grids --------------------------------------------------------------------------

# To import these takes half a second, and where they are in use they are imported.
_GRIDS = "flwr.superlink.grid"


def is_flower_simulation(grid: Grid) -> bool:
    """Whether the nodes behind a Grid of Flower are simulated in this process."""
    return _GRIDS in sys.modules and isinstance(
        grid, import_module(_GRIDS).InMemoryGrid
    )


def lacks_tls(grid: Grid) -> bool:
    """Whether a Grid is known to reach its SuperLink without TLS."""
    return bool(getattr(grid, "_insecure", False))


# ---- configs of Flower --------------------------------------------------------------


def flatten_config(config: Mapping[str, Any]) -> UserConfig:
    """Return a nested config with dots in its keys, as Flower flattens it."""
    return cast(UserConfig, _config().flatten_dict(dict(config)))


def parse_config(arguments: list[str]) -> UserConfig:
    """Return the config that command line arguments of Flower's programs state."""
    return cast(UserConfig, _config().parse_config_args(arguments))


def _config() -> Any:
    # A tenth of a second to import, and no client needs it.
    return import_module("flwr.common.config")
