"""A federation under attack: first by one of its nodes, then by strangers."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from simulations.chaos.app import TRACE, train, without_backoff
from simulations.chaos.checks import check_charges, check_ended, check_leaks
from simulations.chaos.hostile.attacks import ATTACKS
from simulations.chaos.hostile.insider import InsiderSettings
from simulations.chaos.hostile.node import FleetNode
from simulations.chaos.hostile.report import (
    AttackOutcome,
    AttackReport,
    Probe,
    check_outcomes,
    make_outcome,
)
from simulations.chaos.hostile.stranger import KINDS
from simulations.chaos.problem import (
    DELTA,
    HONEST,
    HOSTILE,
    MAX_EPSILON,
    NODES,
    Vector,
)
from simulations.chaos.suite import APP, Say
from simulations.chaos.tolerance import train_in_process
from simulations.chaos.trace import read_entries
from simulations.chaos.trial import FaultTrial
from simulations.loopback import ROOT, Deployment

_CONFIG = {"max-epsilon": MAX_EPSILON, "delta": DELTA, "require-secure-noise": False}
# Seconds a round waits: the insider fails in the end, so that none has to.
_TIMEOUT = 60.0


def attack_federation(
    folder: Path,
    seed: int,
    attacks: Sequence[str],
    quiet: int,
    strangers: Sequence[str],
    seconds: float,
    say: Say,
    visit: Callable[[Deployment], None] = lambda federation: None,
) -> AttackReport:
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
    with Deployment(
        where, NODES, _CONFIG, APP, absent=[HOSTILE], proxied=True
    ) as federation:
        assert federation.credentials is not None
        trial = FaultTrial(federation, folder / "run", seed, len(rounds), _TIMEOUT)
        trial.backoff = False
        output = _start_insider(federation, trial, rounds)
        trial.wait(output.exists)
        trial.submit_run()
        honest = FleetNode(
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
            # An attack may go on for a moment after its round.
            trial.wait(
                lambda: (
                    len(read_entries(output)) > len(rounds)
                    or not federation.is_running("insider")
                )
            )
            say("the training has ended")
            notes = read_entries(output)[1:]
            rows = _make_insider_rows(trial, probe, notes, quiet)
            federation.kill("insider")
            rows += _let_strangers_come(federation, probe, strangers, seconds, say)
        expected = train_silently(trial.seed, trial.steps)
        difference = float(np.abs(trial.load_model() - expected).max())
        problems = check_attacked(trial, difference)
        if len(notes) < len(rounds):
            problems.append(
                f"the node attacked in {len(notes)} of {len(rounds)} rounds"
            )
        return AttackReport(rows, difference, problems, check_outcomes(rows))


def check_attacked(trial: FaultTrial, difference: float) -> list[str]:
    """Say what does not hold of a training that was attacked, and should."""
    problems = [*check_ended(trial), *check_charges(trial), *check_leaks(trial)]
    # No honest node may pay for a step that the server did not ask of it.
    problems += [
        f"node {node} was asked {asked} times and charged {charged} steps"
        for node in HONEST
        if (charged := trial.count_charges(node))
        != (asked := len(trial.list_asked(node)))
    ]
    # Every reply must answer a message, and no two the same one.
    sent, received = trial.read_messages()
    known = {message.id for message in sent}
    answers = [reply.to for reply in received]
    problems += [f"a reply to {to!r} was taken" for to in answers if to not in known]
    twice = {to for to in answers if answers.count(to) > 1}
    problems += [f"two replies to {to!r} were taken" for to in sorted(twice)]
    if difference:
        problems.append(
            f"the model is {difference:g} off that of a run where the node was silent"
        )
    return problems


def train_silently(seed: int, steps: int) -> Vector:
    """Train in this process, with a hostile node that only fails; return the model."""
    app = ClientApp()

    @app.train()
    def train_or_fail(message: Message, context: Context) -> Message:
        if int(context.node_config["partition-id"]) == HOSTILE:
            raise RuntimeError("crashed")
        return train(message, context)

    with without_backoff():
        return train_in_process(app, seed, steps)


def _start_insider(
    federation: Deployment, trial: FaultTrial, rounds: Sequence[str]
) -> Path:
    """Start the hostile program; return the file it writes to."""
    assert federation.credentials is not None
    trial.folder.mkdir()
    output = trial.folder / "insider.jsonl"
    settings = InsiderSettings(
        f"127.0.0.1:{federation.gate_port}",
        str(federation.credentials.ca),
        str(federation.credentials.node_key(f"node-{HOSTILE}")),
        federation.node_ids[HOSTILE],
        [federation.node_ids[node] for node in HONEST],
        str(trial.folder / TRACE),
        str(output),
        list(rounds),
    )
    path = trial.folder / "insider.json"
    path.write_text(json.dumps(asdict(settings)))
    _start_program(federation, "insider", "insider", str(path))
    return output


def _start_program(
    federation: Deployment, name: str, module: str, *arguments: str
) -> None:
    # Its own work is to take little time from the gate, for it would be on another
    # machine; and some, where others are busy as well.
    module = f"simulations.chaos.hostile.{module}"
    command = ("nice", "-n", "5", sys.executable, "-m", module, *arguments)
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    federation.start_program(name, *command, environment=environment)


def _make_insider_rows(
    trial: FaultTrial, probe: Probe, notes: Sequence[dict[str, Any]], quiet: int
) -> list[AttackOutcome]:
    progress = trial.load_progress()
    assert progress is not None
    begins = [float(note["begin"]) for note in notes] + [time.monotonic()]
    before = probe.between(begins[0], begins[quiet])
    wasted = sum(
        max(trial.count_charges(node) - len(trial.list_asked(node)), 0)
        for node in HONEST
    )
    rows = []
    for number, note in enumerate(notes[quiet : trial.steps], start=quiet + 1):
        name, metrics = str(note["attack"]), progress.train[number]
        during = probe.between(begins[number - 1], begins[number])
        ignored = metrics["ignored"]
        seen = f"{note['said']}" + (f"; {ignored} ignored" if ignored else "")
        tried = " ".join(str(ATTACKS[part].__doc__) for part in name.split("+"))
        lost = int(bool(metrics["skipped"]))
        rows.append(make_outcome(name, tried, seen, during, before, lost, wasted))
    return rows


def _let_strangers_come(
    federation: Deployment,
    probe: Probe,
    kinds: Sequence[str],
    seconds: float,
    say: Say,
) -> list[AttackOutcome]:
    assert federation.credentials is not None
    address = f"127.0.0.1:{federation.gate_port}"
    visits: dict[str, tuple[float, float]] = {}
    for kind in kinds:
        say(f"strangers: {kind}")
        output = federation.folder / f"{kind}.jsonl"
        words = (kind, address, str(seconds), str(federation.credentials.ca))
        _start_program(federation, kind, "stranger", *words, str(output))
        while federation.is_running(kind):
            time.sleep(0.1)
        visits[kind] = read_entries(output)[0]["begin"], time.monotonic()
    # Of all times before an attack: other programs may be busy in any of them.
    before = [s for b, _ in visits.values() for s in probe.between(b - seconds, b)]
    rows = []
    for kind, (begin, end) in visits.items():
        what, at_a_time = KINDS[kind]
        tried = f"{str(what.__doc__).rstrip('.')} ({at_a_time} at a time)."
        rows.append(make_outcome(kind, tried, "", probe.between(begin, end), before))
    return rows
