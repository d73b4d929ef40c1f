"""Small objects of a message travel in its head, and nobody is fooled by them."""

import numpy as np
import pytest
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    ConfirmMessageReceivedResponse,
    PullObjectRequest,
    PullObjectResponse,
)
from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PullAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import get_object_tree

from flwr_safedshb.flower import inline_objects as inlining
from flwr_safedshb.flower.compat import set_process_run
from flwr_safedshb.flower.inline_objects import (
    InlineObjectsClient,
    deflate_small_objects,
)
from flwr_safedshb.flower.object_tree import hash_object, parse_head, walk_tree
from flwr_safedshb.node.flower_patches.fleet_api import (
    PackedMessage,
    message_pb2,
    pack_message,
)

LARGE = inlining.MAX_OBJECT_BYTES  # floats: four times the bytes


def made(*sizes: int) -> PackedMessage:
    set_process_run(7)
    arrays = ArrayRecord(
        [np.full(size, index, "f4") for index, size in enumerate(sizes)]
    )
    return pack_message(Message(RecordDict({"arrays": arrays}), 5, "train", ttl=60.0))


def leaves(tree: message_pb2.ObjectTree) -> list[str]:
    return [child.object_id for child in tree.children]


class Client:
    """Flower's client of a place that has one message, and some of its objects."""

    def __init__(self, head: message_pb2.Message, tree: message_pb2.ObjectTree) -> None:
        self.head, self.tree = head, tree
        self.objects: dict[str, bytes] = {}
        self.late = 0
        self.calls: list[str] = []

    def PullMessages(self, _: PullAppMessagesRequest) -> PullAppMessagesResponse:
        return PullAppMessagesResponse(
            messages_list=[self.head], message_object_trees=[self.tree]
        )

    def PullObject(self, request: PullObjectRequest) -> PullObjectResponse:
        self.calls.append("pull-object")
        self.late -= 1
        return PullObjectResponse(
            object_found=True,
            object_available=self.late < 0,
            object_content=self.objects[request.object_id],
        )

    def ConfirmMessageReceived(
        self, _: ConfirmMessageReceivedRequest
    ) -> ConfirmMessageReceivedResponse:
        self.calls.append("confirm")
        return ConfirmMessageReceivedResponse()


def test_a_small_message_travels_inline_as_a_whole() -> None:
    message = made(3, 5)
    inside = inlining.select_inline(message.tree.object_id, message.objects)
    assert inside == message.objects
    inlining.attach_inline(message.message, inside)
    outer = inlining.prune_tree(message.tree, inside)
    assert (outer.object_id, leaves(outer)) == (message.tree.object_id, [])
    assert inlining.read_inline(message.message) == message.objects
    assert inlining.rebuild_tree(outer.object_id, inside) == message.tree


def test_large_pieces_of_arrays_travel_on_their_own() -> None:
    message = made(3, LARGE)
    inside = inlining.select_inline(message.tree.object_id, message.objects)
    assert inside is not None
    outside = {*message.objects} - {*inside}
    assert [parse_head(message.objects[name]).kind for name in outside] == [
        "ArrayChunk"
    ]
    assert leaves(inlining.prune_tree(message.tree, inside)) == [*outside]
    assert inlining.rebuild_tree(message.tree.object_id, inside) == message.tree
    assert max(map(len, inside.values())) <= inlining.MAX_OBJECT_BYTES


def test_inline_objects_never_exceed_their_bound() -> None:
    message = made(*[inlining.MAX_OBJECT_BYTES // 8] * 20)
    inside = inlining.select_inline(message.tree.object_id, message.objects)
    assert inside is not None
    assert sum(map(len, inside.values())) <= inlining.MAX_INLINE_BYTES
    names = {
        name for name, each in message.objects.items() if parse_head(each).children
    }
    assert names <= {*inside}  # or nobody could say what is missing


def test_a_message_of_too_many_objects_has_none_inline() -> None:
    message = made(*range(1, 1500))
    assert inlining.select_inline(message.tree.object_id, message.objects) is None


def test_only_small_objects_are_made_into_bytes() -> None:
    set_process_run(7)
    arrays = ArrayRecord([np.zeros(3, "f4"), np.zeros(LARGE, "f4")])
    message = Message(RecordDict({"arrays": arrays}), 5, "train", ttl=60.0)
    found = deflate_small_objects(message, {})
    assert max(map(len, found.values())) <= inlining.MAX_OBJECT_BYTES
    assert len([*walk_tree(get_object_tree(message))]) == len(found) + 1


def test_an_inline_object_cannot_have_anothers_id() -> None:
    message = made(3)
    root = message.tree.object_id
    false = {**message.objects, root: message.objects[root] + b"!"}
    inlining.attach_inline(message.message, false)
    found = inlining.read_inline(message.message)
    assert found is not None
    assert root not in found


def test_too_many_or_too_large_inline_objects_are_refused() -> None:
    message = made(3).message
    inlining.attach_inline(message, {str(n): b"%d" % n for n in range(100)})
    with pytest.raises(ValueError, match="too many"):
        inlining.read_inline(message, 99)
    inlining.attach_inline(message, {"": bytes(2 * inlining.MAX_INLINE_BYTES)})
    with pytest.raises(ValueError, match="too large"):
        inlining.read_inline(message, 1)


def test_a_tree_that_doubles_with_every_object_is_refused() -> None:
    below = b"ArrayChunk  0\0"
    inside = {hash_object(below): below}
    for _ in range(15):
        name = [*inside][-1]
        content = f"RecordDict {name},{name} 0\0".encode()
        inside[hash_object(content)] = content
    with pytest.raises(ValueError, match="too large"):
        inlining.rebuild_tree([*inside][-1], inside)


def test_the_head_of_an_error_stays_as_it_is() -> None:
    """With content, if only an empty one, it would be no error any more."""
    head = message_pb2.Message()
    head.error.code = 1
    inlining.remove_inline(head)
    assert not head.HasField("content")
    assert inlining.read_inline(head) is None


def opening(message: PackedMessage, whole: bool = False) -> Client:
    inside = inlining.select_inline(message.tree.object_id, message.objects) or {}
    inlining.attach_inline(message.message, inside)
    tree = message.tree if whole else inlining.prune_tree(message.tree, inside)
    client = Client(message.message, tree)
    client.objects = {n: o for n, o in message.objects.items() if n not in inside}
    return client


def pulled(client: Client, message: PackedMessage) -> dict[str, bytes]:
    """Pull a message as Flower does."""
    answer = client.PullMessages(PullAppMessagesRequest())
    assert [*answer.message_object_trees] == [message.tree]
    contents = {}
    for part, _ in walk_tree(answer.message_object_trees[0]):
        found = client.PullObject(PullObjectRequest(object_id=part.object_id))
        contents[part.object_id] = found.object_content
    client.ConfirmMessageReceived(
        ConfirmMessageReceivedRequest(message_object_id=message.tree.object_id)
    )
    return contents


@pytest.mark.parametrize(
    ("size", "whole", "calls"),
    [
        (3, False, []),
        (3, True, ["confirm"]),
        (LARGE, False, ["pull-object", "confirm"]),
    ],
    ids=["all inside", "kept as well", "one outside"],
)
def test_only_objects_that_are_not_inline_are_pulled(
    size: int, whole: bool, calls: list[str]
) -> None:
    message = made(size)
    client = opening(message, whole)
    seen: list[int] = []
    InlineObjectsClient(client, lambda head: seen.append(head.metadata.dst_node_id))
    assert pulled(client, message) == message.objects
    assert (client.calls, seen) == (calls, [5])


def test_a_message_without_inline_objects_is_pulled_as_flower_does() -> None:
    message = made(3)
    client = Client(message.message, message.tree)
    client.objects = message.objects
    seen: list[int] = []
    InlineObjectsClient(client, lambda _: seen.append(1))
    assert pulled(client, message) == message.objects
    assert client.calls == ["pull-object"] * len(message.objects) + ["confirm"]
    assert not seen


def test_an_object_that_is_late_is_asked_for_again_soon() -> None:
    message = made(LARGE)
    client = opening(message)
    client.late = 3
    InlineObjectsClient(client, lambda _: None)
    assert pulled(client, message) == message.objects
    assert client.calls == ["pull-object"] * 4 + ["confirm"]
