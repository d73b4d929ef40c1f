"""A registered node that attacks in every round, and then fails as a crashed one does.

Run by the suite: ``python -m simulations.chaos.hostile.insider SETTINGS.json``. It
writes down what the gate answered, attack by attack.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from simulations.chaos.hostile.attacks import ATTACKS, Scene, describe_answer
from simulations.chaos.hostile.node import HEARTBEAT_SECONDS, FleetNode
from simulations.chaos.trace import append_entry

# Not that of the honest nodes, on whose machines it is not.
ADDRESS = "127.0.0.10"


@dataclass(frozen=True)
class InsiderSettings:
    """Where the insider is, who it is, and what else it may know."""

    address: str
    trusted: str
    key: str
    number: int
    others: list[int]
    trace: str
    output: str
    attacks: list[str]  # by round; several in one are joined by +


def attack_until_over(settings: InsiderSettings) -> None:
    """Attack in every round, in the order that was ordered, and then do nothing."""
    trusted, key = Path(settings.trusted), Path(settings.key)
    node = FleetNode(settings.address, trusted, key, settings.number, ADDRESS)
    node.activate_node()
    output = Path(settings.output)
    append_entry(output, {"ready": True})
    threading.Thread(target=_keep_alive, args=(node,), daemon=True).start()
    ordered = iter(settings.attacks)
    while True:
        asked = node.pull_message()
        if asked is None:
            continue
        name = next(ordered, "be-silent")
        scene = Scene(node, asked, settings.others, Path(settings.trace))
        begin = time.monotonic()
        said = "; ".join(_try_attack(part, scene) for part in name.split("+"))
        append_entry(output, {"attack": name, "said": said, "begin": begin})
        node.send_failure(asked)


def _try_attack(name: str, scene: Scene) -> str:
    try:
        return describe_answer(ATTACKS[name](scene))
    except httpx.HTTPError as error:
        return type(error).__name__


def _keep_alive(node: FleetNode) -> None:
    with node.open_link() as link:
        while True:
            time.sleep(HEARTBEAT_SECONDS / 3)
            with suppress(httpx.HTTPError):
                node.send_heartbeat(link)


if __name__ == "__main__":
    attack_until_over(InsiderSettings(**json.loads(Path(sys.argv[1]).read_text())))
