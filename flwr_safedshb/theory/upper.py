r"""What Safe-DSHB is proved to reach: the paper's corollaries, and one step of SMEA."""

import math

from flwr_safedshb.theory.checks import batch, not_negative, positive, probability
from flwr_safedshb.theory.robustness import check_num_malicious
from flwr_safedshb.theory.spread import noise_spread
from flwr_safedshb.theory.trilemma import Trilemma


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


def strongly_convex_corollary(
    n: int,
    f: int,
    m: int,
    d: int,
    epsilon: float,
    delta: float,
    heterogeneity: float = 0.0,
    clip_norm: float = 1.0,
) -> Trilemma:
    """Return the terms of Safe-DSHB's error with SMEA on a strongly convex loss.

    log(1/delta) d/(epsilon^2 n m^2), log(1/delta) (f/n)/(epsilon^2 m^2) and (f/n) G^2:
    the paper's corollary, which is the lower bound but for log(1/delta). It is stated
    as O(.), for T large enough, n >= (2 + eta) f with a constant eta > 0 and
    epsilon <= log(1/delta): **constants, which depend on eta, L and mu, are left open**
    and taken as 1. `corollary_violations` says whether it applies.
    """
    log, unit = _scale(n, f, m, d, epsilon, delta, heterogeneity, clip_norm)
    return Trilemma(
        privacy=log * unit**2 * d / n,
        both=log * unit**2 * f / n,
        robustness=heterogeneity**2 * f / n,
    )


def non_convex_corollary(
    n: int,
    f: int,
    m: int,
    d: int,
    epsilon: float,
    delta: float,
    heterogeneity: float = 0.0,
    clip_norm: float = 1.0,
) -> Trilemma:
    """Return the terms of Safe-DSHB's squared gradient with SMEA, without convexity.

    sqrt(d log(1/delta))/(epsilon sqrt(n) m), sqrt(f/n) sqrt(log(1/delta))/(epsilon m)
    and (f/n) G^2: the paper's corollary, in the sense and under the conditions of
    `strongly_convex_corollary`.
    """
    log, unit = _scale(n, f, m, d, epsilon, delta, heterogeneity, clip_norm)
    return Trilemma(
        privacy=math.sqrt(log * d / n) * unit,
        both=math.sqrt(log * f / n) * unit,
        robustness=heterogeneity**2 * f / n,
    )


def corollary_violations(
    n: int, f: int, epsilon: float, delta: float, eta: float = 1.0
) -> tuple[str, ...]:
    """Name each condition of the corollaries that does not hold, and the remedy.

    Parameters
    ----------
    n, f : int
    epsilon, delta : float
    eta : float
        The constant of n >= (2 + eta) f. Every n > 2f has one, n/f - 2 at most, and the
        constants of the corollaries grow with 1/eta: kappa of SMEA is at most 4/eta.
    """
    check_num_malicious(n, f)
    positive(epsilon=epsilon, eta=eta)
    probability(delta=delta)
    found = []
    if n < (2.0 + eta) * f:
        found.append(
            f"n={n} must be at least (2 + eta) f={(2.0 + eta) * f:g} with eta={eta:g}; "
            f"take eta={n / f - 2.0:.3g}, or add clients"
        )
    log = math.log(1.0 / delta)
    if epsilon > log:
        found.append(
            f"epsilon={epsilon:.4g} must be at most log(1/delta)={log:.4g}; lower "
            "epsilon or delta"
        )
    return tuple(found)


def mean_estimation_bound(
    n: int,
    f: int,
    d: int,
    noise_std: float,
    kappa: float,
    heterogeneity: float = 0.0,
    batch_variance: float = 0.0,
) -> Trilemma:
    r"""Return terms that combine to a bound on the error of one aggregate.

    E||R - mean||^2 is at most the `Trilemma.combined` of what is returned, the square
    of the sum of the roots of its terms, where R is the aggregate of what n clients
    send, mean that of the honest clients' gradients before noise, and, with h = n - f
    and s the deviation of the noise,

    privacy = (1 + sqrt(kappa))^2 d s^2/h, both = kappa s^2, robustness = kappa Gcov^2,
    sampling = (1/sqrt(h) + sqrt(kappa))^2 sigma_b^2.

    Ours, elementary and with its constants. Proof: R is off by the mean of the honest
    noise, whose square is d s^2/h on average, by the mean chance of the batches,
    sigma_b^2/h, and by sqrt(kappa lambda_max(cov)) at most, cov being that of what
    honest clients send. The root of lambda_max is the largest singular value of their
    centred matrix over sqrt(h): at most Gcov plus that of the noise, whose square is at
    most s^2 (1 + sqrt(d/h))^2 on average (`noise_spread`), plus that of the batches,
    whose square is at most their trace, sigma_b^2. Minkowski's inequality adds up the
    roots.  QED

    The same holds for momentums with a constant beta at a model that stays where it is,
    with s of `noise_in_momentum` and sigma_b^2 smaller by the same factor. What the
    momentum lags behind a model that moves is not in it.

    Parameters
    ----------
    n, f, d : int
        Clients, adversaries among them, dimension.
    noise_std : float
        s: sigma_DP for a single gradient.
    kappa : float
        Spectral constant of the rule.
    heterogeneity : float
        Gcov, or G.
    batch_variance : float
        sigma_b^2; 0 where batches are all of the examples.
    """
    honest = _honest(n, f, d, noise_std, kappa, heterogeneity, batch_variance)
    root = math.sqrt(kappa)
    return Trilemma(
        privacy=(1.0 + root) ** 2 * d * noise_std**2 / honest,
        both=kappa * noise_std**2,
        robustness=kappa * heterogeneity**2,
        sampling=(1.0 / math.sqrt(honest) + root) ** 2 * batch_variance,
    )


def stopping_radius(
    n: int,
    f: int,
    d: int,
    noise_std: float,
    kappa: float,
    heterogeneity: float = 0.0,
    batch_variance: float = 0.0,
) -> float:
    """Return r: where the gradient is longer, no adversary turns a step uphill.

    r = sqrt(kappa) (Gcov + s (1 + sqrt(d/h)) + sigma_b). Where ||grad L|| > r at a
    model that stays put, the aggregate R points downhill on average,
    E<R, grad L> > 0, whatever f clients send.
    Proof: R is the mean of the honest vectors, which is grad L on average, plus an
    error of at most the root of kappa lambda_max(cov), whose mean is at most r as in
    `mean_estimation_bound`; so E<R, grad L> >= ||grad L|| (||grad L|| - r).  QED

    **This is about one step, and no bound for a training.** Momentums of a model that
    moves lag behind its gradient, which the proof leaves out: a training with momentum
    can swing uphill where ||grad L|| > r, even without adversaries. Within r nothing is
    proven, and adversaries who use all of kappa do stop progress: within about a third
    of r even where honest clients differ by noise alone (measured, see
    docs/trilemma.md). Parameters as in `mean_estimation_bound`.
    """
    honest = _honest(n, f, d, noise_std, kappa, heterogeneity, batch_variance)
    noise = math.sqrt(noise_spread(honest, d, noise_std)[1])
    return math.sqrt(kappa) * (heterogeneity + noise + math.sqrt(batch_variance))


def _honest(
    n: int,
    f: int,
    d: int,
    noise_std: float,
    kappa: float,
    heterogeneity: float,
    batch_variance: float,
) -> int:
    """Return h = n - f, for numbers that can be."""
    check_num_malicious(n, f)
    positive(d=d)
    not_negative(noise_std=noise_std, kappa=kappa, heterogeneity=heterogeneity)
    not_negative(batch_variance=batch_variance)
    return n - f


def _scale(
    n: int,
    f: int,
    m: int,
    d: int,
    epsilon: float,
    delta: float,
    heterogeneity: float,
    clip_norm: float,
) -> tuple[float, float]:
    """Return log(1/delta) and C/(epsilon m), for numbers that can be."""
    check_num_malicious(n, f)
    positive(m=m, d=d, epsilon=epsilon, clip_norm=clip_norm)
    not_negative(heterogeneity=heterogeneity)
    probability(delta=delta)
    return math.log(1.0 / delta), clip_norm / (epsilon * m)
