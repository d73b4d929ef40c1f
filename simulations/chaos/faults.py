"""The faults: how each is brought about and repaired, when, and what must hold.

A strike waits in the running trial for the moment that was ordered. A repair ends what
the strike began, as an operator would, so that the federation can go on. Both take the
trial, the node and the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flwr_safedshb.algorithm.budget import LEDGER_NAME
from simulations.chaos.app import Order
from simulations.chaos.exfiltration import REFUSED as APP_REFUSED
from simulations.chaos.exfiltration import bring_apps
from simulations.chaos.problem import HOSTILE
from simulations.chaos.trial import WHOLE, FaultTrial

Strike = Callable[[FaultTrial, int, int], None]
# Of which training a fault is a part: each has its own.
Run = Literal["baseline", "door", "nodes", "server"]
# What must hold of the struck round: no part of the node in any; nobody else joins; all
# have a part; it is done without the node, which comes back; it is done again by all.
Effect = Literal["no part", "none", "whole", "missed", "again"]


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong in one step, by design in one node's part of it."""

    key: str  # for the command line
    name: str  # for people
    run: Run
    node: int  # whom it strikes; for a fault of the server: who is held meanwhile
    step: int
    order: Order | None  # what the node does in that step
    strike: Strike  # what goes wrong
    repair: Strike  # what is then done about it
    log: str  # whose log tells of it; "server" is the server app's
    line: str  # of that log: a regular expression, in which {node} is Flower's id
    effect: Effect  # must hold, beside all that must hold after any fault
    dies_charged: bool = False  # the node is killed between charge and message


DISK = 0  # the node whose ledger has a small disk of its own

_NO_REPLY = r"No reply from (\d+, )*{node}\b"
# Which of the two depends on what is first: that it is back, or a minute.
_LOST = r"Node {node} is excluded: .*(the node was started again|Node Unavailable)"
_REFUSED = r"Node {node} .*the privacy ledger of this node cannot be used"
_JOIN = r"activate-node.*No SuperNode found with the given public key"
_RETRIED = r"Connection attempt failed, retrying"
STRANGER = "stranger"
EXPIRED = "certificate has expired"
UNSIGNED = "the call is not signed by a node's key"
# What a node says when its SuperLink does not let it in; it then tries again.
REFUSED = "The SuperNode has ended; it is started again"
_CLOCK = Path(__file__).parent / "clock"


def do_nothing(trial: FaultTrial, node: int, step: int) -> None:
    """Leave it to the node."""


def release_late(trial: FaultTrial, node: int, step: int) -> None:
    """Let the client go once the server has gone on without it."""
    trial.wait_step(step + 1)
    trial.let_go(node, step)


def kill_node(trial: FaultTrial, node: int, step: int) -> None:
    """Kill -9 the SuperNode and its client where they are held."""
    trial.wait_held(node, step)
    trial.federation.kill(f"node-{node}")
    trial.let_go(node, step)


def stop_node(trial: FaultTrial, node: int, step: int) -> None:
    """Stop the node by SIGTERM in the middle of a step: it ends, and its worker."""
    trial.wait_held(node, step)
    trial.federation.stop(f"node-{node}")
    trial.let_go(node, step)


def restart_node(trial: FaultTrial, node: int, step: int) -> None:
    """Start the node again, as systemd does."""
    trial.restart_nodes(node)


def kill_gate(trial: FaultTrial, node: int, step: int) -> None:
    """Kill -9 the gate while the node computes and the others wait for work."""
    trial.wait_held(node, step)
    trial.federation.kill("gate")


def restart_gate(trial: FaultTrial, node: int, step: int) -> None:
    """Start the gate again, and let the node answer."""
    trial.federation.start_gate()
    trial.let_go(node, step)


def kill_proxy(trial: FaultTrial, node: int, step: int) -> None:
    """Kill -9 HAProxy while the node computes and the others wait for work."""
    trial.wait_held(node, step)
    trial.federation.kill("proxy")


def restart_proxy(trial: FaultTrial, node: int, step: int) -> None:
    """Let the node answer, which finds nobody, and start HAProxy again."""
    trial.let_go(node, step)
    trial.federation.start_proxy()


def fill_disk(trial: FaultTrial, node: int, step: int) -> None:
    """Fill the disk to the last byte, and wait for what the node says."""
    trial.wait_held(node, step)
    path = trial.federation.state_dir(node) / "filler"
    with suppress(OSError), path.open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(512))
    trial.let_go(node, step)
    trial.wait_reply(node, step)


def free_disk(trial: FaultTrial, node: int, step: int) -> None:
    """Make room again."""
    (trial.federation.state_dir(node) / "filler").unlink()


def corrupt_ledger(trial: FaultTrial, node: int, step: int) -> None:
    """Change the charges in the file, and wait for what the node says."""
    trial.wait_held(node, step)
    path = trial.federation.state_dir(node) / LEDGER_NAME
    intact = path.read_bytes()
    (trial.folder / "ledger-backup").write_bytes(intact)
    session = trial.find_session().encode()
    path.write_bytes(intact.replace(session, session[::-1]))
    trial.let_go(node, step)
    trial.wait_reply(node, step)


def restore_ledger(trial: FaultTrial, node: int, step: int) -> None:
    """Put back the newest copy: nothing was released since it was made."""
    path = trial.federation.state_dir(node) / LEDGER_NAME
    path.write_bytes((trial.folder / "ledger-backup").read_bytes())


def advance_clock(trial: FaultTrial, node: int, step: int) -> None:
    """Start a killed node with a clock an hour ahead, until it is refused."""
    kill_node(trial, node, step)
    federation, name = trial.federation, f"node-{node}"
    refused = federation.log(name, WHOLE).count(REFUSED)
    federation.start_node(node, environment=shift_clock(3600))
    trial.wait_log(name, REFUSED, refused + 1)
    # The gate says once a minute what it has refused.
    trial.wait_log("gate", UNSIGNED)
    federation.kill(name)


def delay_clock(trial: FaultTrial, node: int, step: int) -> None:
    """Start the node with a clock 200 s behind; Flower allows 300."""
    trial.restart_nodes(node, environment=shift_clock(-200))


def shift_clock(seconds: int) -> Mapping[str, str]:
    """Return the environment of processes whose clock is wrong by seconds."""
    return {"PYTHONPATH": str(_CLOCK), "CHAOS_CLOCK": str(seconds)}


def join_unregistered(trial: FaultTrial, node: int, step: int) -> None:
    """Start a node with a key that nobody registered, until it is refused."""
    federation = trial.federation
    assert federation.credentials is not None
    trial.wait_step(step)
    key = federation.credentials.node_key(STRANGER)
    federation.start_node(node, name=STRANGER, key=key)
    trial.wait_log(STRANGER, REFUSED)
    federation.kill(STRANGER)


def kill_server_app(trial: FaultTrial, node: int, step: int) -> None:
    """Kill -9 the server app."""
    trial.wait_held(node, step)
    trial.federation.kill_server_app()
    trial.let_go(node, step)


def submit_again(trial: FaultTrial, node: int, step: int) -> None:
    """Submit the run again once Flower knows that it has ended."""
    trial.wait_failed()
    trial.submit_run()


def kill_superlink(trial: FaultTrial, node: int, step: int) -> None:
    """Kill -9 the SuperLink."""
    trial.wait_held(node, step)
    trial.federation.kill("superlink")
    trial.let_go(node, step)


def restart_superlink(trial: FaultTrial, node: int, step: int) -> None:
    """Start the SuperLink again, and submit the run again."""
    trial.federation.start_superlink()
    submit_again(trial, node, step)


def expire_certificate(trial: FaultTrial, node: int, step: int) -> None:
    """Let SuperLink and gate come back with an expired certificate: nobody calls."""
    trial.wait_held(node, step)
    for name in ("proxy", "gate"):
        trial.federation.kill(name)
    kill_superlink(trial, node, step)
    _start_with_certificate(trial, days=-1)
    trial.wait_log(f"node-{node}", EXPIRED)
    with suppress(RuntimeError):
        trial.submit_run()
        raise AssertionError("a run was submitted under an expired certificate")


def renew_certificate(trial: FaultTrial, node: int, step: int) -> None:
    """Give SuperLink and gate a valid certificate, and start all again.

    A SuperNode that met the expired one has stopped to work, though not its process.
    """
    nodes = trial.federation.node_ids
    for name in (*(f"node-{index}" for index in nodes), "proxy", "gate", "superlink"):
        trial.federation.kill(name)
    _start_with_certificate(trial, days=365)
    trial.wait_failed()
    # First the nodes: those that were killed count as there for a minute.
    trial.restart_nodes(*nodes)
    trial.submit_run()


def _start_with_certificate(trial: FaultTrial, days: int) -> None:
    assert trial.federation.credentials is not None
    trial.federation.credentials.renew(days)
    trial.federation.start_superlink()
    trial.federation.start_gate()
    trial.federation.start_proxy()


# fmt: off
FAULTS = (
    Fault("hostile", "f hostile nodes, throughout",
          "baseline", HOSTILE, 0, None, do_nothing, do_nothing,
          "server", r"Node {node} is excluded: not-finite", "no part"),
    Fault("unregistered-key", "SuperNode with an unregistered key",
          "baseline", 0, 0, None, join_unregistered, do_nothing,
          "superlink", _JOIN, "none"),
    Fault("unapproved-app", "a run brings an app that no owner approved",
          "baseline", 0, 1, None, bring_apps, do_nothing,
          "node-0", APP_REFUSED, "none"),
    Fault("gate-killed", "gate killed in a round",
          "door", 0, 1, "hold-before", kill_gate, restart_gate,
          "node-1", _RETRIED, "whole"),
    Fault("proxy-killed", "HAProxy killed in a round",
          "door", 1, 2, "hold-after", kill_proxy, restart_proxy,
          "node-1", _RETRIED, "whole"),
    Fault("gate-killed-late", "gate killed while a node replies",
          "door", 2, 3, "hold-after", kill_gate, restart_gate,
          "node-1", _RETRIED, "whole"),
    Fault("killed-before", "SuperNode killed before it charged",
          "nodes", 0, 1, "hold-before", kill_node, restart_node,
          "server", _LOST, "missed"),
    Fault("killed-after", "SuperNode killed after it charged",
          "nodes", 1, 1, "hold-after", kill_node, restart_node,
          "server", _LOST, "missed", dies_charged=True),
    Fault("replay", "client answers a previous round's message",
          "nodes", 3, 2, "replay", do_nothing, do_nothing,
          "node-3", r"Failed to send message .*Client error '400", "missed"),
    Fault("late", "client sleeps past the timeout",
          "nodes", 2, 2, "hold-after", FaultTrial.wait_held, release_late,
          "server", _NO_REPLY, "missed"),
    Fault("full-disk", "the ledger's disk is full",
          "nodes", DISK, 3, "hold-before", fill_disk, free_disk,
          "server", _REFUSED, "missed"),
    Fault("corrupt-ledger", "the ledger is corrupted",
          "nodes", 1, 3, "hold-before", corrupt_ledger, restore_ledger,
          "server", _REFUSED, "missed"),
    Fault("stopped", "node stopped by SIGTERM in the middle of a step",
          "nodes", 2, 4, "hold-after", stop_node, restart_node,
          "server", _LOST, "missed", dies_charged=True),
    Fault("wrong-clock", "node's clock is an hour ahead",
          "nodes", 3, 4, "hold-before", advance_clock, delay_clock,
          "gate", UNSIGNED, "missed"),
    Fault("server-app-killed", "server app killed in a round",
          "server", 0, 1, "hold-after", kill_server_app, submit_again,
          "server", r"Resuming from .* after round 1$", "again"),
    Fault("server-app-killed-early", "server app killed before a node has charged",
          "server", 0, 2, "hold-before", kill_server_app, submit_again,
          "server", r"Resuming from .* after round 2$", "again"),
    Fault("superlink-killed", "SuperLink killed in a round",
          "server", 1, 3, "hold-after",
          kill_superlink, restart_superlink,
          "server", r"Resuming from .* after round 3$", "again"),
    Fault("expired-certificate", "SuperLink's certificate has expired",
          "server", 2, 4, "hold-after",
          expire_certificate, renew_certificate,
          "node-2", EXPIRED, "again"),
)
# fmt: on
