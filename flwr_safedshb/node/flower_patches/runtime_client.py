"""Work that a SuperNode hands out: a task is one message for the ClientApp of a run.

In the isolation mode ``process`` a SuperNode starts nothing. Who knows its secret asks
for tasks and gets each with a token; with the token the message is pulled and the reply
pushed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from flwr.app import Context, Error, Message, Metadata, RecordDict
from flwr.cli.install import install_from_fab
from flwr.clientapp import ClientApp
from flwr.clientapp.client_app import LoadClientAppError
from flwr.clientapp.utils import get_load_client_app_fn
from flwr.common.constant import ErrorCode, SubStatus
from flwr.common.serde import message_from_proto
from flwr.proto.message_pb2 import Message as MessageProto
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PullAppMessagesRequest,
    PullAppMessagesResponse,
    PushAppMessagesRequest,
    PushAppMessagesResponse,
)
from flwr.supercore.constant import TaskType
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.retry import RetryInvoker, make_simple_http_retry_invoker
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode.runtime.run_clientapp import (
    pull_task_input,
    push_message,
    push_task_output,
)

from flwr_safedshb.flower import inline_objects as envelope
from flwr_safedshb.flower.envelope_client import Opener, small_objects

__all__ = ["Bundle", "Claim", "LoadClientAppError", "SuperNode", "Work"]

Seen = Callable[[bytes, Metadata], None]

_ACQUIRE = "/flwr.proto.Runtime/AcquireTask"


@dataclass(frozen=True)
class Claim:
    """A task that is ours: whose run it is of, and the token to work on it with."""

    run_id: int
    token: str


class SuperNode:
    """The tasks of a SuperNode on this machine.

    Parameters
    ----------
    address : str
        Of its runtime API, host:port.
    """

    def __init__(self, address: str) -> None:
        self.address = address

    @contextmanager
    def tasks(self, secret: bytes) -> Iterator[RuntimeHttpClient]:
        """Connect, to ask for tasks."""
        auth = SuperExecAuthHttpInterceptor(
            master_secret=secret, protected_methods={_ACQUIRE}
        )
        # Not tried again: a SuperNode that has ended must be seen to have ended.
        with self._client(auth, None) as client:
            yield client

    def work(self, token: str) -> RuntimeHttpClient:
        """Connect, to work on one task."""
        again = make_simple_http_retry_invoker()
        return self._client(RuntimeTokenHttpInterceptor(token), again)

    def _client(
        self, interceptor: object, again: RetryInvoker | None
    ) -> RuntimeHttpClient:
        return RuntimeHttpClient.from_server_address(
            server_address=self.address,
            insecure=True,  # on this machine, by loopback
            root_certificates=None,
            interceptors=[
                RuntimeVersionHttpInterceptor(component_name="flwr-clientapp"),
                interceptor,  # type: ignore[list-item]
            ],
            retry_invoker=again,
        )


def acquire(client: RuntimeHttpClient) -> Claim | None:
    """Return the oldest task that nobody has claimed, if there is one."""
    found = client.AcquireTask(
        AcquireTaskRequest(supported_task_types={TaskType.CLIENT_APP})
    )
    if not found.HasField("task") or not found.token:
        return None
    return Claim(found.task.run_id, found.token)


@dataclass(frozen=True)
class Bundle:
    """A Flower app as it came: bytes, and what the run says they are."""

    content: bytes
    app: str
    version: str

    @property
    def hash(self) -> str:
        """The hash of the bytes themselves, whatever anybody calls them."""
        return hashlib.sha256(self.content).hexdigest()

    def load(self) -> ClientApp:
        """Unpack the app into Flower's folder, and import its ClientApp."""
        install_from_fab(self.content, skip_prompt=True)
        load = get_load_client_app_fn(default_app_ref="", app_path=None, multi_app=True)
        return load(self.app, self.version, self.hash)


class Work:
    """One task under way: its message, and a heartbeat while it is worked on.

    Parameters
    ----------
    supernode : SuperNode
    token : str
        Of the task.
    seen : callable (bytes, Metadata) -> None
        Called with enough of the message to refuse it by, and with its metadata, as
        soon as the message is ours: before its parts are pulled.
    """

    def __init__(self, supernode: SuperNode, token: str, seen: Seen) -> None:
        self._client = supernode.work(token)
        Opener(self._client, lambda _: None)
        pull, push = self._client.PullMessages, self._client.PushMessages
        self._reply: Message | None = None

        def noted(request: PullAppMessagesRequest) -> PullAppMessagesResponse:
            answer = pull(request)
            for proto in answer.messages_list:
                envelope.empty(proto)
                seen(proto.SerializeToString(), message_from_proto(proto).metadata)
            return answer

        def sealed(request: PushAppMessagesRequest) -> PushAppMessagesResponse:
            if self._reply is not None and self._reply.has_content():
                (head,), (tree,) = request.messages_list, request.message_object_trees
                objects = small_objects(self._reply, {})
                envelope.seal(head, envelope.chosen(tree.object_id, objects) or {})
            return push(request)

        self._client.PullMessages = noted  # type: ignore[method-assign]
        self._client.PushMessages = sealed  # type: ignore[method-assign]
        self._heartbeat = HeartbeatSender(make_task_heartbeat_fn_http(self._client))
        self._heartbeat.start()
        self.message, self.context, run, fab = pull_task_input(self._client)
        self.bundle = Bundle(fab.content, run.fab_id, run.fab_version)

    def finish(self, reply: Message) -> None:
        """Send the reply, and keep the context that the app has left."""
        self._reply = reply
        push_message(self._client, reply, self.context)
        push_task_output(self._client, self.context, SubStatus.COMPLETED, "")

    def refuse(self, code: int, reason: str) -> None:
        """Send an error in place of a reply; the app's state stays as it was."""
        error = Message(Error(code=code, reason=reason), reply_to=self.message)
        push_message(self._client, error, self.context)
        push_task_output(self._client, None, SubStatus.FAILED, reason)

    def close(self) -> None:
        """Let go of the task."""
        if self._heartbeat.is_running:
            self._heartbeat.stop()
        self._client.close()


def give_up(supernode: SuperNode, token: str, head: bytes, reason: str) -> None:
    """Answer with an error for a process that has died over its task.

    Parameters
    ----------
    supernode : SuperNode
    token : str
    head : bytes
        What the process had seen of its message; nothing if it had not pulled it. Then
        the message is still there, and nobody but us would ever answer it.
    reason : str
    """
    with supernode.work(token) as client:
        if not head:
            found = client.PullMessages(PullAppMessagesRequest()).messages_list
            if not found:
                return  # it has just been pulled: Flower answers for it in a minute
            head = found[0].SerializeToString()
        _refuse(client, head, reason)


def _refuse(client: RuntimeHttpClient, head: bytes, reason: str) -> None:
    message = message_from_proto(MessageProto.FromString(head))
    about = message.metadata
    TaskIdentity.run_id, TaskIdentity.node_id = about.run_id, about.dst_node_id
    TaskIdentity.task_id = 1
    error = Message(
        Error(code=ErrorCode.CLIENT_APP_CRASHED, reason=reason), reply_to=message
    )
    context = Context(about.run_id, about.dst_node_id, {}, RecordDict(), {})
    # Where the dead one's own reply is being sent just now, no other is taken.
    with suppress(ObjectPushError):
        push_message(client, error, context)
    push_task_output(client, None, SubStatus.FAILED, reason)
