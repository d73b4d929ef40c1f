r"""What privacy and robustness must cost: the paper's lower bound, whole and in parts.

The setting is mean estimation: the loss of an example x is ||theta - x||^2 (not half of
it), each honest client releases what is (epsilon, delta)-DP for its m examples, and f
of n clients send anything. An algorithm is (f, rho)-robust if its excess loss over the
honest clients' examples is at most rho. Lengths are in units of C, the radius of the
ball that examples lie in; the paper has C = 1.

**Which part is proven when** is no detail: the theorem joins three propositions, and
its conditions, all of them together, are met by no setting with f >= 1
(`lower_bound_violations`). The propositions stand by themselves (`term_violations`).
"""

import math

from flwr_safedshb.theory.checks import not_negative, positive, probability
from flwr_safedshb.theory.robustness import check_num_malicious
from flwr_safedshb.theory.trilemma import Term, Trilemma


def lower_bound(
    n: int,
    f: int,
    m: int,
    d: int,
    epsilon: float,
    heterogeneity: float = 0.0,
    clip_norm: float = 1.0,
) -> Trilemma:
    """Return the terms below which no private and robust algorithm can go.

    d/(epsilon^2 n m^2), (f/n)/(epsilon^2 m^2) and (f/n) G^2, the first two times C^2:
    the paper's theorem for any (epsilon, delta)-DP, (f, rho)-robust algorithm. It is
    stated as Omega~: **constants and logarithms are left open** and taken as 1 here, so
    ratios of terms and changes of one mean something, their size does not.
    `term_violations` says which of the three are proven in a setting.

    Parameters
    ----------
    n, f, m, d : int
        Clients, adversaries among them, examples of each, dimension.
    epsilon : float
    heterogeneity : float
        G: G^2 is the mean squared distance of the honest clients' gradients from their
        mean.
    clip_norm : float
        C.
    """
    check_num_malicious(n, f)
    not_negative(heterogeneity=heterogeneity)
    return Trilemma(
        privacy=privacy_lower_bound(n, m, d, epsilon, clip_norm),
        both=(clip_norm / (epsilon * m)) ** 2 * f / n,
        robustness=heterogeneity**2 * f / n,
    )


def privacy_lower_bound(
    n: int, m: int, d: int, epsilon: float, clip_norm: float = 1.0
) -> float:
    """Return C^2 d/(epsilon^2 n m^2): the proposition on privacy alone, f = 0.

    Omega~, as in `lower_bound`. The proof reduces to one-way marginals over all n m
    examples.
    """
    positive(n=n, m=m, d=d, epsilon=epsilon, clip_norm=clip_norm)
    return (clip_norm / (epsilon * m)) ** 2 * d / n


def joint_lower_bound(
    n: int, f: int, m: int, epsilon: float, delta: float, clip_norm: float = 1.0
) -> float:
    """Return C^2 (f+1)/(n-f) log(1/delta)/(epsilon^2 m^2): the proposition on both.

    Omega, so without a constant, but with its logarithm. It has no dimension in it.
    """
    check_num_malicious(n, f)
    positive(m=m, epsilon=epsilon, clip_norm=clip_norm)
    probability(delta=delta)
    unit = (clip_norm / (epsilon * m)) ** 2
    return unit * math.log(1.0 / delta) * (f + 1) / (n - f)


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
    not_negative(heterogeneity=heterogeneity)
    return f / (16.0 * (n - 2 * f)) * heterogeneity**2


def kappa_lb(n: int, f: int) -> float:
    """Return 16 f (n-2f)/(n-f)^2, of the robustness-only lower bound.

    It is the largest G^2 of that bound's example, in units of C^2: of n-f honest
    clients n-2f hold -x and f hold x, ||x|| = C. Their gradients 2 (theta - x_i) lie at
    two points 4C apart, so that G^2 = (4C)^2 f (n-2f)/(n-f)^2.
    """
    check_num_malicious(n, f)
    return 16.0 * f * (n - 2 * f) / (n - f) ** 2


def lower_bound_violations(
    n: int,
    f: int,
    m: int,
    epsilon: float,
    delta: float,
    heterogeneity: float = 0.0,
    clip_norm: float = 1.0,
) -> tuple[str, ...]:
    """Name each condition of the theorem, as printed, that does not hold.

    n >= 3; epsilon < 1 and epsilon <= 1/(4 sqrt(2 n ln(m+1))); for some gamma in (0, 1)
    2^(-m^(1-gamma)) <= n delta <= 1/(8 m^(1+gamma)), which a small gamma meets if
    2^-m < n delta < 1/(8 m) and no gamma if not; G >= C;
    rho <= C^2 (f+1)/(100 (n-f)). The last two exclude each other for f >= 1: with
    G >= C robustness alone costs rho >= C^2 f/(16 (n-2f)), which is more. So the
    theorem as printed says nothing there, and its parts have to be used: see
    `term_violations`. Impossible numbers raise.

    "The assumptions on epsilon, delta and rho are only needed to use" an earlier bound,
    the paper says; without them a log m is lost in the first term.
    """
    check_num_malicious(n, f)
    found = [] if n >= 3 else [f"n={n} must be at least 3; add clients"]
    found += _privacy_conditions(n, m, epsilon, delta)
    found += _heterogeneity_condition(heterogeneity, clip_norm)
    if f >= 1:
        cap = error_cap(n, f, clip_norm)
        least = robustness_lower_bound(n, f, clip_norm)
        found.append(
            f"rho must be at most {cap:.3g}, which nothing meets for f={f} and "
            f"heterogeneity >= clip_norm: robustness alone costs {least:.3g}; use the "
            "parts of the bound"
        )
    return tuple(found)


def term_violations(
    n: int,
    f: int,
    m: int,
    epsilon: float,
    delta: float,
    heterogeneity: float = 0.0,
    clip_norm: float = 1.0,
) -> dict[Term, tuple[str, ...]]:
    """Name, for each term, what its own proposition assumes and the setting lacks.

    A term without violations is proven by itself (privacy and both for algorithms
    with an error rho of at most C^2/100 and `error_cap`):

    - privacy: the theorem's conditions on epsilon and delta;
    - both: n >= 3, G >= C, and 2^-o(m) <= delta <= m^-(1 + Omega(1)), of which the
      weakest reading is checked, 2^-m <= delta < 1/m;
    - robustness: f >= 1 and 0 < G^2 <= kappa_lb C^2, and nothing about privacy.

    So of clients with identical data, G = 0, privacy alone is proven.
    """
    check_num_malicious(n, f)
    privacy = _privacy_conditions(n, m, epsilon, delta)
    alone = [] if f else ["f=0: without adversaries this term is 0"]
    both = [*alone] if n >= 3 else [*alone, f"n={n} must be at least 3; add clients"]
    both += _heterogeneity_condition(heterogeneity, clip_norm)
    if not 2.0**-m <= delta < 1.0 / m:
        both.append(
            f"delta={delta:.3g} must be at least 2^-m={2.0**-m:.3g} and below "
            f"1/m={1.0 / m:.3g}"
        )
    robustness = [*alone]
    largest = clip_norm * math.sqrt(kappa_lb(n, f))
    if f and not 0.0 < heterogeneity <= largest:
        robustness.append(
            f"heterogeneity={heterogeneity:g} must be above 0 and at most "
            f"{largest:.4g}, what examples in a ball of radius clip_norm allow"
        )
    return {
        "privacy": tuple(privacy),
        "both": tuple(both),
        "robustness": tuple(robustness),
    }


def error_cap(n: int, f: int, clip_norm: float = 1.0) -> float:
    """Return C^2 (f+1)/(100 (n-f)), the largest rho that the theorem speaks of."""
    check_num_malicious(n, f)
    positive(clip_norm=clip_norm)
    return clip_norm**2 * (f + 1) / (100.0 * (n - f))


def _privacy_conditions(n: int, m: int, epsilon: float, delta: float) -> list[str]:
    """Name what the reduction to one-way marginals assumes and the setting lacks."""
    positive(m=m, epsilon=epsilon)
    probability(delta=delta)
    found = []
    largest = 1.0 / (4.0 * math.sqrt(2.0 * n * math.log(m + 1.0)))
    if epsilon > largest:
        found.append(
            f"epsilon={epsilon:.4g} must be at most 1/(4 sqrt(2 n ln(m+1)))="
            f"{largest:.3g}; lower it"
        )
    if n * delta >= 1.0 / (8.0 * m):
        found.append(
            f"n*delta={n * delta:.3g} must be below 1/(8m)={1.0 / (8.0 * m):.3g}; "
            f"lower delta below {1.0 / (8.0 * m * n):.2g}"
        )
    if math.log2(n * delta) <= -m:
        found.append(
            f"n*delta={n * delta:.3g} must be above 2^-m={2.0**-m:.3g}; raise delta or "
            "have more examples"
        )
    return found


def _heterogeneity_condition(heterogeneity: float, clip_norm: float) -> list[str]:
    not_negative(heterogeneity=heterogeneity)
    positive(clip_norm=clip_norm)
    if heterogeneity >= clip_norm:
        return []
    return [
        f"heterogeneity={heterogeneity:g} must be at least clip_norm={clip_norm:g}: "
        "the example that proves it has honest clients that differ by so much"
    ]
