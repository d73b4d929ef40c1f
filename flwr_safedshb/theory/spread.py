r"""How far vectors are apart, in two senses, and what noise adds to each.

For h vectors with covariance cov (factor 1/h): G^2 = trace(cov), their mean squared
distance from their mean, and Gcov^2 = lambda_max(cov), the part of it along the
direction in which they differ most.

**Two facts.** cov has rank at most h - 1, so Gcov^2 <= G^2 <= min(d, h-1) Gcov^2: what
is proven in units of the trace costs at most the factor h - 1 in units of the
eigenvalue, however large d is. And noise of deviation s in each of d coordinates does
not add s^2 to the eigenvalue of h vectors, it adds about s^2 (1 + sqrt(d/h))^2: see
`noise_spread`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from flwr_safedshb.theory.checks import not_negative, positive

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


def heterogeneity(vectors: ArrayLike) -> tuple[float, float]:
    """Return (G, Gcov) of the gradients that honest clients have at one model.

    The paper's are the suprema over all models: take the largest over the models that
    training passes. Gradients are of whole datasets and without noise, so they come
    from public or simulated data; of noisy vectors see `heterogeneity_estimate`.

    Parameters
    ----------
    vectors : (h, d) array
        One row for each client.

    Returns
    -------
    G : float
        Root mean square distance of the vectors from their mean.
    Gcov : float
        The same along the direction in which they differ most.
    """
    import numpy as np  # the only function here that needs it, and --help does not

    rows = np.asarray(vectors, dtype=np.float64)
    if rows.ndim != 2 or 0 in rows.shape:
        raise ValueError(
            f"vectors has shape {rows.shape}; give an (h, d) array, one row for each "
            "client"
        )
    if not np.isfinite(rows).all():
        raise ValueError("vectors holds NaN or infinity; leave those clients out")
    centred = rows - rows.mean(axis=0)
    values = np.linalg.eigvalsh(centred @ centred.T / len(rows))
    return float(np.sqrt(max(values.sum(), 0.0))), float(np.sqrt(max(values[-1], 0.0)))


def spectral_factor(h: int, d: int | None = None) -> int:
    """Return min(d, h-1), the most that trace(cov) of h vectors is over lambda_max.

    cov has rank at most min(d, h-1), because the h vectors about their mean sum to 0,
    and its trace is the sum of so many eigenvalues. Attained where these are equal.

    Parameters
    ----------
    h : int
        Vectors, n - f for a rule.
    d : int, optional
        Dimension; large by default.
    """
    positive(h=h)
    if d is None:
        return h - 1
    positive(d=d)
    return min(d, h - 1)


def noise_spread(h: int, d: int, noise_std: float) -> tuple[float, float]:
    r"""Return what Gaussian noise adds to the covariance of h vectors, on average.

    Returns
    -------
    trace : float
        d s^2 (1 - 1/h), exactly.
    lambda_max : float
        A bound: s^2 (1 + sqrt(d/h))^2; 0 for h = 1, which has no spread.

    Proof of the bound. Centring h vectors projects onto h - 1 dimensions, so in units
    of s the root of h lambda_max is the largest singular value of a Gaussian
    (h-1) x d matrix. Its mean is at most sqrt(h-1) + sqrt(d) (Gordon), its variance at
    most 1 (it is 1-Lipschitz; Gaussian Poincare inequality). So
    E h lambda_max <= (sqrt(h-1) + sqrt(d))^2 + 1 = h + d + 2 sqrt((h-1) d), which is at
    most (sqrt(h) + sqrt(d))^2.  QED

    Parameters
    ----------
    h, d : int
        Vectors and their dimension.
    noise_std : float
        s, in every coordinate.
    """
    positive(h=h, d=d)
    not_negative(noise_std=noise_std)
    if h == 1:
        return 0.0, 0.0
    unit = noise_std**2
    return unit * d * (1.0 - 1.0 / h), unit * (1.0 + math.sqrt(d / h)) ** 2


def noise_in_momentum(
    noise_std: float, momentum: float, steps: int | None = None
) -> float:
    """Return the deviation of the noise in a momentum, in every coordinate.

    m_t = beta m_{t-1} + (1 - beta) (g_t + noise) holds the noises of all steps with
    weights (1 - beta) beta^k, whose squares sum to
    (1 - beta)/(1 + beta) (1 - beta^(2T)) after T steps. At beta = 0.99 that is 1/199 of
    the variance of one step, for T large: what honest clients differ by, and what
    adversaries hide in, shrinks with it.

    Parameters
    ----------
    noise_std : float
        sigma_DP, of a step.
    momentum : float
        beta, the same in all steps, in [0, 1).
    steps : int, optional
        T, how many steps the momentum holds; very many by default.
    """
    not_negative(noise_std=noise_std)
    if not 0.0 <= momentum < 1.0:
        raise ValueError(f"momentum={momentum} must lie in [0, 1)")
    squares = (1.0 - momentum) / (1.0 + momentum)
    if steps is not None:
        positive(steps=steps)
        squares *= 1.0 - momentum ** (2 * steps)
    return noise_std * math.sqrt(squares)


def heterogeneity_estimate(
    trace: float, lambda_max: float, h: int, d: int, noise_std: float
) -> tuple[float, float]:
    """Return (G, Gcov) as they were before Gaussian noise, **estimated**.

    From the trace d s^2 (1 - 1/h) is taken off, its mean. The eigenvalue is taken back
    to the one that noise lifts to it: for a direction in which the vectors differ by l,
    in units of s^2, it is near (1 + l)(1 + d/(h l)) where h and d are large, and one of
    at most (1 + sqrt(d/h))^2 shows no difference at all: Gcov is 0 then, which says
    that noise hides what there is. Few vectors give a rough estimate, adversaries can
    feign either figure, and the chance of batches is still in both.

    Parameters
    ----------
    trace, lambda_max : float
        Of the covariance of the noisy vectors.
    h, d : int
        Vectors and their dimension.
    noise_std : float
        s, in every coordinate; of momentums, see `noise_in_momentum`.
    """
    not_negative(trace=trace, lambda_max=lambda_max)
    noise, most = noise_spread(h, d, noise_std)
    total, top = max(trace - noise, 0.0), lambda_max
    if noise_std > 0.0:
        unit, ratio = noise_std**2, d / h
        lifted = lambda_max / unit - 1.0 - ratio
        root = math.sqrt(max(lifted**2 - 4.0 * ratio, 0.0))
        top = unit * (lifted + root) / 2.0 if lambda_max > most else 0.0
    return math.sqrt(total), math.sqrt(min(top, total))
