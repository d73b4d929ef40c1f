r"""What privacy and robustness cost: the paper's lower bounds and its corollaries.

The setting is mean estimation: the loss of an example x is ||theta - x||^2 (not half of
it), each honest client's releases are (epsilon, delta)-DP for its m examples, and f of
n clients send anything. An algorithm is (f, rho)-robust if its excess loss over the
honest clients' examples is at most rho. The paper has C = 1.

**Which part is proven when**: the theorem joins three propositions, and no setting with
f >= 1 meets all of its conditions (`lower_bound_violations`). The propositions stand by
themselves (`term_violations`).
"""

import math
from dataclasses import dataclass
from typing import Literal

from flwr_safedshb.theory.checks import (
    check_batch,
    check_delta,
    check_not_negative,
    check_positive,
)
from flwr_safedshb.theory.robustness import check_num_malicious

Term = Literal["privacy", "both", "robustness"]


@dataclass(frozen=True)
class MeanEstimation:
    """The setting of the bounds: private and robust mean estimation.

    Attributes
    ----------
    n, f, m, d : int
        Clients, adversaries among them, examples of each, dimension.
    epsilon, delta : float
        The privacy of each client's releases.
    heterogeneity : float
        G: G^2 is the mean squared distance of the honest clients' gradients from their
        mean.
    clip_norm : float
        C, the radius of the ball that examples lie in.
    """

    n: int
    f: int
    m: int
    d: int
    epsilon: float
    delta: float
    heterogeneity: float = 0.0
    clip_norm: float = 1.0

    def __post_init__(self) -> None:
        check_num_malicious(self.n, self.f)
        check_positive(
            m=self.m, d=self.d, epsilon=self.epsilon, clip_norm=self.clip_norm
        )
        check_delta(self.delta)
        check_not_negative(heterogeneity=self.heterogeneity)

    @property
    def noise_unit(self) -> float:
        """C/(epsilon m)."""
        return self.clip_norm / (self.epsilon * self.m)

    @property
    def log_delta(self) -> float:
        """log(1/delta)."""
        return math.log(1.0 / self.delta)


@dataclass(frozen=True)
class Trilemma:
    """An error by its causes.

    Attributes
    ----------
    privacy : float
        What noise costs without adversaries; grows with the dimension.
    both : float
        What adversaries hide in the noise beyond that.
    robustness : float
        What adversaries hide among honest clients that differ.
    sampling : float
        What the choice of batches adds; no part of the trilemma, and 0 where all
        examples are used.
    """

    privacy: float
    both: float
    robustness: float
    sampling: float = 0.0

    @property
    def terms(self) -> dict[Term, float]:
        """The three of the trilemma by name."""
        return {
            "privacy": self.privacy,
            "both": self.both,
            "robustness": self.robustness,
        }

    @property
    def dominant(self) -> Term:
        """The name of the largest term; of equal ones the first."""
        terms = self.terms
        return max(terms, key=lambda name: terms[name])

    @property
    def dominance(self) -> float:
        """The ratio of the largest term to the second largest."""
        *_, second, first = sorted(self.terms.values())
        return first / second if second > 0.0 else math.inf

    @property
    def total(self) -> float:
        """The sum."""
        return self.privacy + self.both + self.robustness + self.sampling

    @property
    def combined(self) -> float:
        """The square of the sum of the roots: of errors that may point the same way."""
        causes = (*self.terms.values(), self.sampling)
        return sum(map(math.sqrt, causes)) ** 2


def lower_bound(at: MeanEstimation) -> Trilemma:
    """Return the terms below which no private and robust algorithm can go.

    d/(epsilon^2 n m^2), (f/n)/(epsilon^2 m^2) and (f/n) G^2, the first two times C^2:
    the paper's theorem for any (epsilon, delta)-DP, (f, rho)-robust algorithm. It is
    stated as Omega~: **constants and logarithms are left open** and taken as 1 here, so
    ratios of terms mean something and their size does not. `term_violations` says which
    of the three are proven in a setting.
    """
    return Trilemma(
        privacy=privacy_lower_bound(at),
        both=at.noise_unit**2 * at.f / at.n,
        robustness=at.heterogeneity**2 * at.f / at.n,
    )


def privacy_lower_bound(at: MeanEstimation) -> float:
    """Return C^2 d/(epsilon^2 n m^2): the proposition on privacy alone, f = 0.

    Omega~, as in `lower_bound`. The proof reduces to one-way marginals over all n m
    examples.
    """
    return at.noise_unit**2 * at.d / at.n


def joint_lower_bound(at: MeanEstimation) -> float:
    """Return C^2 (f+1)/(n-f) log(1/delta)/(epsilon^2 m^2): the proposition on both.

    Omega: without its constant, with its logarithm. It does not depend on d.
    """
    return at.noise_unit**2 * at.log_delta * (at.f + 1) / (at.n - at.f)


def robustness_lower_bound(n: int, f: int, heterogeneity: float) -> float:
    """Return f/(16 (n-2f)) G^2: the proposition on robustness alone, private or not.

    With the paper's own constant, for G^2 <= `kappa_lb` C^2. Proof: n-f clients hold -x
    and f hold x. Either the f are the adversaries and the honest mean is -x, or f of
    the others are and it is (f - (n-2f))/(n-f) x: nobody can tell, and the two differ
    by 2f/(n-f) x, so on one of them any answer is off by half of that, in square
    f^2/(n-f)^2 ||x||^2, which is the excess loss. In the second case
    G^2 = 16 ||x||^2 f (n-2f)/(n-f)^2 (see `kappa_lb`), in the first it is 0.  QED
    """
    check_num_malicious(n, f)
    check_not_negative(heterogeneity=heterogeneity)
    return f / (16.0 * (n - 2 * f)) * heterogeneity**2


def kappa_lb(n: int, f: int) -> float:
    """Return 16 f (n-2f)/(n-f)^2, of the robustness-only lower bound.

    It is the largest G^2 of that bound's example, in units of C^2: of n-f honest
    clients n-2f hold -x and f hold x, ||x|| = C. Their gradients 2 (theta - x_i) lie at
    two points 4C apart, so that G^2 = (4C)^2 f (n-2f)/(n-f)^2.
    """
    check_num_malicious(n, f)
    return 16.0 * f * (n - 2 * f) / (n - f) ** 2


def error_cap(n: int, f: int, clip_norm: float = 1.0) -> float:
    """Return C^2 (f+1)/(100 (n-f)), the largest rho that the theorem covers."""
    check_num_malicious(n, f)
    check_positive(clip_norm=clip_norm)
    return clip_norm**2 * (f + 1) / (100.0 * (n - f))


def lower_bound_violations(at: MeanEstimation) -> tuple[str, ...]:
    """Name each condition of the theorem, as printed, that does not hold.

    n >= 3; epsilon < 1 and epsilon <= 1/(4 sqrt(2 n ln(m+1))); for some gamma in (0, 1)
    2^(-m^(1-gamma)) <= n delta <= 1/(8 m^(1+gamma)), which a small gamma meets exactly
    if 2^-m < n delta < 1/(8 m); G >= C; rho <= C^2 (f+1)/(100 (n-f)). The last two
    exclude each other for f >= 1: with G >= C robustness alone costs
    rho >= C^2 f/(16 (n-2f)), which is more. There the theorem as printed says nothing,
    and its parts have to be used: see `term_violations`.

    "The assumptions on epsilon, delta and rho are only needed to use" an earlier bound,
    the paper says; without them a log m is lost in the first term.
    """
    violations = _require_three_clients(at) + _require_privacy_conditions(at)
    violations += _require_heterogeneity(at)
    if at.f >= 1:
        cap = error_cap(at.n, at.f, at.clip_norm)
        least = robustness_lower_bound(at.n, at.f, at.clip_norm)
        violations.append(
            f"it needs an error rho of at most {cap:.3g}, and for f={at.f} and "
            f"G >= C the third term alone is at least {least:.3g}; so no setting with "
            "f >= 1 meets it, and only single terms can be proven"
        )
    return tuple(violations)


def term_violations(at: MeanEstimation) -> dict[Term, tuple[str, ...]]:
    """Name, for each term, the assumptions of its own proposition that do not hold.

    A term without violations is proven by itself (privacy and both for algorithms
    with an error rho of at most C^2/100 and `error_cap`):

    - privacy: the theorem's conditions on epsilon and delta;
    - both: n >= 3, G >= C, and 2^-o(m) <= delta <= m^-(1 + Omega(1)), of which the
      weakest reading is checked, 2^-m <= delta < 1/m;
    - robustness: f >= 1 and 0 < G^2 <= kappa_lb C^2, and nothing about privacy.

    So of clients with identical data, G = 0, privacy alone is proven.
    """
    alone = [] if at.f else ["f=0: without adversaries this term is 0"]
    both = alone + _require_three_clients(at) + _require_heterogeneity(at)
    least = 2.0**-at.m
    if not least <= at.delta < 1.0 / at.m:
        both.append(
            f"it needs delta between 2^-m = {least:.3g} and 1/m = {1.0 / at.m:.3g}, "
            f"and delta is {at.delta:.3g}"
        )
    robustness = [*alone]
    largest = at.clip_norm * math.sqrt(kappa_lb(at.n, at.f))
    if at.f and not 0.0 < at.heterogeneity <= largest:
        robustness.append(
            f"it needs honest gradients that differ by G above 0 and at most "
            f"{largest:.4g} (the most that clipping to C allows), and G is "
            f"{at.heterogeneity:g}"
        )
    return {
        "privacy": tuple(_require_privacy_conditions(at)),
        "both": tuple(both),
        "robustness": tuple(robustness),
    }


def _require_three_clients(at: MeanEstimation) -> list[str]:
    return [] if at.n >= 3 else [f"it needs at least 3 clients, and n is {at.n}"]


def _require_privacy_conditions(at: MeanEstimation) -> list[str]:
    """Name the assumptions of the reduction to one-way marginals that do not hold."""
    n, m = at.n, at.m
    violations = []
    largest = 1.0 / (4.0 * math.sqrt(2.0 * n * math.log(m + 1.0)))
    if at.epsilon > largest:
        violations.append(
            f"it needs epsilon <= 1/(4 sqrt(2 n ln(m+1))) = {largest:.3g}, and epsilon "
            f"is {at.epsilon:.4g}"
        )
    if n * at.delta >= 1.0 / (8.0 * m):
        violations.append(
            f"it needs delta < 1/(8 n m) = {1.0 / (8.0 * m * n):.3g}, and delta is "
            f"{at.delta:.3g}"
        )
    if math.log2(n * at.delta) <= -m:
        violations.append(
            f"it needs n delta > 2^-m = {2.0**-m:.3g}, and n delta is "
            f"{n * at.delta:.3g}"
        )
    return violations


def _require_heterogeneity(at: MeanEstimation) -> list[str]:
    if at.heterogeneity >= at.clip_norm:
        return []
    return [
        f"it needs honest gradients that differ by G >= C = {at.clip_norm:g}, and G is "
        f"{at.heterogeneity:g}"
    ]


def closed_form_noise_std(
    clip_norm: float,
    b: int,
    m: int,
    steps: int,
    epsilon: float,
    delta: float,
    constant: float = 1.0,
) -> float:
    """Return a sufficient sigma_DP, k (2C/b) max{1, b sqrt(T log(1/delta))/(m eps)}.

    The closed form of the paper's privacy theorem, for small b/m and
    epsilon <= log(1/delta). **The paper leaves k open**, so this shows how noise scales
    and calibrates nothing: use `PrivacyPlan.calibrate`. The 1 in the maximum: beyond
    m = b sqrt(T log(1/delta))/epsilon more examples do not lower the noise of a step
    with this b.
    """
    check_batch(b, m)
    check_positive(clip_norm=clip_norm, steps=steps, epsilon=epsilon, constant=constant)
    check_delta(delta)
    log = math.log(1.0 / delta)
    if epsilon > log:
        raise ValueError(
            f"epsilon={epsilon} must be at most log(1/delta)={log:.4g} for the closed "
            "form; lower epsilon or delta"
        )
    spent = b * math.sqrt(steps * log) / (m * epsilon)
    return constant * 2.0 * clip_norm / b * max(1.0, spent)


def strongly_convex_corollary(at: MeanEstimation) -> Trilemma:
    """Return the terms of Safe-DSHB's error with SMEA on a strongly convex loss.

    log(1/delta) d/(epsilon^2 n m^2), log(1/delta) (f/n)/(epsilon^2 m^2) and (f/n) G^2:
    the paper's corollary, the lower bound up to log(1/delta). It is stated as O(.), for
    T large enough, n >= (2 + eta) f with a constant eta > 0 and
    epsilon <= log(1/delta): **constants, which depend on eta, L and mu, are left open**
    and taken as 1.
    """
    return Trilemma(
        privacy=at.log_delta * at.noise_unit**2 * at.d / at.n,
        both=at.log_delta * at.noise_unit**2 * at.f / at.n,
        robustness=at.heterogeneity**2 * at.f / at.n,
    )


def non_convex_corollary(at: MeanEstimation) -> Trilemma:
    """Return the terms of Safe-DSHB's squared gradient with SMEA, without convexity.

    sqrt(d log(1/delta))/(epsilon sqrt(n) m), sqrt(f/n) sqrt(log(1/delta))/(epsilon m)
    and (f/n) G^2: the paper's corollary, in the sense and under the conditions of
    `strongly_convex_corollary`.
    """
    return Trilemma(
        privacy=math.sqrt(at.log_delta * at.d / at.n) * at.noise_unit,
        both=math.sqrt(at.log_delta * at.f / at.n) * at.noise_unit,
        robustness=at.heterogeneity**2 * at.f / at.n,
    )
