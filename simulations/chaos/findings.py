"""What came of a fault: what was seen, lost and changed, and what should not have."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from simulations.chaos import checks
from simulations.chaos.band import Band
from simulations.chaos.checks import HONEST, epsilon
from simulations.chaos.faults import Fault
from simulations.chaos.problem import HOSTILE
from simulations.chaos.trial import Trial


@dataclass(frozen=True)
class Finding:
    """One row of the report.

    Attributes
    ----------
    fault, name : str
    seen : str
        The line of the log.
    lost_steps : int
        Steps that a node charged for and the server could not use; the most of any
        node for a fault of the server.
    lost_epsilon : float
        What they cost.
    effect : str
    distance : float
        Of the final model of the run from the optimum.
    problems : list of str
        What does not hold and should.
    """

    fault: str
    name: str
    seen: str
    lost_steps: int
    lost_epsilon: float
    effect: str
    distance: float
    problems: list[str]

    def as_json(self) -> dict[str, object]:
        """Return the row for a file."""
        return asdict(self)


def examined(trial: Trial, faults: list[Fault], band: Band) -> list[Finding]:
    """Hold an ended trial against all that must be true after its faults."""
    died_charged = {fault.node for fault in faults if fault.dies_charged}
    common = [
        *checks.ended(trial),
        *checks.counted(trial, died_charged),
        *checks.nothing_leaked(trial),
        *checks.hostile_had_no_part(trial),
    ]
    distance = checks.distance(trial)
    if not distance <= band.limit:
        common.append(f"the model is {distance:.3f} off, and without a fault {band}")
    return [_finding(trial, fault, distance, common) for fault in faults]


def _finding(trial: Trial, fault: Fault, distance: float, common: list[str]) -> Finding:
    problems = list(common)
    seen = checks.found_line(trial, fault.log, fault.line, fault.node)
    if seen is None:
        problems.append(f"no line of the log of {fault.log} has {fault.line!r}")
    lost, cost = _lost(trial, fault)
    effect, wrong = _effect(trial, fault)
    return Finding(
        fault.key,
        fault.name,
        seen or "",
        lost,
        cost,
        effect,
        distance,
        problems + wrong,
    )


def _lost(trial: Trial, fault: Fault) -> tuple[int, float]:
    """Return the steps lost to a fault, and their epsilon, for the worst hit node."""
    nodes = HONEST if fault.whom == "server" else {fault.node} - {HOSTILE}
    worst = (0, 0.0)
    for node in nodes:
        released, charges = trial.released(node), trial.charges(node)
        lost = released.count(fault.step) - (fault.step in trial.used(node))
        lost += (charges - len(released)) * fault.dies_charged
        worst = max(worst, (lost, epsilon(charges) - epsilon(charges - lost)))
    return worst


def _effect(trial: Trial, fault: Fault) -> tuple[str, list[str]]:
    """Say what the fault did to the training, and what is wrong with that."""
    round_ = fault.step + 1
    if fault.node == HOSTILE:
        return "no part in any round", []
    if fault.whom == "server":
        sent, _ = trial.messages()
        times = sum(
            message.step == fault.step
            and message.node == trial.federation.node_ids[fault.node]
            for message in sent
        )
        wrong = [] if times == 2 else [f"round {round_} was done {times} times"]
        return f"round {round_} is done again", wrong
    if fault.whom == "outsider":
        sent, _ = trial.messages()
        known = set(trial.federation.node_ids.values())
        strangers = {message.node for message in sent} - known
        return "none", [f"{node} took part" for node in strangers]
    used = trial.used(fault.node)
    back = min((step + 1 for step in used if step > fault.step), default=None)
    wrong = [] if back else [f"node {fault.node} never came back"]
    if fault.step in used:
        wrong.append(f"node {fault.node} was struck and not missed in round {round_}")
    return f"round {round_} without it; back in round {back}", wrong
