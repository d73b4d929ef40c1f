"""What the theory says of a federation, and of those one step away."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from flwr_safedshb import theory
from flwr_safedshb.privacy.plan import PrivacyPlan
from flwr_safedshb.privacy.samplers import load_samplers
from flwr_safedshb.privacy.samplers.standard import Whole

Others = list[tuple[str, "Forecast"]]


@dataclass(frozen=True)
class Setting:
    """A federation as its owners describe it; symbols are the paper's.

    Of `epsilon`, to calibrate the noise to, and `noise_multiplier` one is given.
    `gradient_std` is sigma, of single examples; None stands for C, the most that
    clipping leaves. `gradient` is the length of the gradient at the first model; None
    if it is not known.
    """

    n: int
    f: int
    m: int
    d: int
    b: int
    clip_norm: float
    steps: int
    delta: float
    sampling: str
    epsilon: float | None
    noise_multiplier: float | None
    heterogeneity: float
    momentum: float = 0.0
    gradient_std: float | None = None
    gradient: float | None = None
    learning_rate: float = 1.0
    smoothness: float = 0.0

    def plan(self) -> PrivacyPlan:
        """Return the privacy plan, calibrated where a target is given."""
        if self.epsilon is not None:
            return PrivacyPlan.calibrate(
                self.epsilon,
                self.delta,
                self.steps,
                clip_norm=self.clip_norm,
                batch_size=self.b,
                num_examples=self.m,
                sampling=self.sampling,
            )
        noise = self.noise_multiplier or 0.0
        plan = PrivacyPlan(self.clip_norm, noise, self.b, self.m, self.sampling)
        if noise == 0.0:
            raise ValueError(
                f"noise_multiplier={noise} gives no privacy; it must be above 0"
            )
        return plan


@dataclass(frozen=True)
class Forecast:
    """What the theory says of a setting.

    Attributes
    ----------
    lower : Trilemma
        No algorithm can go below it, up to constants and logarithms.
    upper : Trilemma
        Proved for one aggregate of SMEA; its `combined` bounds the error.
    momentum_noise_std : float
        Of the noise in a momentum, in every coordinate.
    noise_spread : float
        What that noise adds to the top eigenvalue of the honest momentums' covariance,
        on average, at most.
    radius : float
        Where the gradient is longer at a model that stays put, no adversary turns a
        step uphill on average.
    swing : float
        By how much their pushes add up over steps.
    """

    setting: Setting
    plan: PrivacyPlan
    epsilon: float
    kappa: float
    lower: theory.Trilemma
    upper: theory.Trilemma
    momentum_noise_std: float
    noise_spread: float
    radius: float
    swing: float

    @property
    def withstands(self) -> bool | None:
        """Whether the training is likely to; None if no gradient is given."""
        if self.setting.gradient is None:
            return None
        return theory.withstands(self.radius, self.setting.gradient, self.swing)


def forecast(setting: Setting) -> Forecast:
    """Compute what the theory says, or refuse a combination that cannot be."""
    n, f, d, spread = setting.n, setting.f, setting.d, setting.heterogeneity
    kappa = theory.kappa_smea(n, f)
    # Refused before the noise is searched for, which takes a second.
    theory.mean_estimation_bound(n, f, d, 0.0, kappa, spread)
    left = theory.noise_in_momentum(1.0, setting.momentum)
    swing = theory.swing_factor(
        setting.momentum, setting.learning_rate, setting.smoothness
    )
    plan = setting.plan()
    epsilon = plan.epsilon(setting.steps, setting.delta)
    std = setting.clip_norm if setting.gradient_std is None else setting.gradient_std
    sampling = theory.batch_variance(std, setting.b, setting.m)
    noise = left * plan.noise_std
    step = (n, f, d, noise, kappa, spread, left**2 * sampling)
    return Forecast(
        setting,
        plan,
        epsilon,
        kappa,
        theory.lower_bound(n, f, setting.m, d, epsilon, spread, setting.clip_norm),
        theory.mean_estimation_bound(*step),
        noise,
        theory.noise_spread(n - f, d, noise)[1],
        theory.stopping_radius(*step),
        swing,
    )


def alternatives(now: Forecast) -> Iterator[tuple[str, Setting]]:
    """Yield settings one step away, with what is changed."""
    it = now.setting
    yield f"n = {it.n + 1}", replace(it, n=it.n + 1)
    if 2 * it.f < it.n - 1:
        yield f"n = {it.n - 1}", replace(it, n=it.n - 1)
    if 2 * (it.f + 1) < it.n:
        yield f"f = {it.f + 1}", replace(it, f=it.f + 1)
    if it.f > 0:
        yield f"f = {it.f - 1}", replace(it, f=it.f - 1)
    slower = 1.0 - (1.0 - it.momentum) / 2
    yield f"momentum = {slower:.4g}", replace(it, momentum=slower)
    # Whatever changes what noise costs is compared at the same epsilon.
    target = now.epsilon if it.epsilon is None else it.epsilon
    it = replace(it, epsilon=target, noise_multiplier=None)
    yield f"m = {2 * it.m}", replace(it, m=2 * it.m)
    for other_epsilon in (target / 2, 2 * target):
        yield f"epsilon = {other_epsilon:.4g}", replace(it, epsilon=other_epsilon)
    for other in by_sampling(now):
        if other != it.sampling:
            yield f"{other} batches", replace(it, sampling=other)


def as_json(now: Forecast, others: Others) -> dict[str, object]:
    """Return everything as plain values."""
    it = now.setting
    return {
        "setting": asdict(it),
        "privacy": {
            "noise_multiplier": now.plan.noise_multiplier,
            "noise_std": now.plan.noise_std,
            "momentum_noise_std": now.momentum_noise_std,
            "epsilon": now.epsilon,
            "statement": str(now.plan.statement(it.steps, it.delta)),
            "epsilon_by_sampling": by_sampling(now),
        },
        "kappa": kappas(it),
        "lower_bound": _terms(now.lower)
        | {
            "up_to": "constants and logarithms",
            "violated_assumptions": violations(now),
            "proven": [term for term, lacking in by_term(now).items() if not lacking],
            "violated_by_term": by_term(now),
        },
        "smea_bound": _terms(now.upper) | {"combined": now.upper.combined},
        "noise_spread": now.noise_spread,
        "stopping_radius": now.radius,
        "swing": now.swing,
        "withstands": now.withstands,
        "what_if": [
            {
                "change": change,
                "epsilon": then.epsilon,
                "noise_std": then.plan.noise_std,
                "kappa": then.kappa,
                "lower_bound_factor": then.lower.total / now.lower.total,
                "smea_bound_factor": then.upper.combined / now.upper.combined,
                "stopping_radius": then.radius,
                "withstands": then.withstands,
            }
            for change, then in others
        ],
    }


def by_sampling(now: Forecast) -> dict[str, float]:
    """Return epsilon at the same noise, for every sampler that takes these numbers."""
    it, found = now.setting, {}
    for sampling in load_samplers():
        if sampling == Whole.name != it.sampling:
            continue  # what fixed batches of that size are, too
        try:
            plan = replace(now.plan, sampling=sampling)
        except ValueError:
            continue
        found[sampling] = plan.epsilon(it.steps, it.delta)
    return found


def kappas(setting: Setting) -> dict[str, float]:
    """Return the constants of robust averaging."""
    n, f = setting.n, setting.f
    return {
        "smea": theory.kappa_smea(n, f),
        "smea_paper": theory.kappa_smea_paper(n, f),
        "filter": theory.kappa_filter(n, f),
        "filter_paper": theory.kappa_filter_paper(n, f),
        "lower_bound": theory.kappa_lower_bound(n, f),
    }


def _terms(found: theory.Trilemma) -> dict[str, object]:
    # JSON has no infinity.
    factor = found.dominance if found.dominance < math.inf else None
    terms = asdict(found)
    return {**terms, "dominant": found.dominant, "dominance": factor}


def violations(now: Forecast) -> list[str]:
    """Name what the lower bound's theorem assumes and the setting lacks."""
    return list(theory.lower_bound_violations(*_assumed(now)))


def by_term(now: Forecast) -> dict[theory.Term, tuple[str, ...]]:
    """Name, for each term of the lower bound, what its own proof lacks."""
    return theory.term_violations(*_assumed(now))


def _assumed(now: Forecast) -> tuple[int, int, int, float, float, float, float]:
    it = now.setting
    privacy = (it.m, now.epsilon, it.delta)
    return (it.n, it.f, *privacy, it.heterogeneity, it.clip_norm)
