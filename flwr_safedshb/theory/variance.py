r"""What chance does to momentums: variances that the convergence theorem is made of.

Two sources: which examples are in a batch (sigma_b^2), and the noise of privacy
(sigma_DP in each of d coordinates). Each counts twice: in the mean of the h = n - f
honest momentums, and in their spread, which adversaries can use.
"""

from collections.abc import Sequence

from flwr_safedshb.theory.checks import batch, not_negative, positive
from flwr_safedshb.theory.robustness import check_num_malicious
from flwr_safedshb.theory.spread import noise_spread


def batch_variance(gradient_std: float, b: int, m: int) -> float:
    """Return (1 - (b-1)/(m-1)) sigma^2/b, of a batch drawn without replacement.

    The mean squared distance of its mean gradient from that of all m examples, exactly
    where sigma^2 is that of one example; 0 for b = m. It stands in the paper's proof;
    the theorem is printed with `batch_variance_paper`, which is larger.

    Parameters
    ----------
    gradient_std : float
        sigma: sigma^2 bounds the mean squared distance of the gradients of single
        examples from their client's; C will do where they are clipped at C.
    b, m : int
        Batch size and examples of a client.
    """
    not_negative(gradient_std=gradient_std)
    batch(b, m)
    return 0.0 if b == m else (m - b) / (m - 1) * gradient_std**2 / b


def batch_variance_paper(gradient_std: float, b: int, m: int) -> float:
    """Return sigma_b^2 = 2 (1 - b/m) sigma^2/b, as printed with the theorem."""
    not_negative(gradient_std=gradient_std)
    batch(b, m)
    return 2.0 * (1.0 - b / m) * gradient_std**2 / b


def effective_variance(
    n: int, f: int, d: int, batch_variance: float, noise_std: float, kappa: float
) -> float:
    """Return sbar^2, the variance that counts in our bounds.

    (sigma_b^2 + d sigma_DP^2)/h is that of the honest mean, h = n - f, and
    4 kappa (sigma_b^2 + sigma_DP^2 (1 + sqrt(d/h))^2) what adversaries make of it. The
    paper has 36 (1 + d/h) in place of the last square, which is 18 times larger or
    more; see `drift_bounds` for the proof of ours.

    Parameters
    ----------
    n, f, d : int
        Clients, adversaries among them, parameters of the model.
    batch_variance : float
        sigma_b^2, see `batch_variance`.
    noise_std : float
        sigma_DP, in every coordinate.
    kappa : float
        Spectral constant of the rule.
    """
    honest = _checked(n, f, d, batch_variance, noise_std, kappa)
    averaged = (batch_variance + d * noise_std**2) / honest
    return averaged + 4.0 * kappa * (batch_variance + _noise(honest, d, noise_std))


def effective_variance_paper(
    n: int, f: int, d: int, batch_variance: float, noise_std: float, kappa: float
) -> float:
    """Return sbar^2 as the paper has it.

    (sigma_b^2 + d sigma_DP^2)/(n-f) + 4 kappa (sigma_b^2 +
    36 sigma_DP^2 (1 + d/(n-f))); parameters as in `effective_variance`.
    """
    honest = _checked(n, f, d, batch_variance, noise_std, kappa)
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
    r"""Return U_1, U_2, ..: bounds on how far honest momentums are apart.

    E Delta_t <= U_t, Delta_t the top eigenvalue of the covariance of the h honest
    momentums after step t, U_0 = 0 and

    U_{t+1} = beta_t U_t + 2 (1-beta_t) Gcov^2
              + 4 (1-beta_t)^2 (sigma_b^2 + sigma_DP^2 (1 + sqrt(d/h))^2).

    Proof. Unrolled, a momentum is a sum over the steps k <= t with fixed weights w_k
    of gradient, chance of the batch and noise. The root of a top eigenvalue is a norm
    of the centred vectors (the largest singular value over sqrt(h)), so the roots of
    the three parts add up. Let A = sum w_k <= 1 and B = sum w_k^2. Gradients: each step
    has a root of at most Gcov whatever the model, so their sum has A Gcov at most.
    Noise: the sum is Gaussian of variance B sigma_DP^2, because the weights are fixed,
    so `noise_spread` holds. Batches: given the past each has mean 0, so squares add up,
    and the top eigenvalue is at most the trace: B sigma_b^2 on average. With
    (x + y + z)^2 <= 2 x^2 + 4 y^2 + 4 z^2 and A^2 <= A,
    E Delta_t <= 2 A Gcov^2 + 4 B (sigma_b^2 + sigma_DP^2 (1 + sqrt(d/h))^2). A obeys
    A' = beta A + (1-beta), and B' = beta^2 B + (1-beta)^2, which is at most
    beta B + (1-beta)^2.  QED

    No step of it takes noise and signal apart *inside* an expectation of a largest
    eigenvalue, where mixed terms do not vanish: see docs/convergence.md.

    Parameters
    ----------
    momentums : sequence of float
        beta_0, beta_1, ..: the coefficient of the old momentum in each step.
    h, d : int
        Honest clients and parameters of the model.
    batch_variance, noise_std : float
        sigma_b^2 and sigma_DP.
    heterogeneity : float
        Gcov.
    """
    positive(h=h, d=d)
    not_negative(
        batch_variance=batch_variance, noise_std=noise_std, heterogeneity=heterogeneity
    )
    chance = batch_variance + _noise(h, d, noise_std)
    bound, found = 0.0, []
    for beta in momentums:
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"momentums holds {beta}; each must lie in [0, 1)")
        new = 1.0 - beta
        bound = beta * bound + 2.0 * new * heterogeneity**2 + 4.0 * new**2 * chance
        found.append(bound)
    return found


def _noise(h: int, d: int, noise_std: float) -> float:
    """Return sigma_DP^2 (1 + sqrt(d/h))^2."""
    return noise_spread(h, d, noise_std)[1]


def _checked(
    n: int, f: int, d: int, batch_variance: float, noise_std: float, kappa: float
) -> int:
    """Return n - f, for numbers that can be."""
    check_num_malicious(n, f)
    positive(d=d)
    not_negative(batch_variance=batch_variance, noise_std=noise_std, kappa=kappa)
    return n - f
