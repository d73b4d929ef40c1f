r"""Constants of robust averaging, each with the statement that it comes from.

Two notions of robust averaging are in use, and every constant belongs to one. For all
x_1..x_n and all S of size n - f, with cov_S the empirical covariance of S (factor
1/|S|):

- spectral: ||F(x) - mean_S||^2 <= kappa * lambda_max(cov_S), Definition of
  (f, kappa)-robust averaging in Allouah et al., "On the Privacy-Robustness-Utility
  Trilemma in Distributed Learning", ICML 2023;
- variance: ||F(x) - mean_S||^2 <= kappa * trace(cov_S), Definition of
  (f, kappa)-robustness in Allouah et al., "Fixing by Mixing", AISTATS 2023.

lambda_max <= trace, so a spectral constant is also one for the variance; and trace <=
min(d, n-f-1) lambda_max, so a variance constant times that is a spectral one
(`kappa_spectral`). Filter's constants are in `filtering`.
"""

import math
from functools import lru_cache

from flwr_safedshb.theory.checks import check_positive


@lru_cache(maxsize=1024)  # every round of a run asks for the same n and f
def check_num_malicious(n: int, f: int) -> None:
    """Refuse n and f for which no rule can be robust."""
    if f < 0:
        raise ValueError(f"f={f} must be at least 0; it counts adversarial clients")
    if n < 1:
        raise ValueError(f"n={n} clients; at least 1 is needed")
    if 2 * f >= n:
        raise ValueError(
            f"f={f} needs n > 2f, got n={n}; lower f to at most {(n - 1) // 2} "
            f"or have at least {2 * f + 1} clients"
        )


def kappa_lower_bound(n: int, f: int) -> float:
    """Return f/(n-2f), which no rule can go below in either notion.

    Proof: of n numbers n-f are 0 and f are 1. The n-f zeros have no spread, so the rule
    must return 0. The f ones and n-2f zeros have mean f/(n-f) and variance
    f (n-2f)/(n-f)^2, and mean^2/variance = f/(n-2f).  QED  In one dimension both
    notions are the same. Shown in "Fixing by Mixing" for the variance.
    """
    check_num_malicious(n, f)
    return f / (n - 2 * f)


@lru_cache(maxsize=1024)
def kappa_smea(n: int, f: int, gap: float = 0.0) -> float:
    r"""Return the spectral constant of SMEA: f/(n-2f) (1 + sqrt(1 + gap))^2.

    With gap = 0, exact SMEA, it is 4f/(n-2f): smaller than the paper's by the factor
    (n-2f)/(n-f). With gap = g > 0 it holds for any subset whose lambda_max is at most
    1 + g times the smallest one, which is what a search stopped early certifies.

    Proof. Let m = n - f, S any set of size m, S* the set returned, A what they have in
    common, k = |S* \ S| <= f, and v the unit vector along mean_S* - mean_S. Let T be a
    set of size m that contains A, and a = <v, mean_A - mean_T>. The other k points of T
    have mean -a (m-k)/k along v (about mean_T), and the scatter of T along v is at
    least that of the means of its two parts:
    (m-k) a^2 + k (a (m-k)/k)^2 = a^2 m (m-k)/k <= lambda_max(scatter_T).
    Take T = S* and T = S and add the two |a|:
    ||mean_S* - mean_S|| <= sqrt(k/(m (m-k))) (sqrt(lambda*) + sqrt(lambda_S)), with
    lambda* <= (1 + g) lambda_S, lambda_S = m lambda_max(cov_S). Square it and use
    k/(m-k) <= f/(n-2f).  QED
    """
    check_num_malicious(n, f)
    if not gap >= 0.0:
        raise ValueError(f"gap={gap} must be at least 0")
    return f / (n - 2 * f) * (1.0 + math.sqrt(1.0 + gap)) ** 2


@lru_cache(maxsize=1024)
def kappa_smea_paper(n: int, f: int) -> float:
    """Return the paper's spectral constant of SMEA, 4f(n-f)/(n-2f)^2."""
    check_num_malicious(n, f)
    return 4.0 * f * (n - f) / (n - 2 * f) ** 2


def kappa_trimmed_mean(n: int, f: int) -> float:
    """Return the variance constant of TrimmedMean, 6f/(n-2f) (1 + f/(n-2f)).

    Stated in "Fixing by Mixing".
    """
    check_num_malicious(n, f)
    return 6.0 * f / (n - 2 * f) * (1.0 + f / (n - 2 * f))


def kappa_krum(n: int, f: int) -> float:
    """Return the variance constant of Krum, 6 (1 + f/(n-2f)).

    Stated in "Fixing by Mixing" for scores over the n - f nearest vectors, the vector
    itself among them. Short proof: some i in S has a score of at most
    (1/|S|) sum_{i,j in S} ||x_i - x_j||^2 = 2 |S| trace(cov_S), so the chosen x has
    too; at least n - 2f of its neighbours y are in S, and averaging
    ||x - mean_S||^2 <= (1 + a) ||x - y||^2 + (1 + 1/a) ||y - mean_S||^2 over them gives
    (n-f)/(n-2f) (2 (1 + a) + 1 + 1/a), which is 3 + 2 sqrt(2) < 6 times (n-f)/(n-2f)
    at a = 1/sqrt(2).
    """
    check_num_malicious(n, f)
    return 6.0 * (1.0 + f / (n - 2 * f))


def kappa_geometric_median(n: int, f: int) -> float:
    """Return the variance constant of GeometricMedian, 4 (1 + f/(n-2f))^2.

    Stated in "Fixing by Mixing". Short proof: z minimises sum_i ||x_i - z||, so it does
    no worse than mean_S; triangle inequalities on both sides leave
    (n-2f) ||z - mean_S|| <= 2 sum_{i in S} ||x_i - mean_S||, and Cauchy-Schwarz does
    the rest.
    """
    check_num_malicious(n, f)
    return 4.0 * (1.0 + f / (n - 2 * f)) ** 2


def kappa_median(n: int, f: int) -> float:
    """Return the variance constant of Median: GeometricMedian's, in each coordinate."""
    return kappa_geometric_median(n, f)


def kappa_nnm(n: int, f: int, inner: float) -> float:
    """Return the variance constant of NNM before a rule that has the constant `inner`.

    8f/(n-f) (inner + 1), stated in "Fixing by Mixing".
    """
    check_num_malicious(n, f)
    return 8.0 * f / (n - f) * (inner + 1.0)


def spectral_factor(h: int, d: int | None = None) -> int:
    """Return min(d, h-1), the largest ratio of trace(cov) of h vectors to lambda_max.

    Without d it is h - 1.

    cov has rank at most min(d, h-1), because the h vectors about their mean sum to 0,
    and its trace is the sum of so many eigenvalues. Attained where these are equal.
    """
    check_positive(h=h)
    if d is None:
        return h - 1
    check_positive(d=d)
    return min(d, h - 1)


def kappa_spectral(kappa: float, n: int, f: int, d: int | None = None) -> float:
    """Return min(d, n-f-1) kappa: a variance constant in the spectral notion.

    The trace is at most so many times the largest eigenvalue (`spectral_factor`).
    """
    check_num_malicious(n, f)
    return spectral_factor(n - f, d) * kappa
