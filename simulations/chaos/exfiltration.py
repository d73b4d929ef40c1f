"""A run that brings code of its own: it reads what a node must not give away.

No floor and no ledger holds against code, only the node's list of approved apps. The
app leaves a file for whatever it could do on a node: ``imported``, and ``read-<node>``
with the files it has read. Its server writes down what it was answered.
"""

from __future__ import annotations

import json
from pathlib import Path

from simulations.chaos.trial import PATIENCE_SECONDS, FaultTrial
from simulations.loopback import Deployment

REFUSED = r"this node's policy approved-apps refuses the run"
ANSWERS = "answers.json"

_FILES = {
    "pyproject.toml": """[project]
name = "{name}"
version = "0.1.0"
description = "An app"
license = "Apache-2.0"

[tool.flwr.app]
publisher = "safedshb"

[tool.flwr.app.components]
serverapp = "spyserver:server"
clientapp = "spyclient:client"

[tool.flwr.app.config]
nodes = 1
""",
    "spyclient.py": """
from pathlib import Path
from flwr.app import Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

FOLDER, HOSTILE = Path({folder!r}), {hostile!r}
if HOSTILE:
    (FOLDER / "imported").touch()
client = ClientApp()

@client.train()
def train(message, context):
    node, taken = context.node_config, 0
    if HOSTILE:
        # The ledger, the momentum, the examples, and every key that lies about.
        state = Path(str(node["state-dir"]))
        places = [*state.glob("*"), *state.parent.glob("**/*.key")]
        places += [Path(str(node[key])) for key in ("data",) if key in node]
        found = {{str(p): len(p.read_bytes()) for p in places if p.is_file()}}
        taken = sum(found.values())
        (FOLDER / f"read-{{node['partition-id']}}").write_text(repr(found))
    metrics = MetricRecord({{"node": int(node["partition-id"]), "taken": taken}})
    return Message(RecordDict({{"metrics": metrics}}), reply_to=message)
""",
    "spyserver.py": """
import json, time
from pathlib import Path
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import ServerApp

server = ServerApp()

@server.main()
def main(grid, context):
    while len(nodes := [*grid.get_node_ids()]) < int(context.run_config["nodes"]):
        time.sleep(0.2)
    content = RecordDict({{"config": ConfigRecord({{"step": 0}})}})
    asked = [Message(content, node, MessageType.TRAIN) for node in nodes]
    replies = [*grid.send_and_receive(asked, timeout=300.0)]
    answers = [
        {{"error": reply.error.reason}}
        if reply.has_error()
        else dict(reply.content.metric_records["metrics"])
        for reply in replies
    ]
    folder = Path({folder!r})
    (folder / ".answers").write_text(json.dumps(answers))
    (folder / ".answers").rename(folder / {answers!r})
""",
}


def write_app(folder: Path, name: str, *, hostile: bool = True) -> Path:
    """Write the app into a folder of its own, and return that.

    Parameters
    ----------
    folder : Path
        Where it leaves what it has done; is made.
    name : str
        What the app calls itself.
    hostile : bool
        False for the same app without what it does to a node.
    """
    app = folder / "app"
    app.mkdir(parents=True)
    values = {"name": name, "folder": str(folder), "answers": ANSWERS}
    for file, text in _FILES.items():
        (app / file).write_text(text.format(**values, hostile=hostile))
    return app


def run_app(federation: Deployment, app: Path, num_nodes: int) -> list[dict[str, str]]:
    """Run the app, and return what each node answered."""
    run_id = federation.submit({"nodes": num_nodes}, app)
    federation.wait(run_id, PATIENCE_SECONDS)
    answers: list[dict[str, str]] = json.loads((app.parent / ANSWERS).read_text())
    return answers


def bring_apps(trial: FaultTrial, node: int, step: int) -> None:
    """Submit the app beside the training: under another name, and under its own."""
    trial.wait_step(step)
    for name in ("spy-app", "chaos-app"):
        folder = trial.folder / f"of-{name}"
        answers = run_app(trial.federation, write_app(folder, name), 1)
        ran = any("error" not in answer for answer in answers)
        if ran or (folder / "imported").exists() or any(folder.glob("read-*")):
            raise AssertionError(f"{name} ran on a node: {answers}")
