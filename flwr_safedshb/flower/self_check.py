"""What is taken for granted about Flower's undocumented names, and whether it holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    Metadata,
    RecordDict,
)
from flwr.client import NumPyClient

from flwr_safedshb.flower import compat


def _idle(message: Message, context: Context, call_next: Any) -> Message:
    return cast(Message, call_next(message, context))


def _findings() -> Iterator[tuple[str, bool]]:
    """Yield what is taken for granted, and whether it holds."""
    for name in ("run_id", "node_id", "task_id"):
        found = getattr(type(compat.TaskIdentity), name, None)
        yield (
            f"TaskIdentity.{name} can be set",
            getattr(found, "fset", None) is not None,
        )
    info = Metadata(1, "a", 2, 3, "b", "", 0.0, 1.0, "train")
    config = ConfigRecord({"x": [1, 2]})
    arrays = ArrayRecord({"y": Array("int64", (), compat.NUMPY, b"")})
    message = Message(RecordDict({"c": config, "d": arrays}), metadata=info)  # type: ignore[call-overload]
    context = Context(1, 2, {}, message.content, {})
    copy, own = compat.copy_for_delivery(message, "a", context)
    yield "records keep their entries in _data", copy.content == message.content
    cast(list[int], copy.content["c"]["x"]).append(3)
    copy.content["e"] = ConfigRecord()
    copy.content.array_records["d"]["y"].data = b"changed"
    own.state["f"] = ConfigRecord()
    yield (
        "copies share nothing",
        (config["x"] == [1, 2] and len(message.content) == 2 and not arrays["y"].data),
    )
    compat.set_message_id(copy, "other")
    compat.set_reply_to(copy, "another")
    yield (
        "metadata has _message_id and _reply_to_message_id",
        (
            (info.message_id, info.reply_to_message_id) == ("a", "b")
            and copy.metadata.message_id == "other"
            and copy.metadata.reply_to_message_id == "another"
        ),
    )
    compat.set_run_id(copy, 5)
    yield (
        "metadata has _run_id and _src_node_id",
        (copy.metadata.run_id, copy.metadata.src_node_id)
        == (5, compat.SUPERLINK_NODE_ID),
    )
    made = compat.make_array_unchecked("int64", (), b"")
    yield "an Array is four values", made == arrays["y"] and made.is_dirty
    seen: list[compat.Mod] = []

    def look(message: Message, context: Context) -> Message:
        seen.extend(compat.active_mods())
        return message

    compat.make_ffn(look, [_idle, _idle])(message, cast(Context, None))
    yield "mods at work can be seen", seen == [_idle, _idle]
    older = NumPyClient()
    yield (
        "to_client() keeps the NumPyClient",
        compat.unwrap_numpy_client(older.to_client()) is older,
    )


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
            f"flwr {compat.VERSION} is not as flwr_safedshb knows it "
            f"({'; '.join(wrong)}); {compat.REMEDY}"
        ) from cause
