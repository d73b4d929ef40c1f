"""The private names of Flower that the core needs.

The public packages of Flower are ``flwr.app``, ``flwr.clientapp``, ``flwr.serverapp``,
``flwr.client``, ``flwr.common`` and ``flwr.simulation``; a release may change
everything else. `self_check` checks what is assumed here.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping
from importlib import import_module
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

from flwr_safedshb.flower.patching import REMEDY, VERSION

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
    """Set the run of the messages that this process makes from now on."""
    TaskIdentity.run_id = run_id
    TaskIdentity.node_id = SUPERLINK_NODE_ID
    TaskIdentity.task_id = 1


def set_message_id(message: Message, message_id: str) -> None:
    """Give a message the id that a SuperLink would give it."""
    message.metadata.__dict__["_message_id"] = message_id


def set_run_id(message: Message, run_id: int) -> None:
    """Set the run of a message, and the server as its sender.

    Its constructor asks the process, whose run may have been set to another since.
    """
    message.metadata.__dict__.update(_run_id=run_id, _src_node_id=SUPERLINK_NODE_ID)


def is_reply_to(reply: Message, message_id: str, node: int) -> bool:
    """Return True if a reply answers a message and comes from the node it was sent to.

    The SuperLink itself replies, with an error, for a node that was lost.
    """
    metadata = reply.metadata
    if metadata.reply_to_message_id != message_id:
        return False
    lost = reply.has_error() and metadata.src_node_id == SUPERLINK_NODE_ID
    return metadata.src_node_id == node or lost


def set_reply_to(reply: Message, message_id: str) -> None:
    """Make a reply answer another message, as only an adversary does."""
    reply.metadata.__dict__["_reply_to_message_id"] = message_id


# ---- shortcuts around constructors ---------------------------------------------------
# Each states how much more processor time a round of 7 nodes in process, and of 1000 in
# a BatchedGrid, takes without it (`python -m simulations.benchmarks.ablation`).


def replace_entries_unchecked(record: R, entries: Mapping[str, object]) -> R:
    """Return a record of the same kind with these entries, unchecked (26 %, 39 %)."""
    copy = record.copy()
    copy.__dict__["_data"] = dict(entries)
    return copy


def make_array_unchecked(dtype: str, shape: tuple[int, ...], data: bytes) -> Array:
    """Return the same as ``Array(dtype, shape, NUMPY, data)`` (0 %, 9 %)."""
    array = Array.__new__(Array)
    array.__dict__.update(dtype=dtype, shape=shape, stype=NUMPY, data=data)
    return array


def shallow_copy(thing: T) -> T:
    """Return a copy that shares nothing mutable; the bytes of arrays are immutable."""
    copy = type(thing).__new__(type(thing))
    copy.__dict__.update(thing.__dict__)
    return copy


def copy_content(content: RecordDict) -> RecordDict:
    """Return a copy of a message's content that shares nothing mutable (16 %, 10 %)."""
    records = {key: _copy_record(record) for key, record in content.items()}
    return replace_entries_unchecked(content, records)


def copy_for_delivery(
    message: Message, message_id: str, context: Context
) -> tuple[Message, Context]:
    """Set a message's id; return copies of it and of a node's Context for the node."""
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


def _copy_record(record: Record) -> Record:
    if isinstance(record, ArrayRecord):
        arrays = {name: shallow_copy(array) for name, array in record.items()}
        return replace_entries_unchecked(record, arrays)
    values = record.items()
    entries = {k: list(v) if isinstance(v, list) else v for k, v in values}
    return replace_entries_unchecked(cast(ConfigRecord, record), entries)


# ---- mods ---------------------------------------------------------------------------
# A mod wraps a ClientApp and may change what it replies. A private client replies with
# a momentum, which must arrive as it was sent.


_CLIPS = (
    "clips the difference of the reply and the model, but this client's reply is a "
    "momentum, which is private already and must arrive unchanged;"
)
_HIDES = (
    "hides the single replies, which the server needs to find adversaries; the "
    "momentums are private without it;"
)
_UNKNOWN = (
    "is not known to leave the reply unchanged; if it does, name it in trusted_mods "
    "of the SafeDSHBClient, else"
)
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
    """Return why the caller must not work under the mods around it, or None.

    Parameters
    ----------
    trusted : collection of mods
        Mods that leave the reply unchanged, as the user says.
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
    """Yield the mods that the caller works under, the innermost first.

    Flower does not tell an app its mods. But an active mod is on the call stack, and
    one function of Flower calls them all.
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
    """Return the NumPyClient inside what ``to_client()`` made, else the argument."""
    return getattr(client, "numpy_client", client)


# ---- Grids --------------------------------------------------------------------------

# Takes half a second to import; where such a Grid is in use, it has been imported.
_GRIDS = "flwr.superlink.grid"


def is_flower_simulation(grid: Grid) -> bool:
    """Return True if a Grid of Flower simulates its nodes in this process."""
    if _GRIDS not in sys.modules:
        return False
    return isinstance(grid, import_module(_GRIDS).InMemoryGrid)


def lacks_tls(grid: Grid) -> bool:
    """Return True if a Grid is known to reach its SuperLink without TLS."""
    return bool(getattr(grid, "_insecure", False))


# ---- configs of Flower --------------------------------------------------------------


def flatten_config(config: Mapping[str, Any]) -> UserConfig:
    """Flatten a nested config as Flower does: keys are joined by dots."""
    return cast(UserConfig, _import_config().flatten_dict(dict(config)))


def parse_config(arguments: list[str]) -> UserConfig:
    """Parse a config from command-line arguments, as Flower's programs do."""
    return cast(UserConfig, _import_config().parse_config_args(arguments))


def _import_config() -> Any:
    # A tenth of a second to import, and no client needs it.
    return import_module("flwr.common.config")
