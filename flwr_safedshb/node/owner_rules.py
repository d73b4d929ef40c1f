"""What the owner of a node permits, read anew from the node's file for every message.

An owner who tightens the policy, changes the budget or withdraws an approval must not
have to restart the node for it. A file that cannot be read permits nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from logging import INFO, WARNING

from flwr.app import UserConfig
from flwr.common import log

from flwr_safedshb.node.approvals import KEY, Approvals
from flwr_safedshb.node.node_file import NodeFile, read_node_file

_UNREADABLE = (
    "the file of this node cannot be read, so nothing is permitted; its log says why"
)


@dataclass(frozen=True)
class Permission:
    """What holds for one message.

    Attributes
    ----------
    config : mapping
        The node's config, with its policy and its budget.
    refusal : str, optional
        Why nothing is permitted, in words that the server may read.
    """

    config: UserConfig
    refusal: str | None = None

    def find_refusal(self, bundle_hash: str) -> str | None:
        """Return what the server is told if an app must not run, else None."""
        if self.refusal is not None:
            return self.refusal
        return Approvals.parse(self.config.get(KEY)).find_refusal(bundle_hash)


class OwnerRules:
    """The node's file, read again whenever somebody asks.

    Parameters
    ----------
    node : NodeFile
        As it was when the node started.
    """

    def __init__(self, node: NodeFile) -> None:
        self._node = node
        self._last = Permission(node.config)

    def read(self) -> Permission:
        """Return what is permitted now; the log says if that has changed."""
        try:
            node = read_node_file(self._node.path)
            Approvals.parse(node.config.get(KEY))
            now = Permission(node.config)
        except (OSError, ValueError) as error:
            now = Permission({}, _UNREADABLE)
            if now != self._last:
                log(WARNING, "Nothing is permitted until this is repaired: %s", error)
        else:
            if now != self._last:
                log(INFO, "In force from now on: %s", self._describe_changes(now))
            if node.connection != self._node.connection:
                log(WARNING, "[supernode] has changed: restart the node for it")
                self._node = node
        self._last = now
        return now

    def _describe_changes(self, now: Permission) -> str:
        if self._last.refusal is not None:
            return "the file can be read again"
        before, after = self._last.config, now.config
        keys = sorted({*before, *after})
        return ", ".join(
            f"{key} = {after.get(key, '(not set)')!r}"
            for key in keys
            if before.get(key) != after.get(key)
        )
