"""The theory as functions: what a rule, a budget and a schedule are proved to give.

Symbols are those of Allouah, Guerraoui, Gupta, Pinot, Stephan: "On the
Privacy-Robustness-Utility Trilemma in Distributed Learning", ICML 2023, "the paper".
"""

from flwr_safedshb.theory.convergence import (
    Bound,
    NonConvex,
    StronglyConvex,
    batch_variance,
    effective_variance,
    non_convex_bound,
    strongly_convex_bound,
)
from flwr_safedshb.theory.robustness import (
    check_num_malicious,
    filter_eta,
    kappa_filter,
    kappa_geometric_median,
    kappa_krum,
    kappa_lower_bound,
    kappa_median,
    kappa_nnm,
    kappa_smea,
    kappa_smea_paper,
    kappa_trimmed_mean,
)
from flwr_safedshb.theory.spread import heterogeneity, noise_spread, spectral_factor
from flwr_safedshb.theory.trilemma import (
    Trilemma,
    closed_form_noise_std,
    kappa_lb,
    lower_bound,
    lower_bound_violations,
    mean_estimation_bound,
    robustness_lower_bound,
)

__all__ = [
    "Bound",
    "NonConvex",
    "StronglyConvex",
    "Trilemma",
    "batch_variance",
    "check_num_malicious",
    "closed_form_noise_std",
    "effective_variance",
    "filter_eta",
    "heterogeneity",
    "kappa_filter",
    "kappa_geometric_median",
    "kappa_krum",
    "kappa_lb",
    "kappa_lower_bound",
    "kappa_median",
    "kappa_nnm",
    "kappa_smea",
    "kappa_smea_paper",
    "kappa_trimmed_mean",
    "lower_bound",
    "lower_bound_violations",
    "mean_estimation_bound",
    "noise_spread",
    "non_convex_bound",
    "robustness_lower_bound",
    "spectral_factor",
    "strongly_convex_bound",
]
