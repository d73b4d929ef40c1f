"""Attacks of the studies: none, a sleeper, and colluders who know what the server does.

`Lookahead` knows the schedule, and plans for the model that the run returns.

`Strongest` looks along rays, on which all colluders go the same way. The tireless go on
from what it finds, each of them freely, by an evolution strategy that remembers over
the steps where it was: momentums change little from one to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NoReturn, Self

import numpy as np
from numpy.typing import NDArray

from flwr_safedshb.aggregation.rule import FloatArray
from flwr_safedshb.attacks import Attack, Strongest
from flwr_safedshb.attacks.base import Aggregate
from flwr_safedshb.attacks.candidates import Candidates, check_finite, measure_damage
from flwr_safedshb.attacks.line_search import Rays

Judge = Callable[[FloatArray], FloatArray]

# In every step so many generations of so many children.
GENERATIONS, CHILDREN = 5, 24
# How far the first children go, in units of the honest vectors' deviations, and which
# part of their coordinates moves.
STEP, MOVED = 0.3, 0.4


@dataclass(frozen=True)
class Honest(Attack):
    """No attack: the adversaries follow the protocol, on copies of honest examples.

    A rule still has to allow for f adversaries, so this is what its caution costs.
    """

    replaces_vectors: ClassVar[bool] = False

    def craft_vectors(
        self, honest: FloatArray, f: int, rng: np.random.Generator, aggregate: Aggregate
    ) -> NoReturn:
        """Refuse: what is sent follows from the honest protocol alone."""
        raise TypeError("Honest adversaries make no vectors; let them train")


@dataclass(frozen=True)
class Sleeper(Attack):
    """Send what honest clients send for some rounds, and then another attack.

    A run that returns the mean of its last models forgets what was done to the earlier
    ones. So these spend nothing of the trust that a rule may have in them before.

    Attributes
    ----------
    asleep : int
        Rounds.
    awake : Attack
    """

    asleep: int
    awake: Attack
    _rounds: list[None] = field(default_factory=list, compare=False, repr=False)

    def craft_vectors(
        self,
        honest: FloatArray,
        f: int,
        rng: np.random.Generator,
        aggregate: Aggregate,
    ) -> FloatArray:
        """Return copies of honest vectors, or what the other attack returns."""
        self._rounds.append(None)
        if len(self._rounds) <= self.asleep:
            return honest[np.arange(f) % len(honest)]
        return self.awake.craft_vectors(honest, f, rng, aggregate)


@dataclass(frozen=True)
class Lookahead(Strongest):
    """`Strongest` with the gradient of a `PushPlanner`, which the experiment makes.

    Attributes
    ----------
    output : "last" or "average", optional
        The model they aim at; by default the one that the run returns.
    horizon, num_plans : int
        See `PushPlanner`.
    """

    output: Literal["last", "average"] | None = None
    horizon: int = 100
    num_plans: int = 60


@dataclass(frozen=True)
class Worst(Attack):
    """The attack that an experiment chooses by a rehearsal of its whole run.

    No search within a step can tell which goal does the most harm in the end. So the
    experiment is run once with each attack, with another seed, and the attack is taken
    that leaves the returned model with the highest training loss. That is the worst of
    those named, for the rule, the schedule and the output at hand, up to the chance of
    one run; it is not the worst that there is.

    Attributes
    ----------
    attacks : sequence of str
        Names of ``conf/attack``, all on vectors.
    seed : int
        Added to that of the run.
    """

    attacks: Sequence[str] = ("strongest", "target", "lookahead", "sign-far")
    seed: int = 1_000

    def __post_init__(self) -> None:
        if not self.attacks or self.seed < 1:
            raise ValueError(
                f"attacks={self.attacks} must name one or more, and seed={self.seed} "
                "be at least 1"
            )

    def craft_vectors(
        self, honest: FloatArray, f: int, rng: np.random.Generator, aggregate: Aggregate
    ) -> FloatArray:
        """Return what `Strongest` does: without a rehearsal there is no choice."""
        return Strongest().craft_vectors(honest, f, rng, aggregate)


@dataclass
class Memory:
    """What the colluders remember of the steps so far.

    Attributes
    ----------
    steps : int
    shares : (f, r) array
        Where they wanted to stand, in terms of the basis.
    sent : (f, d) array
    reach : float
        How far children go.
    gradients : (d,) array
        Sum over the steps.
    """

    steps: int = 0
    shares: FloatArray | None = None
    sent: FloatArray | None = None
    reach: float = STEP
    gradients: FloatArray | None = None


@dataclass(frozen=True)
class Tireless(Strongest):
    """`Strongest` in the first of `every` steps, and an evolution from there in all."""

    memory: Memory = field(default_factory=Memory, repr=False, compare=False)

    def craft_vectors(
        self, honest: FloatArray, f: int, rng: np.random.Generator, aggregate: Aggregate
    ) -> FloatArray:
        """Return the worst vectors found, (f, d)."""
        check_finite(honest)
        held, rays = self.memory, self.list_rays(honest, f)
        target = self.target_direction(honest)

        def judge(shares: FloatArray) -> FloatArray:
            candidates = Candidates(rays.basis, shares)
            return measure_damage(honest, candidates, f, aggregate, target)

        known = [] if held.shares is None else [held.shares[None]]
        if held.steps % self.every == 0:
            known += self._found_on(rays, judge)
        parents = np.concatenate(known)
        harm = judge(parents)
        best, most = parents[harm.argmax()], harm.max()
        for _ in range(GENERATIONS):
            moves = rng.normal(scale=held.reach, size=(CHILDREN, *best.shape))
            children = best + moves * (rng.random(moves.shape) < MOVED)
            harm = judge(children)
            better = harm.max() > most
            held.reach = float(np.clip(held.reach * (1.5 if better else 0.8), 0.01, 1))
            if better:
                best, most = children[harm.argmax()], harm.max()
        sent = self.sendable(honest, Candidates(rays.basis, best[None]))
        held.steps, held.shares = held.steps + 1, best
        held.sent = sent.vectors_of(0, honest.mean(axis=0))
        return held.sent

    def _found_on(self, rays: Rays, judge: Judge) -> list[FloatArray]:
        """Return the best of all rays, and of the best rays searched more finely."""

        def judge_rays(some: NDArray[np.intp], scales: FloatArray) -> FloatArray:
            return judge(rays.evaluate_at(some, scales).shares).reshape(scales.shape)

        best = []
        for some, scales, harm in self._search_rays(len(rays.starts), judge_rays):
            ray, scale = np.unravel_index(harm.argmax(), harm.shape)
            found = rays.evaluate_at(some[[ray]], scales[ray, scale].reshape(1, 1))
            best.append(found.shares)
        return best

    def sendable(self, honest: FloatArray, wanted: Candidates) -> Candidates:
        """Return what the server will make of candidates."""
        return wanted


@dataclass(frozen=True)
class AimedAtMean(Tireless):
    """Against a server that returns the mean of all its models: raise the loss of that.

    The gradient there is about the mean of the gradients so far, and exactly that if
    the loss is quadratic.
    """

    def with_gradient(self, gradient: FloatArray) -> Self:
        """Return the attack of colluders who know the gradients so far."""
        held = self.memory
        before = 0.0 if held.gradients is None else held.gradients
        held.gradients = before + gradient
        return super().with_gradient(held.gradients / (held.steps + 1))


@dataclass(frozen=True)
class Screened(Tireless):
    """Against a server that bounds the gradient which a node claims by its momentum.

    It shortens (m_t - beta m_{t-1}) / (1 - beta) to the bound before it aggregates, and
    honest nodes stay below. The colluders go where they would stand unscreened, as fast
    as the bound lets them. Whoever looks one step ahead instead does little harm: the
    first steps of a long way gain nothing, so they never set out.

    Parameters
    ----------
    momentum : float
        beta.
    bound : float
    """

    momentum: float = 0.99
    bound: float = 1.0

    def sendable(self, honest: FloatArray, wanted: Candidates) -> Candidates:
        """Shorten what each of them adds to its momentum."""
        g, f, r = wanted.shares.shape
        before = self.memory.sent
        if before is None:
            before = np.zeros((f, honest.shape[1]))
        # What each would send that adds nothing: further rows of the basis.
        idle = self.momentum * before - honest.mean(axis=0)
        basis, own = np.vstack((wanted.basis, idle)), np.eye(r + f)[r:]
        added = np.concatenate((wanted.shares, np.zeros((g, f, f))), axis=2) - own
        squares = np.einsum("gfr,rs,gfs->gf", added, basis @ basis.T, added)
        longest = (1.0 - self.momentum) * self.bound
        lengths = np.sqrt(np.maximum(squares, longest**2))
        return Candidates(basis, own + added * (longest / lengths)[:, :, None])
