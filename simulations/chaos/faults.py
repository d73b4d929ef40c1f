"""The faults: whom and when each strikes, what a log says of it, and what must hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from simulations.chaos import exfiltration, strikes
from simulations.chaos.app import Order
from simulations.chaos.problem import HOSTILE
from simulations.chaos.trial import FaultTrial

Strike = Callable[[FaultTrial, int, int], None]
# Of which training a fault is a part: each has its own.
Run = Literal["baseline", "nodes", "server"]
# What must hold of the struck round: no part of the node in any; nobody else joins; it
# is done without the node, which comes back; it is done again by all.
Effect = Literal["no part", "none", "missed", "again"]


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
    order : Order or None
        What the node does in that step.
    strike, repair : callable of trial, node and step
        What goes wrong, and what is then done about it.
    log, line : str
        Whose log tells of it (``server`` is the server app's), and the line as a
        regular expression, in which ``{node}`` is Flower's id.
    effect : Effect
        What must hold of the round, beside all that must hold after any fault.
    dies_charged : bool
        Whether the node is killed between its charge and its message.
    """

    key: str
    name: str
    run: Run
    node: int
    step: int
    order: Order | None
    strike: Strike
    repair: Strike
    log: str
    line: str
    effect: Effect
    dies_charged: bool = False


DISK = 0  # the node whose ledger has a small disk of its own

_NO_REPLY = r"No reply from (\d+, )*{node}\b"
# Which of the two depends on what is first: that it is back, or a minute.
_LOST = r"Node {node} is excluded: .*(the node was started again|Node Unavailable)"
_REFUSED = r"Node {node} .*the privacy ledger of this node cannot be used"
_JOIN = r"activate-node.*No SuperNode found with the given public key"

# fmt: off
FAULTS = (
    Fault("hostile", "f hostile nodes, throughout",
          "baseline", HOSTILE, 0, None, strikes.do_nothing, strikes.do_nothing,
          "server", r"Node {node} is excluded: not-finite", "no part"),
    Fault("unregistered-key", "SuperNode with an unregistered key",
          "baseline", 0, 0, None, strikes.join_unregistered, strikes.do_nothing,
          "superlink", _JOIN, "none"),
    Fault("unapproved-app", "a run brings an app that no owner approved",
          "baseline", 0, 1, None, exfiltration.bring_apps, strikes.do_nothing,
          "node-0", exfiltration.REFUSED, "none"),
    Fault("killed-before", "SuperNode killed before it charged",
          "nodes", 0, 1, "hold-before", strikes.kill_node, strikes.restart_node,
          "server", _LOST, "missed"),
    Fault("killed-after", "SuperNode killed after it charged",
          "nodes", 1, 1, "hold-after", strikes.kill_node, strikes.restart_node,
          "server", _LOST, "missed", dies_charged=True),
    Fault("replay", "client answers a previous round's message",
          "nodes", 3, 2, "replay", strikes.do_nothing, strikes.do_nothing,
          "node-3", r"Failed to send message .*Client error '400", "missed"),
    Fault("late", "client sleeps past the timeout",
          "nodes", 2, 2, "hold-after", strikes.hold_client, strikes.release_late,
          "server", _NO_REPLY, "missed"),
    Fault("full-disk", "the ledger's disk is full",
          "nodes", DISK, 3, "hold-before", strikes.fill_disk, strikes.free_disk,
          "server", _REFUSED, "missed"),
    Fault("corrupt-ledger", "the ledger is corrupted",
          "nodes", 1, 3, "hold-before", strikes.corrupt_ledger, strikes.restore_ledger,
          "server", _REFUSED, "missed"),
    Fault("wrong-clock", "node's clock is an hour ahead",
          "nodes", 3, 4, "hold-before", strikes.advance_clock, strikes.delay_clock,
          "gate", strikes.UNSIGNED, "missed"),
    Fault("server-app-killed", "server app killed in a round",
          "server", 0, 1, "hold-after", strikes.kill_server_app, strikes.submit_again,
          "server", r"Resuming from .* after round 1$", "again"),
    Fault("superlink-killed", "SuperLink killed in a round",
          "server", 1, 3, "hold-after",
          strikes.kill_superlink, strikes.restart_superlink,
          "server", r"Resuming from .* after round 3$", "again"),
    Fault("expired-certificate", "SuperLink's certificate has expired",
          "server", 2, 4, "hold-after",
          strikes.expire_certificate, strikes.renew_certificate,
          "node-2", strikes.EXPIRED, "again"),
)
# fmt: on
