"""A complete reply, as it goes to the SuperLink."""

from __future__ import annotations

from collections.abc import Iterator

from flwr_safedshb.flower import inline_objects as envelope
from flwr_safedshb.flower.fleet import fleet_pb2, message_pb2
from flwr_safedshb.node.gate.replies import Staged


def outgoing(staged: Staged) -> fleet_pb2.PushMessagesRequest:
    """Return the call that begins to bring a reply to the SuperLink.

    A server that has asked in an envelope is answered in one; any other is told that
    envelopes are understood here, by one that is empty.
    """
    request = fleet_pb2.PushMessagesRequest()
    request.CopyFrom(staged.request)
    (message,), (tree,) = request.messages_list, request.message_object_trees
    if message.HasField("error"):
        return request
    inside = None
    if staged.asked.inside:
        small = {
            name: staged.content(name)
            for name, part in staged.parts.items()
            if part.children or part.size <= envelope.SMALL
        }
        inside = envelope.chosen(tree.object_id, small)
    if inside:
        tree.CopyFrom(envelope.outer_tree(tree, inside))
    envelope.seal(message, inside or {})
    return request


def pushes(
    staged: Staged,
    begun: fleet_pb2.PushMessagesRequest,
    answer: fleet_pb2.PushMessagesResponse,
) -> Iterator[message_pb2.PushObjectRequest]:
    """Yield the calls that bring a reply's objects to the SuperLink."""
    inside = envelope.opened(begun.messages_list[0]) or {}
    for name in answer.objects_to_push:
        if name in staged.children and name not in inside:
            yield message_pb2.PushObjectRequest(
                node=staged.request.node,
                run_id=staged.asked.metadata.run_id,
                object_id=name,
                object_content=staged.content(name),
                session_id=answer.session_id,
            )
