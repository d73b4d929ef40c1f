"""Check that the private names of Flower in `compat` mean what we expect."""

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
from flwr_safedshb.flower.patching import REMEDY, VERSION, Expectation, find_unmet


def check() -> None:
    """Raise ImportError if Flower's private names do not behave as expected.

    The error names the version of Flower and what does not hold.
    """
    if unmet := find_unmet(_expectations):
        raise ImportError(
            f"flwr {VERSION} is not as flwr_safedshb knows it (expected, and not so: "
            f"{'; '.join(unmet)}); {REMEDY}"
        )


def _expectations() -> Iterator[Expectation]:
    for name in ("run_id", "node_id", "task_id"):
        found = getattr(type(compat.TaskIdentity), name, None)
        settable = getattr(found, "fset", None) is not None
        yield f"TaskIdentity.{name} can be set", settable
    info = Metadata(1, "a", 2, 3, "b", "", 0.0, 1.0, "train")
    config = ConfigRecord({"x": [1, 2]})
    arrays = ArrayRecord({"y": Array("int64", (), compat.NUMPY, b"")})
    content = RecordDict({"c": config, "d": arrays})
    message = Message(content, metadata=info)  # type: ignore[call-overload]
    context = Context(1, 2, {}, message.content, {})
    copy, own = compat.copy_for_delivery(message, "a", context)
    yield "records keep their entries in _data", copy.content == message.content
    cast(list[int], copy.content["c"]["x"]).append(3)
    copy.content["e"] = ConfigRecord()
    copy.content.array_records["d"]["y"].data = b"changed"
    own.state["f"] = ConfigRecord()
    unchanged = config["x"] == [1, 2] and len(content) == 2 and not arrays["y"].data
    yield "copies share nothing", unchanged
    compat.set_message_id(copy, "other")
    compat.set_reply_to(copy, "another")
    compat.set_run_id(copy, 5)
    sent, original = copy.metadata, (info.message_id, info.reply_to_message_id)
    ids = (sent.message_id, sent.reply_to_message_id, *original)
    yield (
        "metadata has _message_id and _reply_to_message_id",
        ids == ("other", "another", "a", "b"),
    )
    source = (sent.run_id, sent.src_node_id)
    yield (
        "metadata has _run_id and _src_node_id",
        source == (5, compat.SUPERLINK_NODE_ID),
    )
    made = compat.make_array_unchecked("int64", (), b"")
    yield "an Array is four values", made == arrays["y"] and made.is_dirty
    seen: list[compat.Mod] = []

    def record_mods(message: Message, context: Context) -> Message:
        seen.extend(compat.active_mods())
        return message

    compat.make_ffn(record_mods, [_idle_mod, _idle_mod])(message, cast(Context, None))
    yield "mods at work can be seen", seen == [_idle_mod, _idle_mod]
    client = NumPyClient()
    wrapped = compat.unwrap_numpy_client(client.to_client())
    yield "to_client() keeps the NumPyClient", wrapped is client


def _idle_mod(message: Message, context: Context, call_next: Any) -> Message:
    return cast(Message, call_next(message, context))
