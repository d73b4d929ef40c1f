"""What is taken for granted about Flower is checked, and told with its version."""

import subprocess
import sys
from collections.abc import Callable
from importlib import metadata

import pytest
from flwr.app import Array, ConfigRecord, Metadata, RecordDict
from flwr.client.mod import utils
from flwr.supercore.task_identity import TaskIdentity

from flwr_safedshb.flower import compat, self_check

Break = Callable[[pytest.MonkeyPatch], None]
VERSION = f"flwr {metadata.version('flwr')} is not as flwr_safedshb knows it"


def renamed_id(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Metadata, "message_id", property(lambda self: "a"))


def other_calls(patch: pytest.MonkeyPatch) -> None:
    def make_ffn(app: object, mods: list[Callable[..., object]]) -> object:
        def call(message: object, context: object) -> object:
            return mods[0](message, context, app)

        return call

    patch.setattr(compat, "make_ffn", make_ffn)


def other_entries(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RecordDict, "items", lambda self: {}.items())


def slow_arrays(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Array, "__eq__", lambda self, other: False)


def fixed_identity(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(type(TaskIdentity), "run_id", property(lambda cls: 1))


def no_argument(patch: pytest.MonkeyPatch) -> None:
    def moved(*_: object) -> None:
        raise TypeError("unexpected keyword argument 'metadata'")

    patch.setattr(self_check, "Message", moved)


@pytest.mark.parametrize(
    ("broken", "claim"),
    [
        (renamed_id, "_message_id"),
        (other_calls, "mods at work can be seen"),
        (other_entries, "records keep their entries"),
        (slow_arrays, "an Array is four values"),
        (fixed_identity, "TaskIdentity.run_id can be set"),
        (no_argument, "unexpected keyword argument"),
    ],
)
def test_a_flower_that_is_not_as_known_is_told(
    broken: Break, claim: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    self_check.check()
    broken(monkeypatch)
    with pytest.raises(ImportError, match=VERSION) as caught:
        self_check.check()
    assert claim in str(caught.value)
    assert "install flwr" in str(caught.value)


@pytest.mark.process
@pytest.mark.parametrize(
    "loss",
    [
        "import flwr.supercore.task_identity as m; del m.TaskIdentity",
        "import flwr.supercore.run as m; del m.Run",
        "import flwr.app.metadata as m; m.Metadata.message_id = property(lambda s: 1)",
    ],
)
def test_the_import_fails_where_a_name_is_gone(loss: str) -> None:
    script = f"import flwr.app, flwr.serverapp, flwr.clientapp\n{loss}\n"
    ran = subprocess.run(
        [sys.executable, "-c", script + "from flwr_safedshb import InProcessGrid"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 1
    last = ran.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ImportError: flwr {metadata.version('flwr')} ")


def test_a_copy_of_a_message_shares_nothing_that_can_change() -> None:
    record = ConfigRecord({"x": [1, 2], "y": 3})
    content = RecordDict({"c": record})
    copy = compat.copy_content(content)
    assert copy == content
    copied = copy.config_records["c"]
    copied["x"].append(3)  # type: ignore[union-attr, arg-type]
    copied["y"] = 4
    copy["d"] = ConfigRecord()
    assert content == RecordDict({"c": ConfigRecord({"x": [1, 2], "y": 3})})


def test_mods_are_seen_through_the_function_that_calls_them() -> None:
    seen: list[object] = []

    def first(
        message: object, context: object, call_next: Callable[..., object]
    ) -> object:
        return call_next(message, context)

    class Second:
        __call__ = staticmethod(first)

    def app(message: object, context: object) -> object:
        seen.extend(compat.active_mods())
        return message

    second = Second()
    utils.make_ffn(app, [first, second])(1, 2)  # type: ignore[arg-type, list-item]
    assert seen == [second, first]
    assert list(compat.active_mods()) == []
