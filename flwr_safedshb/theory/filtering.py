r"""The constants of Filter, with a bound on the honest covariance and without one.

Filter keeps weights c_i in [0, 1], at first 1, and takes c_i tau_i/tau_max off each
while the top eigenvalue s2 of the weighted covariance is too large, tau_i being the
squared projection of vector i on the eigenvector v. For a set S of n - f vectors let
lambda_S be the top eigenvalue of their covariance, h and a the masses (sums of
weights) that S and the others have left, M = h + a, x = n - f - h what S has lost, and
e = 2(n-f)/(n-2f). Two lemmas carry all constants here.

**1. While s2 > e lambda_S, S loses less than the others.** Proof: let W be the weighted
scatter of S along v about its own weighted mean, at most (n-f) lambda_S. The scatter of
all is M s2 = W + that of the others + (ha/M) D^2, D being how far the two means are
apart along v. So the scatter of S about the common mean, W + h (aD/M)^2, is at most
W + (a/M)(M s2 - W) <= (n-f) lambda_S + a s2 < (n-2f) s2/2 + a s2, which is at most
M s2/2 as long as h - a >= n - 2f. Weights fall in proportion to it, so h - a grows, and
the condition, an equality at first, stays true. In particular x <= f - a, and
M > n - 2f, until s2 <= e lambda_S.  QED

**2. The mean of all is within sqrt(x/h lambda_S) + sqrt(a/h s2) of mean_S.** Proof: S
consists of what is left of it, of mass h and at distance D from mean_S along some unit
vector, and of what it has lost, of mass x and so at D h/x on the other side: its
scatter (n-f) lambda_S is at least h D^2 + x (D h/x)^2 = D^2 h (n-f)/x. In the same way
M s2 >= D'^2 h M/a for the distance D' of the mean of all from that of S.  QED
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from flwr_safedshb.theory.checks import check_not_negative
from flwr_safedshb.theory.robustness import check_num_malicious


def filter_eta(n: int, f: int) -> float:
    """Return e = 2(n-f)/(n-2f), Filter's stop in units of sigma_0^2.

    All that lemma 1 needs; the paper's (`filter_eta_paper`) is n/(n-2f) times larger.
    """
    check_num_malicious(n, f)
    return 2.0 * (n - f) / (n - 2 * f)


def filter_eta_paper(n: int, f: int) -> float:
    """Return eta = 2n(n-f)/(n-2f)^2, the paper's stop."""
    check_num_malicious(n, f)
    return 2.0 * n * (n - f) / (n - 2 * f) ** 2


def kappa_filter(n: int, f: int, eta: float | None = None) -> float:
    """Return Filter's constant with a bound, f eta/(n-f) + f/(n-2f).

    It bounds ||out - mean_S||^2 / sigma_0^2 for a sigma_0^2 of at least lambda_S, where
    Filter stops at s2 <= eta sigma_0^2; it is not robust averaging, because sigma_0
    must be known. With eta = e, the default and ours, it is 3f/(n-2f); with the paper's
    eta it is 45 at n = 7, f = 3, where the paper has 85.5 (`kappa_filter_paper`).

    Proof. By lemma 1 x <= f - a at the stop, for eta >= e. By lemma 2 and
    a <= f - x the distance is at most sqrt(A) + sqrt(B) times sigma_0 with
    A = x/(n-f-x) and B = (f-x) eta/(n-f-x). With p = f/(n-2f) and q = f eta/(n-f),
    A/p + B/q = (x (n-2f) + (f-x)(n-f))/(f (n-f-x)) = 1, so by Cauchy-Schwarz
    (sqrt(A) + sqrt(B))^2 <= p + q.  QED

    Parameters
    ----------
    n, f : int
    eta : float, optional
        The stop in units of sigma_0^2, at least `filter_eta`, which is the default.
    """
    least = filter_eta(n, f)
    eta = least if eta is None else eta
    if not least <= eta < math.inf:
        raise ValueError(
            f"eta={eta} must be finite and at least 2(n-f)/(n-2f)={least:g}: with less "
            "honest vectors may lose more than the others"
        )
    return f * eta / (n - f) + f / (n - 2 * f)


def kappa_filter_paper(n: int, f: int) -> float:
    """Return the paper's constant with a bound, 4fn/(n-2f)^2 + 2f/(n-f).

    For its own eta. The paper prints 6f/(n-2f) (1 + f/(n-2f)) beside it as an equality;
    the two differ.
    """
    check_num_malicious(n, f)
    return 4.0 * f * n / (n - 2 * f) ** 2 + 2.0 * f / (n - f)


def kappa_filter_agnostic(n: int, f: int) -> float | None:
    """Return the spectral constant of Filter without a bound; None for f >= n/3.

    f/(n-3f) (sqrt(2) + sqrt(e))^2: of the means that come before the mass falls to
    n - 2f Filter returns the one with the smallest s2, which by lemma 1 is at most
    e lambda_S for every S. Then x + (f - a) < 2f and a <= f, and lemma 2 is largest at
    a = f, x = 2f: (sqrt(2f) + sqrt(f e))^2/(n-3f).  QED

    For f >= n/3 no constant is proven beforehand. Each answer has one of its own:
    `filter_certificate`.
    """
    e = filter_eta(n, f)
    if 3 * f >= n:
        return None
    return f / (n - 3 * f) * (math.sqrt(2.0) + math.sqrt(e)) ** 2


def filter_certificate(weights: Iterable[float], f: int, gap: float = 0.0) -> float:
    """Return the spectral constant that is proven for one answer; infinity for none.

    (sqrt(x) + sqrt(a e (1 + gap)))^2/h, where S is what remains of the vectors without
    the f of largest weight, and weights are scaled so that the largest is 1. Proof:
    lemma 2 with s2 <= (1 + gap) e lambda_S. Both x/h and a/h are largest for that S,
    neither mean nor s2 depends on the scale, and a larger one makes x/h smaller; no
    weight may exceed 1.  QED

    Parameters
    ----------
    weights : n numbers of at least 0, not all of them 0
        Of the vectors in the answer, up to scale.
    f : int
    gap : float
        Relative excess of the answer's s2 over the smallest that came before the mass
        fell to n - 2f, which is at most e lambda_S for every S (lemma 1).
    """
    ordered = sorted(weights)
    n = len(ordered)
    e = filter_eta(n, f)
    check_not_negative(least_weight=ordered[0], largest_weight=ordered[-1])
    if ordered[-1] == 0.0:
        raise ValueError("weights are all 0; give the weights of an answer")
    if not gap >= 0.0:
        raise ValueError(f"gap={gap} must be at least 0")
    scaled = [weight / ordered[-1] for weight in ordered]
    left, others = sum(scaled[: n - f]), sum(scaled[n - f :])
    if left == 0.0:
        return math.inf
    lost = max(n - f - left, 0.0)
    if gap == math.inf and others > 0.0:
        return math.inf
    share = 0.0 if others == 0.0 else others * e * (1.0 + gap)
    return (math.sqrt(lost) + math.sqrt(share)) ** 2 / left
