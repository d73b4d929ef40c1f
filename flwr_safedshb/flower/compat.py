"""Every name of Flower that its documentation does not have, in one file.

The public packages of Flower are ``flwr.app``, ``flwr.clientapp``, ``flwr.serverapp``,
``flwr.client``, ``flwr.common`` and ``flwr.simulation``; a release may change
everything else. What this package needs of that is here, and importing this module
checks that each name still means what it is taken for. If one does not, the import
fails and says with which version of Flower.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
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
from flwr.serverapp import Grid

_VERSION = metadata.version("flwr")
_REMEDY = "install flwr>=1.41,<2 as in constraints.txt"

try:
    from flwr.client.mod.utils import make_ffn
    from flwr.clientapp.typing import Mod
    from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode, SType
    from flwr.supercore.run import Run
    from flwr.supercore.task_identity import TaskIdentity
except ImportError as error:
    raise ImportError(
        f"flwr {_VERSION} lacks a name that flwr_safedshb needs ({error}); {_REMEDY}"
    ) from error

__all__ = ["SUPERLINK_NODE_ID", "ErrorCode", "Mod", "Run", "SType"]

T = TypeVar("T", Array, Metadata)
Record = ArrayRecord | ConfigRecord | MetricRecord
R = TypeVar("R", ArrayRecord, ConfigRecord, MetricRecord, RecordDict)


def identify(run_id: int) -> None:
    """Say which run the messages belong to that this process makes from now on."""
    TaskIdentity.run_id = run_id
    TaskIdentity.node_id = SUPERLINK_NODE_ID
    TaskIdentity.task_id = 1


def number(message: Message, message_id: str) -> None:
    """Give a message the id that a SuperLink would give it."""
    message.metadata.__dict__["_message_id"] = message_id


def redirect(reply: Message, message_id: str) -> None:
    """Make a reply the answer to another message, as only an adversary does."""
    reply.metadata.__dict__["_reply_to_message_id"] = message_id


# ---- shortcuts around constructors, each with what it saves -------------------------


def refilled(record: R, entries: Mapping[str, object]) -> R:
    """Return a record of the same kind with these entries, which are not checked."""
    copy = record.copy()
    copy.__dict__["_data"] = dict(entries)
    return copy


def plain_array(dtype: str, shape: tuple[int, ...], data: bytes) -> Array:
    """Return the same as ``Array(dtype, shape, SType.NUMPY, data)``."""
    array = Array.__new__(Array)
    array.__dict__.update(dtype=dtype, shape=shape, stype=SType.NUMPY, data=data)
    return array


def same(thing: T) -> T:
    """Return a copy that shares nothing mutable; the bytes of arrays are immutable."""
    copy = type(thing).__new__(type(thing))
    copy.__dict__.update(thing.__dict__)
    return copy


def copied(content: RecordDict) -> RecordDict:
    """Return a copy of a message's content that shares nothing mutable."""
    records = {key: _copied_record(record) for key, record in content.items()}
    return refilled(content, records)


def delivered(message: Message) -> Message:
    """Return the message as the other side would receive it."""
    content = copied(message.content) if message.has_content() else None
    copy = Message.__new__(Message)
    copy.__dict__.update(message.__dict__)
    copy.__dict__.update(_metadata=same(message.metadata), _content=content)
    return copy


def _copied_record(record: Record) -> Record:
    if isinstance(record, ArrayRecord):
        return refilled(record, {name: same(array) for name, array in record.items()})
    values = record.items()
    entries = {k: list(v) if isinstance(v, list) else v for k, v in values}
    return refilled(cast(ConfigRecord, record), entries)  # of the record's own kind


# ---- mods ---------------------------------------------------------------------------


def mods_at_work() -> Iterator[Mod]:
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


# ---- Grids --------------------------------------------------------------------------

# To import these takes half a second, and where they are in use they are imported.
_GRIDS = "flwr.superlink.grid"


def is_flowers_simulation(grid: Grid) -> bool:
    """Whether the nodes behind a Grid of Flower are simulated in this process."""
    return _GRIDS in sys.modules and isinstance(
        grid, import_module(_GRIDS).InMemoryGrid
    )


def lacks_tls(grid: Grid) -> bool:
    """Whether a Grid is known to reach its SuperLink without TLS."""
    return bool(getattr(grid, "_insecure", False))


# ---- programs and files of Flower ---------------------------------------------------


def client_process() -> Callable[[], None]:
    """Return Flower's program ``flwr-clientapp``, imported."""
    found = metadata.entry_points(group="console_scripts", name="flwr-clientapp")
    if not found:
        raise ImportError(f"flwr {_VERSION} has no program flwr-clientapp; {_REMEDY}")
    return cast(Callable[[], None], next(iter(found)).load())


def flat_config(config: Mapping[str, Any]) -> UserConfig:
    """Return a nested config with dots in its keys, as Flower flattens it."""
    return cast(UserConfig, _config().flatten_dict(dict(config)))


def parsed_config(arguments: list[str]) -> UserConfig:
    """Return the config that command line arguments of Flower's programs state."""
    return cast(UserConfig, _config().parse_config_args(arguments))


def _config() -> Any:
    # A tenth of a second to import, and no client needs it.
    return import_module("flwr.common.config")


# ---- self-check ---------------------------------------------------------------------


def _findings() -> Iterator[tuple[str, bool]]:
    """Yield what is taken for granted, and whether it holds."""
    for name in ("run_id", "node_id", "task_id"):
        found = getattr(type(TaskIdentity), name, None)
        yield (
            f"TaskIdentity.{name} can be set",
            getattr(found, "fset", None) is not None,
        )
    info = Metadata(1, "a", 2, 3, "b", "", 0.0, 1.0, "train")
    config = ConfigRecord({"x": [1, 2]})
    arrays = ArrayRecord({"y": Array("int64", (), SType.NUMPY, b"")})
    message = Message(RecordDict({"c": config, "d": arrays}), metadata=info)  # type: ignore[call-overload]
    copy = delivered(message)
    yield "records keep their entries in _data", copy.content == message.content
    cast(list[int], copy.content["c"]["x"]).append(3)
    copy.content["e"] = ConfigRecord()
    copy.content.array_records["d"]["y"].data = b"changed"
    yield (
        "copies share nothing",
        (config["x"] == [1, 2] and "e" not in message.content and not arrays["y"].data),
    )
    number(copy, "other")
    redirect(copy, "another")
    yield (
        "metadata has _message_id and _reply_to_message_id",
        (
            (info.message_id, info.reply_to_message_id) == ("a", "b")
            and copy.metadata.message_id == "other"
            and copy.metadata.reply_to_message_id == "another"
        ),
    )
    made = plain_array("int64", (), b"")
    yield "an Array is four values", made == arrays["y"] and made.is_dirty
    seen: list[Mod] = []

    def look(message: Message, context: Context) -> Message:
        seen.extend(mods_at_work())
        return message

    make_ffn(look, [_idle_mod, _idle_mod])(message, cast(Context, None))
    yield "mods at work can be seen", seen == [_idle_mod, _idle_mod]


def check() -> None:
    """Compare Flower with what is taken for granted about it.

    Raises
    ------
    ImportError
        Naming the version of Flower and what does not hold.
    """
    wrong, cause = [], None
    try:
        for claim, holds in _findings():
            wrong += [] if holds else [f"it does not hold that {claim}"]
    except Exception as error:
        wrong.append(f"{type(error).__name__}: {error}")
        cause = error
    if wrong:
        raise ImportError(
            f"flwr {_VERSION} is not as flwr_safedshb knows it ({'; '.join(wrong)}); "
            f"{_REMEDY}"
        ) from cause


check()
