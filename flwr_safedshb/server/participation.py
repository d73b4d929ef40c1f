"""Which nodes take part in a round, and how many adversaries may be among them.

That at most f nodes are adversarial says nothing where anybody may join: one machine
can be any number of nodes. `warn_of_strangers` is about that.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from logging import INFO, WARNING

import numpy as np
from flwr.common import log
from flwr.serverapp import Grid

from flwr_safedshb.flower.compat import lacks_tls
from flwr_safedshb.flower.grid import innermost, is_simulated

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
        The probability that the bound holds, over the draw of the nodes.
    """

    nodes: list[int]
    num_malicious: int
    confidence: float

    def __str__(self) -> str:
        text = f"{len(self.nodes)} nodes, {self.num_malicious} or fewer adversarial"
        if self.confidence < 1.0:
            text += f" (with probability {self.confidence:g} in this round)"
        return text


@dataclass
class Participation:
    """How the nodes of a round are chosen.

    Attributes
    ----------
    num_malicious_nodes : int
        f, among all nodes.
    fraction : float
        Share of the available nodes, in (0, 1].
    min_train_nodes : int
        Least number of nodes in a round.
    min_available_nodes : int
        Least number of nodes to choose from, more than 2f.
    confidence : float
        With which the adversaries among nodes chosen at random are bounded.
    node_timeout : float
        Seconds to wait for `min_available_nodes`.
    give_up_after : float
        Seconds after which a run ends if all rounds were skipped for want of nodes.
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
                f"num_malicious_nodes={f}: no rule withstands f of 2f nodes; raise it "
                "to at least 2f + 1, or lower f"
            )
        if not 0.0 < self.confidence < 1.0:
            raise ValueError(f"confidence={self.confidence} must lie in (0, 1)")
        if not self.node_timeout >= 0.0:
            raise ValueError(f"node_timeout={self.node_timeout} must be at least 0")
        if not self.give_up_after >= 0.0:
            raise ValueError(f"give_up_after={self.give_up_after} must be at least 0")

    def gather(
        self, grid: Grid, rng: Callable[[], np.random.Generator], first: bool
    ) -> Cohort:
        """Wait for nodes and choose those of a round, with `rng` where it must.

        After the first round, where too few nodes are left or half of the chosen ones
        or more may be adversarial, the cohort is empty: nodes that leave must not be
        able to end a run.

        Raises
        ------
        TimeoutError
            If too few nodes are there after `node_timeout` seconds, in the first round,
            or have been for `give_up_after` seconds.
        ValueError
            If the first round of a run would have an empty cohort.
        """
        cohort = self._chosen(grid, rng, first)
        if cohort.nodes:
            self._last_cohort = time.monotonic()
        elif time.monotonic() - self._last_cohort > self.give_up_after:
            raise TimeoutError(
                f"too few nodes have been connected for give_up_after="
                f"{self.give_up_after:g} seconds; start SuperNodes, and resume from "
                "the checkpoint"
            )
        log(INFO, "configure_train: %s", cohort)
        return cohort

    def _chosen(
        self, grid: Grid, rng: Callable[[], np.random.Generator], first: bool
    ) -> Cohort:
        least = max(self.min_available_nodes, self.min_train_nodes)
        try:
            nodes = wait_for_nodes(grid, least, self.node_timeout)
        except TimeoutError as error:
            if first:
                raise
            log(WARNING, "Round skipped: %s", error)
            return Cohort([], self.num_malicious_nodes, 1.0)
        size = max(int(len(nodes) * self.fraction), self.min_train_nodes)
        f = self.num_malicious_nodes
        if size >= len(nodes):
            return Cohort(nodes, f, 1.0)
        bound = malicious_bound(len(nodes), f, size, self.confidence)
        if 2 * bound >= size:
            problem = (
                f"fraction_train={self.fraction} chooses {size} of {len(nodes)} nodes; "
                f"with num_malicious_nodes={f} up to {bound} of them may be "
                f"adversarial (confidence {self.confidence:g}), and a rule needs a "
                "majority of honest ones: raise fraction_train, or lower "
                "num_malicious_nodes or participation_confidence"
            )
            if first:
                raise ValueError(problem)
            log(WARNING, "Round skipped: %s", problem)
            return Cohort([], f, 1.0)
        chosen = rng().choice(len(nodes), size, replace=False)
        return Cohort(sorted(nodes[i] for i in chosen), bound, self.confidence)


def wait_for_nodes(grid: Grid, least: int, timeout: float) -> list[int]:
    """Return the ids of all nodes, sorted, once there are `least` of them."""
    deadline = time.monotonic() + timeout
    seen = -1
    while len(nodes := sorted(grid.get_node_ids())) < least:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(
                f"{len(nodes)} nodes are connected after node_timeout={timeout:g} "
                f"seconds, and min_available_nodes={least} are needed; start more "
                "SuperNodes, or wait longer"
            )
        if len(nodes) != seen:
            seen = len(nodes)
            log(INFO, "Waiting for nodes: %d connected, %d needed", seen, least)
        time.sleep(min(_POLL_SECONDS, left))
    return nodes


def malicious_bound(
    num_nodes: int, num_malicious: int, chosen: int, confidence: float
) -> int:
    """Bound the adversaries among nodes that are chosen at random.

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


def warn_of_strangers(grid: Grid, f: int, authenticated: bool) -> None:
    """Warn, once and loudly, if strangers may be among the nodes.

    A strategy sees one half of it: authentication needs TLS, so a SuperLink without TLS
    has none. For the other half there is only the user's word. Simulated nodes are no
    strangers; whatever Grid is not known to simulate its nodes is taken for a network.

    Parameters
    ----------
    grid : Grid
        What the run's messages go through.
    f : int
        The bound on the adversaries, above 0.
    authenticated : bool
        The user's word that the SuperLink admits registered nodes only.
    """
    if is_simulated(grid):
        return
    if lacks_tls(innermost(grid)):
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
