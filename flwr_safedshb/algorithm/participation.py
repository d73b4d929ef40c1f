"""Choose the nodes of a round, and bound the number of adversaries among them.

Where anybody may join, the bound f is meaningless, because one machine can pose as any
number of nodes (a Sybil attack); `warn_of_open_network` warns of that.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from logging import INFO, WARNING

import numpy as np
from flwr.common import log
from flwr.serverapp import Grid

from flwr_safedshb.algorithm.attendance import FAILING_NODES, Attendance
from flwr_safedshb.flower.compat import lacks_tls
from flwr_safedshb.flower.grid import has_fixed_nodes, is_simulated, unwrap_grid

_POLL_SECONDS = 1.0
_REMEDY = "start it with TLS and --enable-supernode-auth, and register the nodes' keys"


@dataclass(frozen=True)
class Cohort:
    """The nodes of one round.

    Attributes
    ----------
    nodes : list of int
        Their ids, sorted.
    num_malicious : int
        A bound on the adversaries among them.
    confidence : float
        The probability that the bounds of all rounds of the run hold, over the draws of
        the nodes.
    complete : bool
        Whether the round can take a step. If not, only nodes that failed are asked, to
        learn whether they are back.
    """

    nodes: list[int]
    num_malicious: int
    confidence: float
    complete: bool = True

    def __str__(self) -> str:
        text = f"{len(self.nodes)} nodes, {self.num_malicious} or fewer adversarial"
        if self.confidence < 1.0:
            text += f" (in all rounds of the run with probability {self.confidence:g})"
        return text


@dataclass
class Participation:
    """Choose nodes under these settings.

    Attributes
    ----------
    num_malicious_nodes : int
        f, among all nodes.
    fraction : float
        The share of the connected nodes in a round, in (0, 1].
    min_train_nodes : int
        Least number of nodes in a round.
    min_available_nodes : int
        Least number of nodes to choose from, more than 2f.
    confidence : float
        The probability that the bounds on the adversaries among nodes chosen at random
        hold in all rounds of a run; see `split_risk`.
    node_timeout : float
        Seconds to wait for `min_available_nodes`.
    give_up_after : float
        Seconds after which a run ends if all rounds since were skipped because too few
        nodes answered.
    """

    num_malicious_nodes: int
    fraction: float
    min_train_nodes: int
    min_available_nodes: int
    confidence: float
    node_timeout: float
    give_up_after: float
    _last_cohort: float = field(default_factory=time.monotonic, init=False)

    def __post_init__(self) -> None:
        f = self.num_malicious_nodes
        if f < 0:
            raise ValueError(f"num_malicious_nodes={f} must be at least 0")
        if not 0.0 < self.fraction <= 1.0:
            raise ValueError(f"fraction_train={self.fraction} must lie in (0, 1]")
        if self.min_available_nodes <= 2 * f:
            raise ValueError(
                f"min_available_nodes={self.min_available_nodes} must exceed 2f for "
                f"num_malicious_nodes={f}: no rule tolerates f adversaries among 2f "
                "nodes; raise it to at least 2f + 1, or lower f"
            )
        if not 0.0 < self.confidence < 1.0:
            raise ValueError(f"confidence={self.confidence} must lie in (0, 1)")
        if not self.node_timeout >= 0.0:
            raise ValueError(f"node_timeout={self.node_timeout} must be at least 0")
        if not self.give_up_after >= 0.0:
            raise ValueError(f"give_up_after={self.give_up_after} must be at least 0")

    def choose_nodes(
        self,
        grid: Grid,
        rng: Callable[[], np.random.Generator],
        before: Mapping[str, object],
        number: int,
        num_rounds: int | None,
        first: bool,
    ) -> Cohort:
        """Wait for nodes and choose those of a round.

        A round cannot take a step if too few nodes are present, or if half of the
        chosen ones may be adversarial. Then only nodes that failed before are asked, so
        that the round costs the others no privacy budget, and so that nodes which leave
        cannot end a run.

        Parameters
        ----------
        grid : Grid
        rng : callable
            Returns the random generator of the draw.
        before : mapping
            The metrics of the round before, which list the nodes that failed.
        number : int
            t, the number of the round, from 1 on.
        num_rounds : int or None
            T; None if it is unknown.
        first : bool
            Whether it is the first round since the run was started or resumed.

        Raises
        ------
        TimeoutError
            If too few nodes are connected in the first round after `node_timeout`
            seconds, or in later rounds for `give_up_after` seconds.
        ValueError
            If half of the nodes of the first round or more may be adversarial.
        """
        try:
            nodes = self._wait_for_nodes(grid)
        except TimeoutError as error:
            if first:
                raise
            cohort = self._probe_failed([], str(error))
        else:
            usable, returning = nodes, nodes[:0]
            if FAILING_NODES in before:
                attendance = Attendance.from_metrics(before)
                usable, returning = attendance.split(nodes, None if first else number)
            try:
                cohort = self._draw_nodes(
                    usable, returning, len(nodes), rng, number, num_rounds
                )
            except ValueError as error:
                if first:
                    raise
                cohort = self._probe_failed(returning, str(error))
        if cohort.complete:
            self._last_cohort = time.monotonic()
        elif time.monotonic() - self._last_cohort > self.give_up_after:
            raise TimeoutError(
                f"too few nodes have been connected and answering for give_up_after="
                f"{self.give_up_after:g} seconds; start SuperNodes, see why nodes "
                "fail, and resume from the checkpoint"
            )
        log(INFO, "configure_train: %s", cohort)
        return cohort

    def _wait_for_nodes(self, grid: Grid) -> list[int]:
        """Return the ids of all nodes, sorted, once there are enough of them."""
        f = self.num_malicious_nodes
        least = max(self.min_available_nodes, self.min_train_nodes)
        nodes = wait_for_nodes(grid, least, self.node_timeout)
        if len(nodes) >= least:
            return nodes
        more = "start more SuperNodes, or wait longer"
        if has_fixed_nodes(grid):
            more = "simulate more nodes"
        few = f"{len(nodes)} nodes are connected"
        if not has_fixed_nodes(grid):
            few += f" after node_timeout={self.node_timeout:g} seconds"
        if f > 0 and least == 2 * f + 1:
            raise TimeoutError(
                f"num_malicious_nodes={f} needs more than 2f = {2 * f} nodes, and "
                f"{few}; lower it to {max(len(nodes) - 1, 0) // 2} or "
                f"less, or {more}"
            )
        name = "min_available_nodes"
        if self.min_train_nodes > self.min_available_nodes:
            name = "min_train_nodes"
        raise TimeoutError(f"{few}, and {name}={least} are needed; lower it, or {more}")

    def _draw_nodes(
        self,
        usable: list[int],
        returning: list[int],
        connected: int,
        rng: Callable[[], np.random.Generator],
        number: int,
        num_rounds: int | None,
    ) -> Cohort:
        """Draw a round's nodes from the usable and the returning ones."""
        f = self.num_malicious_nodes
        if len(usable) <= 2 * f:
            return self._probe_failed(
                returning,
                f"{len(usable)} connected nodes answered when they were last asked, "
                f"and more than 2f = {2 * f} are needed",
            )
        nodes = sorted([*usable, *returning])
        size = max(int(connected * self.fraction), self.min_train_nodes)
        if size >= len(nodes):
            return Cohort(nodes, f, 1.0)
        risk = split_risk(1 - Fraction(self.confidence), number, num_rounds)
        bound = bound_adversaries(len(nodes), f, size, 1 - risk)
        if 2 * bound >= size:
            rounds = "an open number of" if num_rounds is None else num_rounds
            raise ValueError(
                f"fraction_train={self.fraction} chooses {size} of {len(nodes)} nodes; "
                f"with num_malicious_nodes={f} up to {bound} of them may be "
                f"adversarial in some round (confidence {self.confidence:g} over "
                f"{rounds} rounds), and a rule needs a majority of honest ones: raise "
                "fraction_train or min_train_nodes, or lower num_malicious_nodes or "
                "participation_confidence"
            )
        chosen = rng().choice(len(nodes), size, replace=False)
        drawn = sorted(nodes[i] for i in chosen)
        back = sorted({*drawn}.intersection(returning))
        if size - len(back) <= 2 * bound:
            return self._probe_failed(
                back, f"{len(back)} of {size} drawn nodes failed when last asked"
            )
        return Cohort(drawn, bound, self.confidence)

    def _probe_failed(self, nodes: list[int], problem: str) -> Cohort:
        """Return a cohort of nodes that failed, for a round that takes no step."""
        log(WARNING, "This round cannot take a step: %s", problem)
        return Cohort(nodes, self.num_malicious_nodes, 1.0, complete=False)


def wait_for_nodes(grid: Grid, least: int, timeout: float) -> list[int]:
    """Return the ids of all nodes, sorted, once there are `least`, or time is over.

    Nobody can join the nodes of a simulation in this process, so it does not wait.
    """
    fixed = has_fixed_nodes(grid)
    deadline = time.monotonic() + timeout
    seen = -1
    while len(nodes := sorted(grid.get_node_ids())) < least:
        left = deadline - time.monotonic()
        if fixed or left <= 0:
            break
        if len(nodes) != seen:
            seen = len(nodes)
            log(INFO, "Waiting for nodes: %d connected, %d needed", seen, least)
        time.sleep(min(_POLL_SECONDS, left))
    return nodes


def split_risk(risk: Fraction, number: int, num_rounds: int | None) -> Fraction:
    """Return the share of a run's risk for one of its rounds.

    The shares of all rounds sum to at most `risk`. By the union bound, a statement that
    fails in each round with at most its share, whatever happened before, fails in any
    round of the run with probability at most `risk`.

    Parameters
    ----------
    risk : Fraction
        1 - confidence, of the run.
    number : int
        t, the number of the round, from 1 on.
    num_rounds : int or None
        T. The share is risk / T; if T is unknown it is risk / (t (t + 1)), which sums
        to the risk over all t.
    """
    return risk / (number * (number + 1) if num_rounds is None else num_rounds)


def bound_adversaries(
    num_nodes: int, num_malicious: int, chosen: int, confidence: float | Fraction
) -> int:
    """Bound the number of adversaries among randomly chosen nodes.

    Returns
    -------
    int
        The smallest k with P(X <= k) >= confidence, where X, the adversaries among
        `chosen` of `num_nodes` without replacement, is hypergeometric.
    """
    tail = math.comb(num_nodes, chosen)
    # Exact, so that neither a tail of 1e-12 nor a large number of nodes is lost.
    allowed = (1 - Fraction(confidence)) * tail
    for k in range(min(num_malicious, chosen) + 1):
        rest = num_nodes - num_malicious
        tail -= math.comb(num_malicious, k) * math.comb(rest, chosen - k)
        if tail <= allowed:
            return k
    return min(num_malicious, chosen)


def warn_of_open_network(grid: Grid, f: int, authenticated: bool) -> None:
    """Warn if anybody may join the nodes.

    Authentication needs TLS, so a SuperLink without TLS has none. Whether one with TLS
    authenticates nodes, a strategy cannot see; the user must state it. Every Grid that
    is not known to be a simulation counts as a network.

    Parameters
    ----------
    grid : Grid
    f : int
        The bound on the number of adversaries, above 0.
    authenticated : bool
        Whether the user states that the SuperLink admits registered nodes only.
    """
    if is_simulated(grid):
        return
    if lacks_tls(unwrap_grid(grid)):
        log(
            WARNING,
            "ANYONE CAN JOIN: the SuperLink has no TLS and so no authentication, one "
            "machine can be any number of nodes, and num_malicious_nodes=%d means "
            "nothing; %s",
            f,
            _REMEDY,
        )
    elif not authenticated:
        log(
            WARNING,
            "CAN ANYONE JOIN? A strategy cannot see it, and num_malicious_nodes=%d "
            "means nothing if the SuperLink admits nodes without registered keys: %s, "
            "then say so with authenticated_nodes=True",
            f,
            _REMEDY,
        )
