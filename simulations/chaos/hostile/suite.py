"""A federation under attack: first by one of its nodes, then by strangers."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
from flwr.app import Context, Message, UserConfig
from flwr.clientapp import ClientApp

from flwr_safedshb.simulation.in_process import InProcessGrid
from flwr_safedshb.strategy import SafeDSHB
from simulations.chaos import checks
from simulations.chaos.client import train
from simulations.chaos.hostile.insider import ATTACKS, Settings
from simulations.chaos.hostile.probe import Probe
from simulations.chaos.hostile.rows import Report, Row, row, slow
from simulations.chaos.hostile.speaker import Speaker
from simulations.chaos.hostile.stranger import KINDS
from simulations.chaos.problem import BETA, DELTA, HOSTILE, MAX_EPSILON, NODES, Vector
from simulations.chaos.server import TRACE, initial
from simulations.chaos.trial import Trial
from simulations.loopback import ROOT, Deployment

_APP = ROOT / "simulations" / "chaos" / "flower-app"
_CONFIG = {"max-epsilon": MAX_EPSILON, "delta": DELTA, "require-secure-noise": False}
# Seconds a round waits: the insider fails in the end, so that none has to.
_TIMEOUT = 60.0

Say = Callable[[str], None]


def attacked(
    folder: Path,
    seed: int,
    attacks: Sequence[str],
    quiet: int,
    strangers: Sequence[str],
    seconds: float,
    say: Say,
    visit: Callable[[Deployment], None] = lambda federation: None,
) -> Report:
    """Train while a node attacks, then let strangers come; say what came of it.

    Parameters
    ----------
    folder : Path
        Must not exist.
    seed : int
    attacks : sequence of str
        What the insider does, a round each; several in one are joined by ``+``.
    quiet : int
        Rounds before, in which it only fails, to compare with.
    strangers : sequence of str
        Kinds of them, one after the other.
    seconds : float
        How long each of them stays.
    say : callable of a text
    visit : callable of the federation
        Is called while it trains.
    """
    rounds = ["be-silent"] * quiet + list(attacks)
    where = folder / "federation"
    say("a SuperLink, a gate and four SuperNodes start; the fifth is a program")
    with Deployment(where, NODES, _CONFIG, _APP, absent=[HOSTILE]) as federation:
        assert federation.credentials is not None
        trial = Trial(federation, folder / "run", seed, len(rounds), _TIMEOUT)
        output = _start_insider(federation, trial, rounds)
        trial.wait(output.exists)
        trial.submit()
        honest = Speaker(
            f"127.0.0.1:{federation.gate_port}",
            federation.credentials.ca,
            federation.credentials.node_key("node-0"),
            federation.node_ids[0],
        )
        # A heartbeat of ours before that of the node would keep it out.
        trial.wait_step(0)
        with Probe(honest, federation.pid("gate")) as probe:
            visit(federation)
            trial.wait_end()
            say("the training has ended")
            notes = [json.loads(line) for line in output.read_text().splitlines()[1:]]
            rows = _insider_rows(trial, probe, notes, quiet)
            federation.kill("insider")
            rows += _stranger_rows(federation, probe, strangers, seconds, say)
        difference = _difference(trial)
        return Report(rows, difference, wrong(trial, difference), slow(rows))


def wrong(trial: Trial, difference: float) -> list[str]:
    """Say what does not hold of a training that was attacked, and should."""
    found = [
        *checks.ended(trial),
        *checks.counted(trial),
        *checks.nothing_leaked(trial),
        *_charged_as_asked(trial),
        *_answered_as_asked(trial),
    ]
    if difference:
        found.append(
            f"the model is {difference:g} off that of a run where the node was silent"
        )
    return found


def _start_insider(federation: Deployment, trial: Trial, rounds: Sequence[str]) -> Path:
    """Start the hostile program; return the file it writes to."""
    assert federation.credentials is not None
    trial.folder.mkdir()
    output = trial.folder / "insider.jsonl"
    settings = Settings(
        f"127.0.0.1:{federation.gate_port}",
        str(federation.credentials.ca),
        str(federation.credentials.node_key(f"node-{HOSTILE}")),
        federation.node_ids[HOSTILE],
        [federation.node_ids[node] for node in checks.HONEST],
        str(trial.folder / TRACE),
        str(output),
        list(rounds),
    )
    path = trial.folder / "insider.json"
    path.write_text(json.dumps(asdict(settings)))
    _start(federation, "insider", "simulations.chaos.hostile.insider", str(path))
    return output


def _start(federation: Deployment, name: str, module: str, *arguments: str) -> None:
    # Its own work is to take little time from the gate, for it would be on another
    # machine; and some, where others are busy as well.
    command = ("nice", "-n", "5", sys.executable, "-m", module, *arguments)
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    federation.start_program(name, *command, environment=environment)


def _insider_rows(
    trial: Trial, probe: Probe, notes: Sequence[dict[str, object]], quiet: int
) -> list[Row]:
    progress = trial.progress()
    assert progress is not None
    begins = [float(str(note["begin"])) for note in notes] + [time.monotonic()]
    before = probe.between(begins[0], begins[quiet])
    wasted = sum(
        max(trial.charges(node) - _asked(trial, node), 0) for node in checks.HONEST
    )
    rows = []
    for number, note in enumerate(notes[quiet : trial.steps], start=quiet + 1):
        name = str(note["attack"])
        during = probe.between(begins[number - 1], begins[number])
        lost = int(bool(progress.train[number]["skipped"]))
        ignored = progress.train[number]["ignored"]
        seen = f"{note['said']}" + (f"; {ignored} ignored" if ignored else "")
        tried = " ".join(str(ATTACKS[part].__doc__) for part in name.split("+"))
        found = row(name, tried, seen, during, before)
        rows.append(replace(found, lost_rounds=lost, wasted_steps=wasted))
    return rows


def _stranger_rows(
    federation: Deployment,
    probe: Probe,
    kinds: Sequence[str],
    seconds: float,
    say: Say,
) -> list[Row]:
    assert federation.credentials is not None
    address = f"127.0.0.1:{federation.gate_port}"
    trusted = str(federation.credentials.ca)
    visits: dict[str, tuple[float, float]] = {}
    for kind in kinds:
        say(f"strangers: {kind}")
        output = federation.folder / f"{kind}.jsonl"
        module = "simulations.chaos.hostile.stranger"
        options = (kind, address, str(seconds), trusted, str(output))
        _start(federation, kind, module, *options)
        while federation.is_running(kind):
            time.sleep(0.1)
        visits[kind] = json.loads(output.read_text())["begin"], time.monotonic()
    # Of all times before an attack: other programs may be busy in any of them.
    before = [s for b, _ in visits.values() for s in probe.between(b - seconds, b)]
    rows = []
    for kind, (begin, end) in visits.items():
        what, at_a_time = KINDS[kind]
        tried = f"{str(what.__doc__).rstrip('.')} ({at_a_time} at a time)."
        rows.append(row(kind, tried, "", probe.between(begin, end), before))
    return rows


def _asked(trial: Trial, node: int) -> int:
    sent, _ = trial.messages()
    return sum(m.node == trial.federation.node_ids[node] for m in sent)


def _charged_as_asked(trial: Trial) -> list[str]:
    """Check that no honest node paid for a step that the server did not ask of it."""
    return [
        f"node {node} was asked {asked} times and charged {charged} steps"
        for node in checks.HONEST
        if (charged := trial.charges(node)) != (asked := _asked(trial, node))
    ]


def _answered_as_asked(trial: Trial) -> list[str]:
    """Check that every reply answers a message, and no two the same one."""
    sent, received = trial.messages()
    known = {message.id for message in sent}
    answers = [reply.to for reply in received]
    found = [f"a reply to {to!r} was taken" for to in answers if to not in known]
    twice = {to for to in answers if answers.count(to) > 1}
    return found + [f"two replies to {to!r} were taken" for to in sorted(twice)]


def _difference(trial: Trial) -> float:
    """Return how far the model is from that of a run where the node was silent."""
    progress = trial.progress()
    if progress is None:
        return float("inf")
    (model,) = progress.arrays.to_numpy_ndarrays()
    expected = silent_model(trial.seed, trial.steps)
    return float(np.abs(model.reshape(-1).astype(np.float64) - expected).max())


def silent_model(seed: int, steps: int) -> Vector:
    """Train in this process, with a hostile node that only fails; return the model."""
    app = ClientApp()

    @app.train()
    def silent(message: Message, context: Context) -> Message:
        if int(context.node_config["partition-id"]) == HOSTILE:
            raise RuntimeError("crashed")
        return train(message, context)

    config: UserConfig = {"folder": "", "orders": "", "seed": seed}
    strategy = SafeDSHB(num_malicious_nodes=1, momentum=BETA, seed=seed)
    grid = InProcessGrid(app, NODES, config, seed)
    result = strategy.start(grid, initial(), num_rounds=steps)
    (model,) = result.arrays.to_numpy_ndarrays()
    return np.asarray(model.reshape(-1), np.float64)
