"""The faults: whom and when each strikes, and the line of a log that tells of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from simulations.chaos import spy, strikes
from simulations.chaos.client import Order
from simulations.chaos.problem import HOSTILE
from simulations.chaos.trial import Trial

Strike = Callable[[Trial, int, int], None]
# Of which training a fault is a part: each has its own.
Run = Literal["baseline", "nodes", "server"]
Whom = Literal["node", "server", "outsider"]

DISK = 0  # the node whose ledger has a small disk of its own


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong in one step, by design in one node's part of it.

    Attributes
    ----------
    key, name : str
        For the command line, and for people.
    run : Run
    node, step : int
        Whom it strikes, and when. For a fault of the server: who is held meanwhile.
    strike, repair : callable of trial, node and step
        What goes wrong, and what is then done about it.
    line : str
        What a log says of it, as a regular expression; ``{node}`` is Flower's id.
    log : str
        Whose log: ``server`` is the server app's.
    order : Order or None
        What the node does in that step.
    whom : Whom
        A fault of the server strikes every node, one of an outsider should none.
    dies_charged : bool
        Whether the node is killed between its charge and its message.
    """

    key: str
    name: str
    run: Run
    node: int
    step: int
    strike: Strike
    line: str
    log: str = "server"
    order: Order | None = None
    repair: Strike = strikes.nothing
    whom: Whom = "node"
    dies_charged: bool = False


_NO_REPLY = r"No reply from (\d+, )*{node}\b"
# Which of the two depends on what is first: that it is back, or a minute.
_LOST = r"Node {node} is excluded: .*(the node was started again|Node Unavailable)"
_REFUSED = r"Node {node} .*the privacy ledger of this node cannot be used"

FAULTS = (
    Fault(
        "hostile",
        "f hostile nodes, throughout",
        "baseline",
        HOSTILE,
        0,
        strikes.nothing,
        r"Node {node} is excluded: not-finite",
    ),
    Fault(
        "unregistered-key",
        "SuperNode with an unregistered key",
        "baseline",
        0,
        0,
        strikes.join_unregistered,
        r"activate-node.*No SuperNode found with the given public key",
        log="superlink",
        whom="outsider",
    ),
    Fault(
        "unapproved-app",
        "a run brings an app that no owner approved",
        "baseline",
        0,
        1,
        spy.bring_unapproved_app,
        spy.REFUSED,
        log="node-0",
        whom="outsider",
    ),
    Fault(
        "killed-before",
        "SuperNode killed before it charged",
        "nodes",
        0,
        1,
        strikes.kill_node,
        _LOST,
        order="hold-before",
        repair=strikes.restart_node,
    ),
    Fault(
        "killed-after",
        "SuperNode killed after it charged",
        "nodes",
        1,
        1,
        strikes.kill_node,
        _LOST,
        order="hold-after",
        repair=strikes.restart_node,
        dies_charged=True,
    ),
    Fault(
        "replay",
        "client answers a previous round's message",
        "nodes",
        3,
        2,
        strikes.nothing,
        r"Failed to send message .*Client error '400",
        log="node-3",
        order="replay",
    ),
    Fault(
        "late",
        "client sleeps past the timeout",
        "nodes",
        2,
        2,
        strikes.hold,
        _NO_REPLY,
        order="hold-after",
        repair=strikes.release_when_over,
    ),
    Fault(
        "full-disk",
        "the ledger's disk is full",
        "nodes",
        DISK,
        3,
        strikes.fill_disk,
        _REFUSED,
        order="hold-before",
        repair=strikes.free_disk,
    ),
    Fault(
        "corrupt-ledger",
        "the ledger is corrupted",
        "nodes",
        1,
        3,
        strikes.corrupt_ledger,
        _REFUSED,
        order="hold-before",
        repair=strikes.restore_ledger,
    ),
    Fault(
        "wrong-clock",
        "node's clock is an hour ahead",
        "nodes",
        3,
        4,
        strikes.hurry_clock,
        strikes.UNSIGNED,
        log="gate",
        order="hold-before",
        repair=strikes.slow_clock,
    ),
    Fault(
        "server-app-killed",
        "server app killed in a round",
        "server",
        0,
        1,
        strikes.kill_server_app,
        r"Resuming from .* after round 1$",
        order="hold-after",
        repair=strikes.submit_again,
        whom="server",
    ),
    Fault(
        "superlink-killed",
        "SuperLink killed in a round",
        "server",
        1,
        3,
        strikes.kill_superlink,
        r"Resuming from .* after round 3$",
        order="hold-after",
        repair=strikes.restart_superlink,
        whom="server",
    ),
    Fault(
        "expired-certificate",
        "SuperLink's certificate has expired",
        "server",
        2,
        4,
        strikes.expire_certificate,
        strikes.EXPIRED,
        log="node-2",
        order="hold-after",
        repair=strikes.renew_certificate,
        whom="server",
    ),
)
