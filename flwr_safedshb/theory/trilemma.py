r"""Privacy, robustness, utility: what they must cost, and what SMEA is proved to give.

The setting of the lower bound is mean estimation: the loss of an example x is
||theta - x||^2, examples lie in a ball of radius C, each honest client releases what is
(epsilon, delta)-DP for its m examples, and f of n clients send anything.
"""

import math
from dataclasses import dataclass
from typing import Literal

from flwr_safedshb.theory.checks import batch, not_negative, positive, probability
from flwr_safedshb.theory.robustness import check_num_malicious

Term = Literal["privacy", "both", "robustness"]


@dataclass(frozen=True)
class Trilemma:
    """An error by its three causes.

    Attributes
    ----------
    privacy : float
        What noise costs without adversaries; grows with the dimension.
    both : float
        What adversaries hide in the noise; does not grow with the dimension.
    robustness : float
        What adversaries hide among honest clients that differ.
    """

    privacy: float
    both: float
    robustness: float

    @property
    def terms(self) -> dict[Term, float]:
        """The three by name."""
        return {
            "privacy": self.privacy,
            "both": self.both,
            "robustness": self.robustness,
        }

    @property
    def dominant(self) -> Term:
        """The largest; of equal ones the first."""
        terms = self.terms
        return max(terms, key=lambda name: terms[name])

    @property
    def dominance(self) -> float:
        """How many times the second largest the largest is."""
        *_, second, first = sorted(self.terms.values())
        return first / second if second > 0.0 else math.inf

    @property
    def total(self) -> float:
        """The sum."""
        return self.privacy + self.both + self.robustness

    @property
    def combined(self) -> float:
        """The square of the sum of the roots: of errors that may point the same way."""
        return sum(map(math.sqrt, self.terms.values())) ** 2


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
    and is no calibration: `PrivacyPlan.calibrate` is. The 1 in the maximum says that
    beyond m = b sqrt(T log(1/delta))/epsilon more examples do not lower the noise of a
    step with this b.

    Parameters
    ----------
    clip_norm : float
        C.
    b, m, steps : int
        Batch size, examples of a client, T.
    epsilon, delta : float
    constant : float
        k.
    """
    batch(b, m)
    positive(clip_norm=clip_norm, steps=steps, epsilon=epsilon, constant=constant)
    probability(delta=delta)
    log = math.log(1.0 / delta)
    if epsilon > log:
        raise ValueError(
            f"epsilon={epsilon} must be at most log(1/delta)={log:.4g} for the closed "
            "form; lower epsilon or delta"
        )
    spent = b * math.sqrt(steps * log) / (m * epsilon)
    return constant * 2.0 * clip_norm / b * max(1.0, spent)


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
    the paper's lower bound for any (epsilon, delta)-DP, (f, rho)-robust algorithm. It
    is stated as Omega~: **constants and logarithms are left open** and taken as 1 here,
    so ratios of terms and changes of one mean something, their size does not.
    `lower_bound_violations` says whether it applies at all.

    Parameters
    ----------
    n, f, m, d : int
        Clients, adversaries among them, examples of each, dimension.
    epsilon : float
    heterogeneity : float
        G: G^2 is the mean squared distance of the honest clients' gradients from their
        mean.
    clip_norm : float
        C, the radius of the ball that examples lie in.
    """
    check_num_malicious(n, f)
    positive(m=m, d=d, epsilon=epsilon, clip_norm=clip_norm)
    not_negative(heterogeneity=heterogeneity)
    unit = (clip_norm / (epsilon * m)) ** 2
    return Trilemma(
        privacy=unit * d / n,
        both=unit * f / n,
        robustness=heterogeneity**2 * f / n,
    )


def lower_bound_violations(
    n: int,
    f: int,
    m: int,
    epsilon: float,
    delta: float,
    heterogeneity: float = 0.0,
    clip_norm: float = 1.0,
) -> tuple[str, ...]:
    """Name each assumption of the lower bound that does not hold, and the remedy.

    The proof reduces to one-way marginals (Steinke and Ullman), which need
    2^-o(m) <= n delta <= m^-(1 + Omega(1)); of these asymptotic conditions the weakest
    is checked: 2^-m <= n delta < 1/m. Impossible numbers raise.
    """
    check_num_malicious(n, f)
    positive(m=m, epsilon=epsilon, clip_norm=clip_norm)
    not_negative(heterogeneity=heterogeneity)
    probability(delta=delta)
    found = []
    if epsilon > math.log(1.0 / delta):
        found.append(
            f"epsilon={epsilon:g} must be at most log(1/delta)="
            f"{math.log(1.0 / delta):.4g}; lower epsilon or delta"
        )
    if n * delta >= 1.0 / m:
        found.append(
            f"n*delta={n * delta:.3g} must be below 1/m={1.0 / m:.3g}; "
            f"lower delta below {1.0 / (m * n):.2g}"
        )
    if math.log2(n * delta) < -m:
        found.append(
            f"n*delta={n * delta:.3g} must be at least 2^-m={2.0**-m:.3g}; "
            "raise delta or have more examples"
        )
    largest = clip_norm * math.sqrt(kappa_lb(n, f))
    if f > 0 and heterogeneity > largest:
        found.append(
            f"heterogeneity={heterogeneity:g} must be at most {largest:.4g}, what "
            "examples in a ball of radius clip_norm allow; lower it or raise clip_norm"
        )
    return tuple(found)


def kappa_lb(n: int, f: int) -> float:
    """Return 16 f (n-2f)/(n-f)^2, of the robustness-only lower bound.

    It is the largest G^2 of that bound's example, in units of C^2: of n-f honest
    clients n-2f hold -x and f hold x, ||x|| = C. Their gradients 2 (theta - x_i) lie at
    two points 4C apart, so that G^2 = (4C)^2 f (n-2f)/(n-f)^2.
    """
    check_num_malicious(n, f)
    return 16.0 * f * (n - 2 * f) / (n - f) ** 2


def robustness_lower_bound(n: int, f: int, heterogeneity: float) -> float:
    """Return f/(16 (n-2f)) G^2, below which no f-robust algorithm is, private or not.

    The paper's (f/n) G^2 with a constant, for G^2 <= `kappa_lb` C^2. Proof: n-f clients
    hold -x and f hold x. Either the f are the adversaries and the honest mean is -x, or
    f of the others are and it is (f - (n-2f))/(n-f) x: nobody can tell, and the two
    differ by 2f/(n-f) x, so on one of them any answer is off by half of that, in square
    f^2/(n-f)^2 ||x||^2, which is the excess loss. In the second case
    G^2 = 16 ||x||^2 f (n-2f)/(n-f)^2 (see `kappa_lb`), in the first it is 0.  QED
    """
    check_num_malicious(n, f)
    not_negative(heterogeneity=heterogeneity)
    return f / (16.0 * (n - 2 * f)) * heterogeneity**2


def mean_estimation_bound(
    n: int, f: int, d: int, noise_std: float, kappa: float, heterogeneity: float = 0.0
) -> Trilemma:
    r"""Return terms that combine to a bound on the error of one aggregate.

    E||R - mean||^2 <= (sqrt(privacy) + sqrt(both) + sqrt(robustness))^2, the
    `Trilemma.combined` of what is returned, where R is the aggregate of what n clients
    send, mean that of the honest clients' vectors before noise, and, with h = n - f and
    sigma = sigma_DP,

    privacy = (1 + sqrt(kappa))^2 d sigma^2/h, both = kappa sigma^2 (1 + 1/h),
    robustness = kappa Gcov^2.

    Ours, elementary and with its constants. Proof: R is off by the mean of the honest
    noise, whose square is d sigma^2/h on average, and by sqrt(kappa lambda_max(cov)) at
    most, cov being that of the noisy honest vectors. The root of lambda_max is the
    largest singular value of their centred matrix over sqrt(h): at most Gcov plus that
    of the noise, s/sqrt(h), and for a Gaussian h x d matrix E s <= sqrt(h) + sqrt(d)
    and Var s <= 1 in units of sigma, so that
    E s^2 <= (sqrt(h) + sqrt(d))^2 + 1 <= (sqrt(h + 1) + sqrt(d))^2. Minkowski's
    inequality adds up the roots.  QED

    Parameters
    ----------
    n, f, d : int
        Clients, adversaries among them, dimension.
    noise_std : float
        sigma_DP.
    kappa : float
        Spectral constant of the rule.
    heterogeneity : float
        Gcov, or G.
    """
    check_num_malicious(n, f)
    positive(d=d)
    not_negative(noise_std=noise_std, kappa=kappa, heterogeneity=heterogeneity)
    honest, noise = n - f, noise_std**2
    return Trilemma(
        privacy=(1.0 + math.sqrt(kappa)) ** 2 * d * noise / honest,
        both=kappa * noise * (1.0 + 1.0 / honest),
        robustness=kappa * heterogeneity**2,
    )
