"""How each fault is brought about, and what an operator then does about it.

A strike waits in the running trial for the moment that was ordered. A repair ends what
the strike began, so that the federation can go on. All take the trial, node and step.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from flwr_safedshb.algorithm.budget import LEDGER_NAME
from simulations.chaos.trial import WHOLE, FaultTrial

STRANGER = "stranger"
EXPIRED = "certificate has expired"
UNSIGNED = "the call is not signed by a node's key"
# What a node says when its SuperLink does not let it in; it then tries again.
REFUSED = "The SuperNode has ended; it is started again"
_CLOCK = Path(__file__).parent / "clock"


def do_nothing(trial: FaultTrial, node: int, step: int) -> None:
    """Leave it to the node."""


def hold_client(trial: FaultTrial, node: int, step: int) -> None:
    """Hold the client."""
    trial.wait_held(node, step)


def release_late(trial: FaultTrial, node: int, step: int) -> None:
    """Let the client go once the server has gone on without it."""
    trial.wait_step(step + 1)
    trial.let_go(node, step)


def kill_node(trial: FaultTrial, node: int, step: int) -> None:
    """Kill -9 the SuperNode and its client where they are held."""
    trial.wait_held(node, step)
    trial.federation.kill(f"node-{node}")
    trial.let_go(node, step)


def restart_node(trial: FaultTrial, node: int, step: int) -> None:
    """Start the node again, as systemd does."""
    trial.restart_nodes(node)


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
    trial.federation.kill("gate")
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
    for name in (*(f"node-{index}" for index in nodes), "gate", "superlink"):
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
