"""What the theory says of a federation, and of those one step away."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import get_args

from flwr_safedshb import theory
from flwr_safedshb.privacy.plan import PrivacyPlan, Sampling

Others = list[tuple[str, "Forecast"]]


@dataclass(frozen=True)
class Setting:
    """A federation as its owners describe it; symbols are the paper's.

    Of `epsilon`, to calibrate the noise to, and `noise_multiplier` one is given.
    """

    n: int
    f: int
    m: int
    d: int
    b: int
    clip_norm: float
    steps: int
    delta: float
    sampling: Sampling
    epsilon: float | None
    noise_multiplier: float | None
    heterogeneity: float

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
    """

    setting: Setting
    plan: PrivacyPlan
    epsilon: float
    kappa: float
    lower: theory.Trilemma
    upper: theory.Trilemma


def forecast(setting: Setting) -> Forecast:
    """Compute what the theory says, or refuse a combination that cannot be."""
    n, f, d, spread = setting.n, setting.f, setting.d, setting.heterogeneity
    kappa = theory.kappa_smea(n, f)
    # Refused before the noise is searched for, which takes a second.
    theory.mean_estimation_bound(n, f, d, 0.0, kappa, spread)
    plan = setting.plan()
    epsilon = plan.epsilon(setting.steps, setting.delta)
    return Forecast(
        setting,
        plan,
        epsilon,
        kappa,
        theory.lower_bound(n, f, setting.m, d, epsilon, spread, setting.clip_norm),
        theory.mean_estimation_bound(n, f, d, plan.noise_std, kappa, spread),
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
    # Whatever changes what noise costs is compared at the same epsilon.
    target = now.epsilon if it.epsilon is None else it.epsilon
    it = replace(it, epsilon=target, noise_multiplier=None)
    yield f"m = {2 * it.m}", replace(it, m=2 * it.m)
    for other_epsilon in (target / 2, 2 * target):
        yield f"epsilon = {other_epsilon:.4g}", replace(it, epsilon=other_epsilon)
    other: Sampling = "poisson" if it.sampling == "fixed" else "fixed"
    yield f"{other} batches", replace(it, sampling=other)


def as_json(now: Forecast, others: Others) -> dict[str, object]:
    """Return everything as plain values."""
    it = now.setting
    return {
        "setting": asdict(it),
        "privacy": {
            "noise_multiplier": now.plan.noise_multiplier,
            "noise_std": now.plan.noise_std,
            "epsilon": now.epsilon,
            "statement": str(now.plan.statement(it.steps, it.delta)),
            "epsilon_by_sampling": by_sampling(now),
        },
        "kappa": kappas(it),
        "lower_bound": _terms(now.lower)
        | {
            "up_to": "constants and logarithms",
            "violated_assumptions": violations(now),
        },
        "smea_bound": _terms(now.upper) | {"combined": now.upper.combined},
        "what_if": [
            {
                "change": change,
                "epsilon": then.epsilon,
                "noise_std": then.plan.noise_std,
                "kappa": then.kappa,
                "lower_bound_factor": then.lower.total / now.lower.total,
                "smea_bound_factor": then.upper.combined / now.upper.combined,
            }
            for change, then in others
        ],
    }


def by_sampling(now: Forecast) -> dict[str, float]:
    """Return epsilon at the same noise, for either sampler."""
    it = now.setting
    return {
        sampling: replace(now.plan, sampling=sampling).epsilon(it.steps, it.delta)
        for sampling in get_args(Sampling)
    }


def kappas(setting: Setting) -> dict[str, float]:
    """Return the constants of robust averaging."""
    n, f = setting.n, setting.f
    return {
        "smea": theory.kappa_smea(n, f),
        "smea_paper": theory.kappa_smea_paper(n, f),
        "filter": theory.kappa_filter(n, f),
        "lower_bound": theory.kappa_lower_bound(n, f),
    }


def _terms(found: theory.Trilemma) -> dict[str, object]:
    # JSON has no infinity.
    factor = found.dominance if found.dominance < math.inf else None
    terms = asdict(found)
    return {**terms, "dominant": found.dominant, "dominance": factor}


def violations(now: Forecast) -> list[str]:
    """Name what the lower bound assumes and the setting lacks."""
    it = now.setting
    return list(
        theory.lower_bound_violations(
            it.n, it.f, it.m, now.epsilon, it.delta, it.heterogeneity, it.clip_norm
        )
    )
