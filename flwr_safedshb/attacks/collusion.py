"""Attacks by colluders who search where to stand, which way to push, and how far.

The paper's attacks start from the honest mean. That wastes room: a set of one honest
vector and f copies of it, all shifted by c, has the covariance of two points, with its
top eigenvalue c^2 f/(f+1)^2. So colluders who gather around ONE honest client can go
much farther before a rule sees them as more spread than the honest ones.

No proven bound is broken by that. (f, kappa)-robustness allows an error of
sqrt(kappa lambda_max), and where that exceeds the gradient, adversaries can stop the
training: these attacks find out.

What honest clients send are momentums, averages over many steps, that lag behind the
gradient. Colluders who hold examples of their own know better: `gradient` is theirs at
the model of the step, and what an aggregate does to their loss is, to first order, its
inner product with that. But what lowers the loss least in every step need not leave the
highest loss in the end: the model swings, and pushes that follow its gradient cancel.
Colluders with a goal for the whole run push one way throughout.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray

from flwr_safedshb.aggregation.rule import FloatArray, check_positive
from flwr_safedshb.attacks.base import Aggregate, Attack
from flwr_safedshb.attacks.candidates import (
    check_finite,
    check_grid,
    find_worst,
    measure_damage,
)
from flwr_safedshb.attacks.line_search import (
    DIRECTIONS,
    Direction,
    Rays,
    farthest_clients,
    honest_radius,
    make_rays,
    make_shifts,
)

# How far the colluders go, in units of the honest vectors' root mean squared distance
# from their mean: four values a decade, and 0, which copies the client alone.
SCALES = (0.0, *(float(scale) for scale in np.geomspace(0.1, 10.0, 9)))
# A rule gives way in proportion to the scale until it rejects the colluders, so the
# last step before that decides: the best few rays are searched again, this much finer.
_REFINED, _FINER = 8, 6
# Between two searches colluders try so much shorter and longer on the ray they hold.
_NEAR = np.geomspace(0.5, 2.0, 7)

Indices = NDArray[np.intp]
# Ray indices, (p,), the scales tried on each, (p, s), and their damage, (p, s).
Trial = tuple[Indices, FloatArray, FloatArray]


def ascent_direction(
    honest: FloatArray, gradient: FloatArray | None
) -> FloatArray | None:
    """Return the unit vector against the gradient, or else against the honest mean.

    None if that is zero.
    """
    way = honest.mean(axis=0) if gradient is None else gradient
    length = np.linalg.norm(way)
    if not length:
        return None
    up: FloatArray = -way / length
    return up


@dataclass(frozen=True)
class ColludingAttack(Attack):
    """Send what does the most damage on many rays.

    Parameters
    ----------
    scales : increasing sequence of float
        How far along a ray is tried at first.
    places : int
        How many honest clients the colluders consider, those first that are farthest
        where they want to go.
    every : int
        All rays are searched in the first of so many steps; in the others only the ray
        that was best then, about the scale of the step before. Where a rule takes long,
        as SMEA does with dozens of clients, that makes a search of a whole run
        possible. An attack with `every` above 1 belongs to one run.
    gradient : (d,) array, optional
        On the adversaries' own examples, at the model of the step.
    """

    scales: Sequence[float] = SCALES
    places: int = 8
    every: int = 1
    gradient: FloatArray | None = field(default=None, repr=False, compare=False)
    # Ray and scale of each step.
    _held: list[tuple[int, float]] = field(
        default_factory=list, repr=False, compare=False, kw_only=True
    )

    def __post_init__(self) -> None:
        check_grid("scales", self.scales, least=2)
        for name in ("places", "every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")

    def with_gradient(self, gradient: FloatArray) -> Self:
        """Return the attack of colluders who know a gradient."""
        return replace(self, gradient=gradient)

    @abstractmethod
    def list_rays(self, honest: FloatArray, f: int) -> Rays:
        """Return the rays to search."""

    @abstractmethod
    def target_direction(self, honest: FloatArray) -> FloatArray | None:
        """Return the way, (d,), that they want the aggregate to go; None: any."""

    def craft_vectors(
        self, honest: FloatArray, f: int, rng: np.random.Generator, aggregate: Aggregate
    ) -> FloatArray:
        """Return the worst vectors found, (f, d)."""
        check_finite(honest)
        rays, target = self.list_rays(honest, f), self.target_direction(honest)

        def measure(some: Indices, scales: FloatArray) -> FloatArray:
            sent = rays.evaluate_at(some, scales)
            damage = measure_damage(honest, sent, f, aggregate, target)
            return damage.reshape(scales.shape)

        if len(self._held) % self.every:
            ray, scale = self._held[-1]
            some, scales = np.array([ray]), scale * _NEAR[None]
            trials = [(some, scales, measure(some, scales))]
        else:
            trials = self._search_rays(len(rays.starts), measure)
        tried = [
            (ray, scale)
            for some, scales, _ in trials
            for ray, row in zip(some.tolist(), scales.tolist(), strict=True)
            for scale in row
        ]
        damage = np.concatenate([damage.reshape(-1) for _, _, damage in trials])
        ray, scale = tried[find_worst(honest, damage)]
        self._held.append((ray, scale))
        sent = rays.evaluate_at(np.array([ray]), np.array([[scale]]))
        return sent.vectors_of(0, honest.mean(axis=0))

    def _search_rays(
        self, count: int, measure: Callable[[Indices, FloatArray], FloatArray]
    ) -> list[Trial]:
        """Try all rays on the grid of scales, then the best rays between its scales."""
        every = np.arange(count)
        grid = np.broadcast_to(self.scales, (count, len(self.scales)))
        damage = measure(every, grid)
        best = np.argsort(-damage.max(axis=1), kind="stable")[:_REFINED]
        finer = self._refine_scales(damage[best].argmax(axis=1))
        return [(every, grid, damage), (best, finer, measure(best, finer))]

    def _refine_scales(self, best: Indices) -> FloatArray:
        """Return scales on both sides of grid[best], (p,), as (p, 2 _FINER)."""
        grid = np.asarray(self.scales)
        here = grid[best][:, None]
        below = grid[np.maximum(best - 1, 0)][:, None]
        above = grid[np.minimum(best + 1, len(grid) - 1)][:, None]
        share = np.arange(1, _FINER + 1) / (_FINER + 1)
        return np.hstack(
            (below + share * (here - below), here + share * (above - here))
        )


@dataclass(frozen=True)
class MimicShift(ColludingAttack):
    """Stand where one honest client stands, and go from there.

    Client, direction and scale are searched in every step.

    Parameters
    ----------
    scales : increasing sequence of float
        Of the shift, in units of the honest root mean squared distance.
    places, every, gradient
        See `ColludingAttack`.
    directions : sequence of "mean", "gradient", "deviation", "spectrum"
        The negated mean of the honest vectors, the negated gradient of the adversaries'
        own examples, the standard deviations of the coordinates, the direction in which
        honest vectors vary most; of the last two the side that leads away.
    aim : "descent", "loss" or "distance"
        Whether to minimise the inner product of the aggregate with the honest mean, or
        that with the gradient, which is how much the training loss falls, or to
        maximise the distance from the mean.
    """

    directions: Sequence[Direction] = ("mean",)
    aim: Literal["descent", "loss", "distance"] = "descent"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.directions or set(self.directions) - set(DIRECTIONS):
            raise ValueError(
                f"directions={self.directions} must name one or more of "
                f"{', '.join(DIRECTIONS)}"
            )
        if self.aim not in ("descent", "loss", "distance"):
            raise ValueError(f"aim={self.aim!r} must be descent, loss or distance")

    @property
    def wants_gradient(self) -> bool:
        """Whether a direction or the aim is made of it."""
        return self.aim == "loss" or "gradient" in self.directions

    def list_rays(self, honest: FloatArray, f: int) -> Rays:
        """Return every client with every direction."""
        if self.gradient is None and self.wants_gradient:
            raise ValueError(
                "the adversaries know no gradient: give them one as gradient=..., or "
                "to AdversarialGrid a function that computes it"
            )
        up = ascent_direction(honest, self.gradient if self.wants_gradient else None)
        way = np.zeros(honest.shape[1]) if up is None else up
        places = farthest_clients(honest, way, self.places)
        return make_rays(honest, f, places, make_shifts(honest, way, self.directions))

    def target_direction(self, honest: FloatArray) -> FloatArray | None:
        """Return the way up the loss, or None."""
        if self.aim == "distance":
            return None
        return ascent_direction(honest, self.gradient if self.aim == "loss" else None)


@dataclass(frozen=True)
class Drift(ColludingAttack):
    """Push the same way in every step of a run, from the mean or from a client.

    What a rule lets through once, it lets through every time, and momentum and model
    add it up.

    Parameters
    ----------
    scales, places, every
        As for `MimicShift`.
    seed : int
        Of the direction, the same in all steps.
    """

    seed: int = 0

    def list_rays(self, honest: FloatArray, f: int) -> Rays:
        """Return all places to stand, with the one direction."""
        way = self.target_direction(honest)
        places = [None, *farthest_clients(honest, way, self.places)]
        return make_rays(honest, f, places, honest_radius(honest) * way[None])

    def target_direction(self, honest: FloatArray) -> FloatArray:
        """Return the direction of the run, (d,)."""
        d = honest.shape[1]
        normal: FloatArray = np.random.default_rng(self.seed).normal(size=(d,))
        return np.asarray(normal / np.linalg.norm(normal))


@dataclass(frozen=True)
class _EveryFamily(ColludingAttack):
    """All places to stand, all ways to go, equal vectors and vectors that spread."""

    @abstractmethod
    def known_gradient(self) -> FloatArray | None:
        """Return the gradient, (d,), of what the colluders want to grow, if known."""

    def list_rays(self, honest: FloatArray, f: int) -> Rays:
        """Return the families together."""
        known = self.known_gradient()
        up = ascent_direction(honest, known)
        way = np.zeros(honest.shape[1]) if up is None else up
        names = [name for name in DIRECTIONS if name != "gradient" or known is not None]
        places = [None, *farthest_clients(honest, way, self.places)]
        rays = make_rays(honest, f, places, make_shifts(honest, way, names))
        return rays.add_spread_copies(len(honest))

    def target_direction(self, honest: FloatArray) -> FloatArray | None:
        """Return the way against that gradient, or else against the honest mean."""
        return ascent_direction(honest, self.known_gradient())


@dataclass(frozen=True)
class Strongest(_EveryFamily):
    """In every step the worst of all families, for the rule that is attacked.

    Greedy: the worst for the step, and not for a run. What it takes as its gradient is
    its goal: with that of a `PushPlanner` it is the worst known for most schedules,
    and `Target` is the same search with one goal throughout. Which does the most harm
    to a run, a rehearsal can tell, and no search within a step.

    Of p places, the mean among them, and r directions it tries 2 p r rays: at h = 4
    honest clients 40, for which the rule weighs 496 sets of vectors in a step.

    The colluders stand at the mean or at an honest client, go any way of `MimicShift`,
    and send equal vectors or vectors that spread as the honest ones do. On these rays
    lie `FOE`, `SignFlip`, `Zero`, `Mimic`, `MimicShift`, and `ALIE`, `MinMax` and
    `MinSum` where they lead away from the mean. What counts is how little the loss
    falls: that of the adversaries' own examples, or else as the honest mean tells.

    Parameters
    ----------
    scales, places, every, gradient
        As for `MimicShift`.
    """

    @property
    def wants_gradient(self) -> bool:
        """Yes, though they do without where there is none."""
        return True

    def known_gradient(self) -> FloatArray | None:
        """Return that of the adversaries' own examples."""
        return self.gradient


@dataclass(frozen=True)
class Target(_EveryFamily):
    """Pull the model the same way in every step of a run, as far as the rule lets it.

    What a rule lets through once, it lets through every time, and the model adds it up.
    On the rays of `Strongest`, with the goal in the place of the gradient.

    Parameters
    ----------
    goal : (d,) array, optional
        Where the model shall go, as seen from the first model; only its direction
        counts. The worst that is known is minus the way to the optimum of the
        adversaries' own examples, which an experiment of the repository computes.
        Without a goal they go against the honest mean of the step, which is far weaker.
    scales, places, every
        As for `MimicShift`.
    """

    goal: FloatArray | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.goal is not None and not np.isfinite(self.goal).all():
            raise ValueError("goal holds NaN or infinity; give a finite vector, (d,)")

    @property
    def wants_goal(self) -> bool:
        """Yes, if there is none yet."""
        return self.goal is None

    def with_goal(self, goal: FloatArray) -> Self:
        """Return the attack of colluders who know where the model shall go."""
        return replace(self, goal=goal)

    def known_gradient(self) -> FloatArray | None:
        """Return the goal: it is the gradient of how far along it the model is."""
        return self.goal


@dataclass(frozen=True)
class SignFar(Attack):
    """Send what is far away in every coordinate, on the side of the gradient's sign.

    A rule that trims each coordinate, or takes its median, moves each of them as far as
    f vectors can move it: of all that colluders could send, this raises the loss most,
    to first order. Rules that look at whole vectors see it.

    Parameters
    ----------
    distance : float
        How far, in units of the largest distance of an honest value from its mean.
    gradient : (d,) array, optional
        On the adversaries' own examples, at the model of the step; or else the honest
        mean.
    """

    distance: float = 10.0
    gradient: FloatArray | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_positive("distance", self.distance)

    @property
    def wants_gradient(self) -> bool:
        """Yes, though they do without where there is none."""
        return True

    def with_gradient(self, gradient: FloatArray) -> Self:
        """Return the attack of colluders who know a gradient."""
        return replace(self, gradient=gradient)

    def craft_vectors(
        self, honest: FloatArray, f: int, rng: np.random.Generator, aggregate: Aggregate
    ) -> FloatArray:
        """Return the corner, (d,), that all adversaries send."""
        mean = honest.mean(axis=0)
        way = mean if self.gradient is None else self.gradient
        reach = self.distance * np.abs(honest - mean).max()
        corner: FloatArray = mean - reach * np.sign(way)
        return corner
