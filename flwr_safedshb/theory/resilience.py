r"""What adversaries can do to a step, which is proven, and to a training, an estimate.

`stopping_radius` is proven for a model that stays put: where the gradient is longer, no
adversary turns a step uphill on average. `push_radius` is proven for every model and
all steps of a run together: no aggregate is farther than that from the mean of the
honest momentums, whatever adversaries send.

Neither says how a training ends. Two ratios decide that, and `predict_withstanding`
reads them: the push over the signal that honest clients send, and how far pushes could
carry the model in a whole run over the way that it has to go. Its thresholds are fitted
to 84 trainings on six tasks; ``python -m simulations.study withstand`` tries it on
others. Between the thresholds it says that it cannot say.
"""

from __future__ import annotations

import math
from typing import Literal

from flwr_safedshb.theory.checks import check_not_negative, check_positive
from flwr_safedshb.theory.trilemma import Trilemma
from flwr_safedshb.theory.variance import count_honest, noise_spread

Verdict = Literal["will withstand", "will not withstand", "cannot say"]

# Push over signal, and reach over the way: at most so much of both, and a training
# withstands; so much of one of them, and it does not.
SAFE_RATIO, SAFE_REACH = 1.0, 5.0
LOST_RATIO, LOST_REACH = 2.5, 18.0
# Of `compare_with_alone`: federating pays from the one on, and not up to the other.
PAYS, DOES_NOT_PAY = 0.9, 0.3
# All steps of a run stay within the push radius with this probability.
CONFIDENCE = 0.95


def mean_estimation_bound(
    n: int,
    f: int,
    d: int,
    noise_std: float,
    kappa: float,
    heterogeneity: float = 0.0,
    batch_variance: float = 0.0,
) -> Trilemma:
    r"""Return terms whose `Trilemma.combined` bounds the error of one aggregate.

    E||R - mean||^2 is at most the square of the sum of their roots, where R is the
    aggregate of what n clients send, mean that of the honest clients' gradients before
    noise, and, with h = n - f and s the deviation of the noise,

    privacy = (1 + sqrt(kappa))^2 d s^2/h, both = kappa s^2, robustness = kappa Gcov^2,
    sampling = (1/sqrt(h) + sqrt(kappa))^2 sigma_b^2.

    Ours, elementary and with its constants. Proof: R is off by the mean of the honest
    noise, whose square is d s^2/h on average, by the mean batch error, sigma_b^2/h, and
    by sqrt(kappa lambda_max(cov)) at most, cov being that of what honest clients send.
    The root of lambda_max is the largest singular value of their centred matrix over
    sqrt(h): at most Gcov plus that of the noise, whose square is at most
    s^2 (1 + sqrt(d/h))^2 on average (`noise_spread`), plus that of the batches, whose
    square is at most their trace, sigma_b^2. Minkowski's inequality adds up the
    roots.  QED

    The same holds for momentums with a constant beta at a model that stays where it is,
    with s of `noise_in_momentum` and sigma_b^2 smaller by the same factor. How far the
    momentum lags behind a model that moves is not in it.
    """
    check_not_negative(heterogeneity=heterogeneity)
    honest = count_honest(n, f, d, batch_variance, noise_std, kappa)
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

    **It bounds one step, and no training.** The proof leaves out that momentums of a
    model that moves lag behind its gradient: with momentum a training can swing uphill
    where ||grad L|| > r, even without adversaries. Within r nothing is proven, and
    adversaries who use all of kappa do stop progress: within about a third of r even
    where honest clients differ by noise alone (measured, see docs/trilemma.md).
    """
    check_not_negative(heterogeneity=heterogeneity)
    honest = count_honest(n, f, d, batch_variance, noise_std, kappa)
    noise = math.sqrt(noise_spread(honest, d, noise_std)[1])
    return math.sqrt(kappa) * (heterogeneity + noise + math.sqrt(batch_variance))


def push_radius(
    n: int,
    f: int,
    d: int,
    noise_std: float,
    kappa: float,
    steps: int,
    heterogeneity: float = 0.0,
    batch_variance: float = 0.0,
) -> float:
    """Return how far aggregates get from the honest mean in a run, with probability.

    sqrt(kappa) (Gcov + s (sqrt(h-1) + sqrt(d) + sqrt(2 ln(T/p)))/sqrt(h) + sigma_b) for
    momentums whose noise has the deviation s in every coordinate, h = n - f and
    p = 1 - `CONFIDENCE`.
    Proof without batches: R is off the honest mean by sqrt(kappa lambda_max(cov)) at
    most. The root of lambda_max is at most Gcov, of the momentums without noise, plus
    s/sqrt(h) times the largest singular value of an (h-1) x d Gaussian matrix, which is
    1-Lipschitz and whose mean is at most sqrt(h-1) + sqrt(d) (Gordon): it exceeds that
    by u with probability exp(-u^2/2) at most, and the T steps together with p.  QED
    The root of the batches' share is its mean and not a bound; full batches have none.
    """
    check_not_negative(heterogeneity=heterogeneity)
    check_positive(steps=steps)
    honest = count_honest(n, f, d, batch_variance, noise_std, kappa)
    widest = math.sqrt(honest - 1) + math.sqrt(d)
    widest += math.sqrt(2.0 * math.log(steps / (1.0 - CONFIDENCE)))
    noise = noise_std * widest / math.sqrt(honest)
    return math.sqrt(kappa) * (heterogeneity + noise + math.sqrt(batch_variance))


def predict_withstanding(
    push: float, signal: float, distance: float, path: float
) -> Verdict:
    """Predict whether at least half of a training's progress stays under attack.

    The arguments are those of `attack_ratios`.
    """
    ratio, reach = attack_ratios(push, signal, distance, path)
    if ratio <= SAFE_RATIO and reach <= SAFE_REACH:
        return "will withstand"
    if ratio >= LOST_RATIO or reach >= LOST_REACH:
        return "will not withstand"
    return "cannot say"


def attack_ratios(
    push: float, signal: float, distance: float, path: float
) -> tuple[float, float]:
    """Return push over signal, and how far pushes carry the model over its way.

    Parameters
    ----------
    push : float
        Of `push_radius`.
    signal : float
        How much of the mean clipped gradient points the way to a good model, a tenth of
        that way from the first model.
    distance : float
        How far away the good model is.
    path : float
        The sum of the server's learning rates.
    """
    check_not_negative(push=push)
    check_positive(signal=signal, distance=distance, path=path)
    return push / signal, push * path / distance


def compare_with_alone(n: int, f: int, d: int, kappa: float, memory: float) -> float:
    """Estimate the harm of a client's own noise alone over that of attackers together.

    Alone, the noise of T steps adds up at random, to s sqrt(d T). In a federation
    adversaries push by sqrt(kappa) s (sqrt(h) + sqrt(d) + 3.6)/sqrt(h) in every step,
    always the same way, with s smaller by sqrt((1 - beta)/(1 + beta)). The ratio has
    neither s nor epsilon in it.

    Parameters
    ----------
    n, f, d, kappa
        See the package.
    memory : float
        K = T (1 - beta)/(1 + beta).
    """
    check_positive(memory=memory, kappa=kappa)
    h = count_honest(n, f, d, 0.0, 0.0, kappa)
    widest = math.sqrt(h) + math.sqrt(d) + 3.6
    return math.sqrt(h * d / (kappa * memory)) / widest
