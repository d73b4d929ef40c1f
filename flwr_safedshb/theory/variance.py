r"""How far honest vectors are apart: their data, their batches, and their noise.

For h vectors with covariance cov (factor 1/h): G^2 = trace(cov) is their mean squared
distance from their mean, and Gcov^2 = lambda_max(cov) its part along the direction in
which they differ most. cov has rank at most h - 1, so
Gcov^2 <= G^2 <= min(d, h-1) Gcov^2, however large d is.

Chance adds to both: which examples are in a batch (sigma_b^2), and the privacy noise
(sigma_DP in each of d coordinates). It moves the mean of the h = n - f honest momentums
and widens their spread, which adversaries can use.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from flwr_safedshb.theory.checks import (
    check_batch,
    check_momentum,
    check_not_negative,
    check_positive,
)
from flwr_safedshb.theory.robustness import check_num_malicious

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


def heterogeneity(vectors: ArrayLike) -> tuple[float, float]:
    """Return (G, Gcov) of the gradients that honest clients have at one model.

    The paper's are the suprema over all models: take the largest over the models that
    training passes. Gradients are of whole datasets and without noise, so they come
    from public or simulated data. For noisy vectors see `heterogeneity_estimate`.

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
    import numpy as np  # here, so that --help does not wait for it

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


def heterogeneity_estimate(
    trace: float, lambda_max: float, h: int, d: int, noise_std: float
) -> tuple[float, float]:
    """**Estimate** (G, Gcov) as they were before Gaussian noise was added.

    The trace loses d s^2 (1 - 1/h), the noise's mean. The eigenvalue is mapped back to
    the one that noise lifts to it: a direction in which the vectors differ by l, in
    units of s^2, shows about (1 + l)(1 + d/(h l)) where h and d are large. One of at
    most (1 + sqrt(d/h))^2 shows no difference, and Gcov is 0: noise hides what there
    is. Few vectors give a rough estimate, adversaries can feign either figure, and the
    variance of the batches is still in both. For momentums, `noise_in_momentum` gives
    the noise.
    """
    check_not_negative(trace=trace, lambda_max=lambda_max)
    noise, most = noise_spread(h, d, noise_std)
    total, top = max(trace - noise, 0.0), lambda_max
    if noise_std > 0.0:
        unit, ratio = noise_std**2, d / h
        lifted = lambda_max / unit - 1.0 - ratio
        root = math.sqrt(max(lifted**2 - 4.0 * ratio, 0.0))
        top = unit * (lifted + root) / 2.0 if lambda_max > most else 0.0
    return math.sqrt(total), math.sqrt(min(top, total))


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
    """
    check_positive(h=h, d=d)
    check_not_negative(noise_std=noise_std)
    if h == 1:
        return 0.0, 0.0
    unit = noise_std**2
    return unit * d * (1.0 - 1.0 / h), unit * (1.0 + math.sqrt(d / h)) ** 2


def noise_in_momentum(
    noise_std: float, momentum: float, steps: int | None = None
) -> float:
    """Return the deviation of the noise in a momentum, in every coordinate.

    m_t = beta m_{t-1} + (1 - beta) (g_t + noise) holds the noise of all steps with
    weights (1 - beta) beta^k, whose squares sum to
    (1 - beta)/(1 + beta) (1 - beta^(2T)) after T steps; T is infinite by default. At
    beta = 0.99 that is 1/199 of the variance of one step for large T: honest clients
    differ by less, and adversaries have less to hide in.
    """
    check_not_negative(noise_std=noise_std)
    check_momentum(momentum)
    squares = (1.0 - momentum) / (1.0 + momentum)
    if steps is not None:
        check_positive(steps=steps)
        squares *= 1.0 - momentum ** (2 * steps)
    return noise_std * math.sqrt(squares)


def batch_variance(gradient_std: float, b: int, m: int) -> float:
    """Return (1 - (b-1)/(m-1)) sigma^2/b, of a batch drawn without replacement.

    It is the mean squared distance of the batch's mean gradient from that of all m
    examples, exact where sigma^2 is exact; 0 for b = m. It stands in the paper's proof;
    the theorem is printed with `batch_variance_paper`, which is larger.
    """
    check_not_negative(gradient_std=gradient_std)
    check_batch(b, m)
    return 0.0 if b == m else (m - b) / (m - 1) * gradient_std**2 / b


def batch_variance_paper(gradient_std: float, b: int, m: int) -> float:
    """Return sigma_b^2 = 2 (1 - b/m) sigma^2/b, as printed with the theorem."""
    check_not_negative(gradient_std=gradient_std)
    check_batch(b, m)
    return 2.0 * (1.0 - b / m) * gradient_std**2 / b


def effective_variance(
    n: int, f: int, d: int, batch_variance: float, noise_std: float, kappa: float
) -> float:
    """Return sbar^2, the variance in our convergence bounds.

    (sigma_b^2 + d sigma_DP^2)/h is that of the honest mean, h = n - f, and
    4 kappa (sigma_b^2 + sigma_DP^2 (1 + sqrt(d/h))^2) what adversaries make of it
    (proof: `drift_bounds`). The paper has 36 (1 + d/h) in place of the last square,
    which is at least 18 times larger.
    """
    honest = count_honest(n, f, d, batch_variance, noise_std, kappa)
    averaged = (batch_variance + d * noise_std**2) / honest
    spread = batch_variance + noise_spread(honest, d, noise_std)[1]
    return averaged + 4.0 * kappa * spread


def effective_variance_paper(
    n: int, f: int, d: int, batch_variance: float, noise_std: float, kappa: float
) -> float:
    """Return sbar^2 as the paper has it.

    (sigma_b^2 + d sigma_DP^2)/(n-f) + 4 kappa (sigma_b^2 +
    36 sigma_DP^2 (1 + d/(n-f))).
    """
    honest = count_honest(n, f, d, batch_variance, noise_std, kappa)
    noise = noise_std**2
    averaged = (batch_variance + d * noise) / honest
    return averaged + 4.0 * kappa * (batch_variance + 36.0 * noise * (1 + d / honest))


def drift_bounds(
    momentums: Sequence[float],
    h: int,
    d: int,
    batch_variance: float,
    noise_std: float,
    heterogeneity: float,
) -> list[float]:
    r"""Return U_1, U_2, .. for beta_0, beta_1, ..: bounds on honest momentums' spread.

    E Delta_t <= U_t, Delta_t the top eigenvalue of the covariance of the h honest
    momentums after step t, U_0 = 0 and

    U_{t+1} = beta_t U_t + 2 (1-beta_t) Gcov^2
              + 4 (1-beta_t)^2 (sigma_b^2 + sigma_DP^2 (1 + sqrt(d/h))^2).

    Proof: docs/convergence.md, "How far honest momentums are apart". It never separates
    noise and signal *inside* an expectation of a largest eigenvalue, where mixed terms
    do not vanish; the paper's lemma does.
    """
    check_positive(h=h, d=d)
    check_not_negative(
        batch_variance=batch_variance, noise_std=noise_std, heterogeneity=heterogeneity
    )
    chance = batch_variance + noise_spread(h, d, noise_std)[1]
    bound, bounds = 0.0, []
    for beta in momentums:
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"momentums holds {beta}; each must lie in [0, 1)")
        new = 1.0 - beta
        bound = beta * bound + 2.0 * new * heterogeneity**2 + 4.0 * new**2 * chance
        bounds.append(bound)
    return bounds


def count_honest(
    n: int, f: int, d: int, batch_variance: float, noise_std: float, kappa: float
) -> int:
    """Check the numbers that a bound on honest vectors takes, and return h = n - f."""
    check_num_malicious(n, f)
    check_positive(d=d)
    check_not_negative(batch_variance=batch_variance, noise_std=noise_std, kappa=kappa)
    return n - f
