"""The theory as functions: what a rule, a budget and a schedule are proved to give.

Symbols are those of Allouah, Guerraoui, Gupta, Pinot, Stephan: "On the
Privacy-Robustness-Utility Trilemma in Distributed Learning", ICML 2023, "the paper".

Notation
--------
n, f, h
    Clients, adversaries among them, and the honest clients n - f.
m, b, d
    Examples of a client, batch size, parameters of the model (the dimension).
clip_norm, steps, momentum, learning_rate
    C, T, beta and gamma.
epsilon, delta
    The privacy of a client's releases.
smoothness, strong_convexity, initial_gap
    L; mu, of strong convexity or of the PL inequality, at most L; and
    L0 = L(theta_0) - L*, or a bound on it.
kappa
    The constant of the rule, spectral unless it says variance (`robustness`).
heterogeneity
    Gcov: Gcov^2 is the largest eigenvalue of the covariance of the honest clients'
    gradients, over all models. G, of its trace, is no smaller and will do, too.
gradient_std, batch_variance
    sigma: sigma^2 bounds the mean squared distance of single examples' gradients from
    their client's (C will do where they are clipped at C); and sigma_b^2, that of a
    batch's mean from its client's.
noise_std
    s or sigma_DP, of the noise in every coordinate.
effective_variance
    sbar^2, what all of these together do to a step (`effective_variance`).
"""

# ruff: noqa: I001  # one import a module, where isort would have one a name

from flwr_safedshb.theory.convergence import (
    Bound as Bound,
    NonConvex as NonConvex,
    StronglyConvex as StronglyConvex,
    non_convex_bound as non_convex_bound,
    non_convex_bound_paper as non_convex_bound_paper,
    strongly_convex_bound as strongly_convex_bound,
    strongly_convex_bound_paper as strongly_convex_bound_paper,
)
from flwr_safedshb.theory.filtering import (
    filter_certificate as filter_certificate,
    filter_eta as filter_eta,
    filter_eta_paper as filter_eta_paper,
    kappa_filter as kappa_filter,
    kappa_filter_agnostic as kappa_filter_agnostic,
    kappa_filter_paper as kappa_filter_paper,
)
from flwr_safedshb.theory.resilience import (
    Verdict as Verdict,
    attack_ratios as attack_ratios,
    compare_with_alone as compare_with_alone,
    mean_estimation_bound as mean_estimation_bound,
    predict_withstanding as predict_withstanding,
    push_radius as push_radius,
    stopping_radius as stopping_radius,
)
from flwr_safedshb.theory.robustness import (
    check_num_malicious as check_num_malicious,
    kappa_geometric_median as kappa_geometric_median,
    kappa_krum as kappa_krum,
    kappa_lower_bound as kappa_lower_bound,
    kappa_median as kappa_median,
    kappa_nnm as kappa_nnm,
    kappa_smea as kappa_smea,
    kappa_smea_paper as kappa_smea_paper,
    kappa_spectral as kappa_spectral,
    kappa_trimmed_mean as kappa_trimmed_mean,
    spectral_factor as spectral_factor,
)
from flwr_safedshb.theory.trilemma import (
    MeanEstimation as MeanEstimation,
    Term as Term,
    Trilemma as Trilemma,
    closed_form_noise_std as closed_form_noise_std,
    error_cap as error_cap,
    joint_lower_bound as joint_lower_bound,
    kappa_lb as kappa_lb,
    lower_bound as lower_bound,
    lower_bound_violations as lower_bound_violations,
    non_convex_corollary as non_convex_corollary,
    privacy_lower_bound as privacy_lower_bound,
    robustness_lower_bound as robustness_lower_bound,
    strongly_convex_corollary as strongly_convex_corollary,
    term_violations as term_violations,
)
from flwr_safedshb.theory.variance import (
    batch_variance as batch_variance,
    batch_variance_paper as batch_variance_paper,
    drift_bounds as drift_bounds,
    effective_variance as effective_variance,
    effective_variance_paper as effective_variance_paper,
    heterogeneity as heterogeneity,
    heterogeneity_estimate as heterogeneity_estimate,
    noise_in_momentum as noise_in_momentum,
    noise_spread as noise_spread,
)
