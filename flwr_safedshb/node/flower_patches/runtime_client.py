"""A client of a SuperNode's Runtime API: tasks, each one message for a ClientApp.

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

from flwr_safedshb.flower import inline_objects as inlining
from flwr_safedshb.flower.patching import Expectation, Patch, uses_names

__all__ = ["AppBundle", "ClaimedTask", "ClientTask", "LoadClientAppError", "Runtime"]

OnMessage = Callable[[bytes, Metadata], None]

# Seconds after which a SuperNode that does not answer is taken to have ended.
_RETRY_SECONDS = 30.0
_ACQUIRE = "/flwr.proto.Runtime/AcquireTask"


@dataclass(frozen=True)
class ClaimedTask:
    """A task that is ours: the run it belongs to, and the token to work on it with."""

    run_id: int
    token: str


class Runtime:
    """The Runtime API of a SuperNode on this machine, at `address` (host:port)."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.port = int(address.rpartition(":")[2])

    @contextmanager
    def connect_with_secret(self, secret: bytes) -> Iterator[RuntimeHttpClient]:
        """Connect to ask for tasks."""
        auth = SuperExecAuthHttpInterceptor(
            master_secret=secret, protected_methods={_ACQUIRE}
        )
        # Without retries: a SuperNode that has ended must be seen to have ended.
        with self._connect(auth, None) as client:
            yield client

    def connect_with_token(
        self, token: str, does_retry: bool = True
    ) -> RuntimeHttpClient:
        """Connect to work on one task.

        Flower's retries send SIGINT to their own process if the token is refused, so
        they are for workers only, which ignore it.
        """
        retries = None
        if does_retry:
            retries = make_simple_http_retry_invoker()
            retries.max_time = _RETRY_SECONDS
        return self._connect(RuntimeTokenHttpInterceptor(token), retries)

    def _connect(
        self, interceptor: object, retries: RetryInvoker | None
    ) -> RuntimeHttpClient:
        return RuntimeHttpClient.from_server_address(
            server_address=self.address,
            insecure=True,  # on this machine, by loopback
            root_certificates=None,
            interceptors=[
                RuntimeVersionHttpInterceptor(component_name="flwr-clientapp"),
                interceptor,  # type: ignore[list-item]
            ],
            retry_invoker=retries,
        )


def acquire_task(client: RuntimeHttpClient) -> ClaimedTask | None:
    """Claim the oldest task that nobody has claimed; None if there is none."""
    response = client.AcquireTask(
        AcquireTaskRequest(supported_task_types={TaskType.CLIENT_APP})
    )
    if not response.HasField("task") or not response.token:
        return None
    return ClaimedTask(response.task.run_id, response.token)


@dataclass(frozen=True)
class AppBundle:
    """A Flower app: its bytes, and the id and version that the run states."""

    content: bytes
    app_id: str
    version: str

    @property
    def hash(self) -> str:
        """The hash of the bytes themselves, whatever the run states."""
        return hashlib.sha256(self.content).hexdigest()

    def load(self) -> ClientApp:
        """Unpack the app into Flower's folder, and import its ClientApp."""
        install_from_fab(self.content, skip_prompt=True)
        load = get_load_client_app_fn(default_app_ref="", app_path=None, multi_app=True)
        return load(self.app_id, self.version, self.hash)


def _expectations() -> Iterator[Expectation]:
    pulls = ("PullMessages", "PullObject", "ConfirmMessageReceived")
    yield "pull_task_input makes them", uses_names(pull_task_input, *pulls)
    yield "push_message calls PushMessages", uses_names(push_message, "PushMessages")


PATCH = Patch(
    target="RuntimeHttpClient of a worker",
    lost="every object between a SuperNode and its worker is a call of its own",
    upstream="batched object transfer in the Runtime API",
    expectations=_expectations,
)


class ClientTask:
    """A task under way: its message is pulled, and its heartbeat runs.

    Parameters
    ----------
    runtime : Runtime
    token : str
        Of the task.
    on_message : callable (bytes, Metadata) -> None
        Called with enough of the message to fail it by (`fail_task`), and with its
        metadata, as soon as the message is ours: before its objects are pulled.
    """

    def __init__(self, runtime: Runtime, token: str, on_message: OnMessage) -> None:
        self._client = runtime.connect_with_token(token)
        self._reply: Message | None = None
        does_inline = PATCH.fits()
        if does_inline:
            inlining.InlineObjectsClient(self._client, lambda _: None)
        pull, push = self._client.PullMessages, self._client.PushMessages

        def pull_messages(request: PullAppMessagesRequest) -> PullAppMessagesResponse:
            response = pull(request)
            for head in response.messages_list:
                inlining.remove_inline(head)
                metadata = message_from_proto(head).metadata
                on_message(head.SerializeToString(), metadata)
            return response

        def push_messages(request: PushAppMessagesRequest) -> PushAppMessagesResponse:
            reply = self._reply
            if does_inline and reply is not None and reply.has_content():
                (head,), (tree,) = request.messages_list, request.message_object_trees
                objects = inlining.deflate_small_objects(reply, {})
                inline = inlining.select_inline(tree.object_id, objects) or {}
                inlining.attach_inline(head, inline)
            return push(request)

        self._client.PullMessages = pull_messages  # type: ignore[method-assign]
        self._client.PushMessages = push_messages  # type: ignore[method-assign]
        self._heartbeat = HeartbeatSender(make_task_heartbeat_fn_http(self._client))
        self._heartbeat.start()
        self.message, self.context, run, fab = pull_task_input(self._client)
        self.bundle = AppBundle(fab.content, run.fab_id, run.fab_version)

    def send_reply(self, reply: Message) -> None:
        """Send the reply, and keep the context that the app has left."""
        self._reply = reply
        push_message(self._client, reply, self.context)
        push_task_output(self._client, self.context, SubStatus.COMPLETED, "")

    def send_error(self, code: int, reason: str) -> None:
        """Send an error in place of a reply; the app's state stays as it was."""
        error = Message(Error(code=code, reason=reason), reply_to=self.message)
        push_message(self._client, error, self.context)
        push_task_output(self._client, None, SubStatus.FAILED, reason)

    def close(self) -> None:
        """Stop the heartbeat and disconnect."""
        if self._heartbeat.is_running:
            self._heartbeat.stop()
        self._client.close()


def fail_task(runtime: Runtime, token: str, head: bytes, reason: str) -> None:
    """Answer with an error for a process that has died over its task.

    Parameters
    ----------
    runtime : Runtime
    token : str
    head : bytes
        What the process had seen of its message; empty if it had not pulled it. Then
        the message is still there, and nobody but us would ever answer it.
    reason : str
    """
    with runtime.connect_with_token(token, does_retry=False) as client:
        if not head:
            found = client.PullMessages(PullAppMessagesRequest()).messages_list
            if not found:
                return  # it has just been pulled: Flower answers for it in a minute
            head = found[0].SerializeToString()
        message = message_from_proto(MessageProto.FromString(head))
        metadata = message.metadata
        TaskIdentity.run_id, TaskIdentity.node_id = (
            metadata.run_id,
            metadata.dst_node_id,
        )
        TaskIdentity.task_id = 1
        error = Error(code=ErrorCode.CLIENT_APP_CRASHED, reason=reason)
        reply = Message(error, reply_to=message)
        state = RecordDict()
        context = Context(metadata.run_id, metadata.dst_node_id, {}, state, {})
        # Where the dead one's own reply is being sent just now, no other is taken.
        with suppress(ObjectPushError):
            push_message(client, reply, context)
        push_task_output(client, None, SubStatus.FAILED, reason)
