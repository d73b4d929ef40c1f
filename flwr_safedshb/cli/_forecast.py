"""What the theory says about a federation, and about those one step away."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from statistics import NormalDist
from typing import Any

from flwr_safedshb import theory
from flwr_safedshb.algorithm.expectation import Expectation, expect_plan
from flwr_safedshb.privacy.plan import PrivacyPlan
from flwr_safedshb.privacy.samplers import load_samplers
from flwr_safedshb.privacy.samplers.standard import Whole

Alternatives = list[tuple[str, "Forecast"]]
# Standard deviations of the noise in an accuracy that are offered.
_DEVIATIONS = (0.02, 0.05, 0.1, 0.2)
_SPLIT = "0" * 16


def _option(flags: str, text: str, **default: object) -> Any:
    """Return a field that an option of the command line sets."""
    return field(metadata={"flags": flags.split(), "help": text}, **default)  # type: ignore[call-overload]


@dataclass(frozen=True)
class FederationSpec:
    """A federation as its owners describe it; one-letter names are the paper's.

    Either `epsilon`, to calibrate the noise to, or `noise_multiplier` is given.
    """

    n: int = _option("-n --num-nodes", "n, clients")
    f: int = _option(
        "-f --num-malicious-nodes", "f, clients that may be hostile; 2f < n"
    )
    m: int = _option("-m --num-examples", "m, examples of each client")
    d: int = _option("-d --dimension", "d, parameters of the model")
    b: int = _option("-b --batch-size", "b, examples in a batch; at most m")
    steps: int = _option("-T --steps", "T, steps of training")
    delta: float = _option("--delta", "of the privacy guarantee")
    epsilon: float | None = None
    noise_multiplier: float | None = None
    sampling: str = "fixed"
    clip_norm: float = _option("-C --clip-norm", "C (default: 1)", default=1.0)
    heterogeneity: float = _option(
        "-G --heterogeneity",
        "G, root mean square distance of honest gradients from their mean (0)",
        default=0.0,
    )
    momentum: float = _option(
        "--momentum",
        "beta, which averages the noise of many steps (0.99, the strategy's)",
        default=0.99,
    )
    gradient_std: float | None = _option(
        "--gradient-std",
        "sigma, root mean square distance of the gradients of single examples from "
        "their client's (C, the most that clipping leaves)",
        default=None,
    )
    signal: float | None = _option(
        "--signal",
        "how much of the mean clipped gradient points the way to a good model, a tenth "
        "of that way from the first; to say if training withstands (tune measures it)",
        default=None,
    )
    distance: float | None = _option(
        "--distance", "from the first model to that good one", default=None
    )
    learning_rate: float = _option(
        "--learning-rate",
        "gamma, of the server (1); the first, if it decays",
        default=1.0,
    )
    decay: str = "constant"

    def __post_init__(self) -> None:
        if (self.signal is None) != (self.distance is None):
            raise ValueError(
                f"signal={self.signal} and distance={self.distance} need each other: "
                "give both, as safedshb tune prints them, or neither"
            )

    @property
    def path(self) -> float:
        """The sum of the learning rates."""
        mean = (self.steps + 1) / 2 if self.decay == "linear" else self.steps
        return self.learning_rate * mean

    def make_plan(self) -> PrivacyPlan:
        """Return the privacy plan, calibrated where a target epsilon is given."""
        shape: dict[str, Any] = {
            "clip_norm": self.clip_norm,
            "batch_size": self.b,
            "num_examples": self.m,
            "sampling": self.sampling,
        }
        if self.epsilon is not None:
            return PrivacyPlan.calibrate(self.epsilon, self.delta, self.steps, **shape)
        noise = self.noise_multiplier or 0.0
        plan = PrivacyPlan(noise_multiplier=noise, **shape)
        if noise == 0.0:
            raise ValueError(
                f"noise_multiplier={noise} gives no privacy; it must be above 0"
            )
        return plan


@dataclass(frozen=True)
class Forecast:
    """What the theory says about a federation.

    Attributes
    ----------
    lower : Trilemma
        No algorithm can go below it, up to constants and logarithms.
    upper : Trilemma
        Proved for one aggregate of SMEA; its `combined` bounds the error.
    momentum_noise_std : float
        Of the noise in a momentum, in every coordinate.
    noise_spread : float
        The most that this noise adds, on average, to the top eigenvalue of the honest
        momentums' covariance.
    radius : float
        At a model that stays put and has a larger gradient, no adversary turns a step
        uphill on average.
    push : float
        No aggregate of the run is farther from the honest mean, with probability 0.95.
    """

    spec: FederationSpec
    plan: PrivacyPlan
    epsilon: float
    kappa: float
    lower: theory.Trilemma
    upper: theory.Trilemma
    momentum_noise_std: float
    noise_spread: float
    radius: float
    push: float

    @property
    def verdict(self) -> theory.Verdict | None:
        """Whether the training will withstand; None if no signal is given."""
        spec = self.spec
        if spec.signal is None or spec.distance is None:
            return None
        return theory.predict_withstanding(
            self.push, spec.signal, spec.distance, spec.path
        )

    @property
    def gain_over_alone(self) -> float | None:
        """The harm that a client's own noise does alone over that of adversaries."""
        spec = self.spec
        if spec.f == 0:
            return None
        memory = spec.steps * (1.0 - spec.momentum) / (1.0 + spec.momentum)
        return theory.compare_with_alone(spec.n, spec.f, spec.d, self.kappa, memory)

    @property
    def training(self) -> Expectation:
        """Whether the training has a chance against its noise."""
        spec = self.spec
        return expect_plan(self.plan, spec.steps, spec.delta, spec.d, spec.n, spec.f)


def forecast(spec: FederationSpec) -> Forecast:
    """Compute what the theory says, or refuse a combination that cannot be."""
    n, f, d, spread = spec.n, spec.f, spec.d, spec.heterogeneity
    kappa = theory.kappa_smea(n, f)
    # Refused before the noise is calibrated, which takes a second.
    theory.mean_estimation_bound(n, f, d, 0.0, kappa, spread)
    left = theory.noise_in_momentum(1.0, spec.momentum)
    plan = spec.make_plan()
    epsilon = plan.epsilon(spec.steps, spec.delta)
    std = spec.clip_norm if spec.gradient_std is None else spec.gradient_std
    sampling = theory.batch_variance(std, spec.b, spec.m)
    noise = left * plan.noise_std
    step = (n, f, d, noise, kappa, spread, left**2 * sampling)
    return Forecast(
        spec,
        plan,
        epsilon,
        kappa,
        theory.lower_bound(_describe_problem(spec, epsilon)),
        theory.mean_estimation_bound(*step),
        noise,
        theory.noise_spread(n - f, d, noise)[1],
        theory.stopping_radius(*step),
        theory.push_radius(*step[:5], spec.steps, *step[5:]),
    )


def list_alternatives(now: Forecast) -> Iterator[tuple[str, FederationSpec]]:
    """Yield federations one step away, each with what is changed."""
    spec = now.spec
    yield f"n = {spec.n + 1}", replace(spec, n=spec.n + 1)
    if 2 * spec.f < spec.n - 1:
        yield f"n = {spec.n - 1}", replace(spec, n=spec.n - 1)
    if 2 * (spec.f + 1) < spec.n:
        yield f"f = {spec.f + 1}", replace(spec, f=spec.f + 1)
    if spec.f > 0:
        yield f"f = {spec.f - 1}", replace(spec, f=spec.f - 1)
    slower = 1.0 - (1.0 - spec.momentum) / 2
    yield f"momentum = {slower:.4g}", replace(spec, momentum=slower)
    # Whatever changes what noise costs is compared at the same epsilon.
    target = now.epsilon if spec.epsilon is None else spec.epsilon
    spec = replace(spec, epsilon=target, noise_multiplier=None)
    yield f"m = {2 * spec.m}", replace(spec, m=2 * spec.m)
    for other_epsilon in (target / 2, 2 * target):
        yield f"epsilon = {other_epsilon:.4g}", replace(spec, epsilon=other_epsilon)
    for other in epsilon_by_sampling(now):
        if other != spec.sampling:
            yield f"{other} batches", replace(spec, sampling=other)
    if spec.b < spec.m:
        yield f"b = {spec.m}", replace(spec, b=spec.m)
    if spec.steps > 1:
        yield f"T = {spec.steps // 2}", replace(spec, steps=spec.steps // 2)
    yield f"T = {2 * spec.steps}", replace(spec, steps=2 * spec.steps)
    yield (
        f"rate = {spec.learning_rate / 2:g}",
        replace(spec, learning_rate=spec.learning_rate / 2),
    )
    # What a smaller clip leaves of the signal is in proportion to it or more.
    signal = None if spec.signal is None else spec.signal / 2
    yield (
        f"C = {spec.clip_norm / 2:g}",
        replace(spec, clip_norm=spec.clip_norm / 2, signal=signal),
    )


def to_json(now: Forecast, others: Alternatives) -> dict[str, object]:
    """Return a forecast as plain values."""
    spec = now.spec
    return {
        "setting": asdict(spec),
        "privacy": {
            "noise_multiplier": now.plan.noise_multiplier,
            "noise_std": now.plan.noise_std,
            "momentum_noise_std": now.momentum_noise_std,
            "epsilon": now.epsilon,
            "statement": str(now.plan.statement(spec.steps, spec.delta)),
            "epsilon_by_sampling": epsilon_by_sampling(now),
        },
        "training": asdict(now.training),
        "kappa": list_kappas(spec),
        "lower_bound": _trilemma_to_json(now.lower)
        | {
            "up_to": "constants and logarithms",
            "violated_assumptions": find_violations(now),
            "proven": [
                term for term, lacking in violations_by_term(now).items() if not lacking
            ],
            "violated_by_term": violations_by_term(now),
        },
        "smea_bound": _trilemma_to_json(now.upper) | {"combined": now.upper.combined},
        "noise_spread": now.noise_spread,
        "stopping_radius": now.radius,
        "push_radius": now.push,
        "withstands": now.verdict,
        "gain_over_alone": now.gain_over_alone,
        "what_if": [
            {
                "change": change,
                "epsilon": then.epsilon,
                "noise_std": then.plan.noise_std,
                "kappa": then.kappa,
                "lower_bound_factor": then.lower.total / now.lower.total,
                "smea_bound_factor": then.upper.combined / now.upper.combined,
                "stopping_radius": then.radius,
                "push_radius": then.push,
                "withstands": then.verdict,
            }
            for change, then in others
        ],
    }


def epsilon_by_sampling(now: Forecast) -> dict[str, float]:
    """Return epsilon at the same noise, for every sampler that takes these numbers."""
    spec, found = now.spec, {}
    for sampling in load_samplers():
        if sampling == Whole.name != spec.sampling:
            continue  # what fixed batches of that size are, too
        try:
            plan = replace(now.plan, sampling=sampling)
        except ValueError:
            continue
        found[sampling] = plan.epsilon(spec.steps, spec.delta)
    return found


def list_kappas(spec: FederationSpec) -> dict[str, float]:
    """Return the constants of robust averaging."""
    n, f = spec.n, spec.f
    return {
        "smea": theory.kappa_smea(n, f),
        "smea_paper": theory.kappa_smea_paper(n, f),
        "filter": theory.kappa_filter(n, f),
        "filter_paper": theory.kappa_filter_paper(n, f),
        "lower_bound": theory.kappa_lower_bound(n, f),
    }


def _trilemma_to_json(found: theory.Trilemma) -> dict[str, object]:
    # JSON has no infinity.
    factor = found.dominance if found.dominance < math.inf else None
    return {**asdict(found), "dominant": found.dominant, "dominance": factor}


def find_violations(now: Forecast) -> list[str]:
    """Return what the lower bound's theorem assumes and the federation lacks."""
    problem = _describe_problem(now.spec, now.epsilon)
    return list(theory.lower_bound_violations(problem))


def violations_by_term(now: Forecast) -> dict[theory.Term, tuple[str, ...]]:
    """Return, for each term of the lower bound, what its own proof lacks."""
    return theory.term_violations(_describe_problem(now.spec, now.epsilon))


def _describe_problem(spec: FederationSpec, epsilon: float) -> theory.MeanEstimation:
    sizes = (spec.n, spec.f, spec.m, spec.d)
    privacy = (epsilon, spec.delta)
    return theory.MeanEstimation(*sizes, *privacy, spec.heterogeneity, spec.clip_norm)


@dataclass(frozen=True)
class EvaluationForecast:
    """What `count` private evaluations by every node cost, and how precise they are.

    Attributes
    ----------
    examples : int
        Of a node, that each evaluation is about.
    epsilon : float
        Of the whole run, steps and evaluations.
    deviation : float
        Standard deviation of the noise in a node's accuracy.
    reach : float
        By how much the server's interval goes beyond what nodes report, on each side.
    open_to_liars : bool
        Whether f >= n/3, so that liars alone can take its ends to 0 or 1.
    """

    count: int
    examples: int
    noise_multiplier: float
    epsilon: float
    deviation: float
    reach: float
    open_to_liars: bool


def forecast_evaluations(
    now: Forecast, count: int, held_out: int
) -> list[EvaluationForecast]:
    """Forecast evaluations on held-out examples, or on all at several precisions.

    Examples that are held out, beside the m that train, may spend as much on
    evaluations as the others on steps.
    """
    if count < 1:
        raise ValueError(f"evaluations={count} must be at least 1")
    if held_out < 0:
        raise ValueError(f"held_out={held_out} must be at least 0")
    examples = held_out or now.spec.m
    if held_out:
        plan = PrivacyPlan.calibrate(
            now.epsilon,
            now.spec.delta,
            count,
            clip_norm=1.0,
            batch_size=held_out,
            num_examples=held_out,
            sampling="whole",
        )
        multipliers = [plan.noise_multiplier]
    else:
        multipliers = [d * examples / math.sqrt(2.0) for d in _DEVIATIONS]
    return [
        _forecast_evaluation(now, count, examples, noise, held_out)
        for noise in multipliers
    ]


def _forecast_evaluation(
    now: Forecast, count: int, examples: int, noise: float, held_out: int
) -> EvaluationForecast:
    from flwr_safedshb.privacy.accounting.accountant import compute_epsilon

    spec, steps = now.spec, now.plan
    evaluation = PrivacyPlan(1.0, noise, examples, examples, sampling="whole")
    if held_out:
        steps = replace(steps, part=f"trained:{_SPLIT}")
        evaluation = replace(evaluation, part=f"held-out:{_SPLIT}")
    spent = compute_epsilon([(steps, spec.steps), (evaluation, count)], spec.delta)
    deviation = math.sqrt(2.0) * noise / examples
    z = NormalDist().inv_cdf(1.0 - 0.05 / (2 * (spec.n - spec.f)))
    is_open = spec.f > 0 and 3 * spec.f >= spec.n
    return EvaluationForecast(
        count, examples, noise, spent, deviation, z * deviation, is_open
    )
