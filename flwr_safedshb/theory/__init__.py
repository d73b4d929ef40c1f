"""The theory as functions: what a rule, a budget and a schedule are proved to give.

Symbols are those of Allouah, Guerraoui, Gupta, Pinot, Stephan: "On the
Privacy-Robustness-Utility Trilemma in Distributed Learning", ICML 2023, "the paper".
"""

from flwr_safedshb.theory.convergence import (
    Bound,
    non_convex_bound,
    non_convex_bound_paper,
    strongly_convex_bound,
    strongly_convex_bound_paper,
)
from flwr_safedshb.theory.filtering import (
    filter_certificate,
    filter_eta,
    filter_eta_paper,
    kappa_filter,
    kappa_filter_agnostic,
    kappa_filter_paper,
)
from flwr_safedshb.theory.lower import (
    error_cap,
    joint_lower_bound,
    kappa_lb,
    lower_bound,
    lower_bound_violations,
    privacy_lower_bound,
    robustness_lower_bound,
    term_violations,
)
from flwr_safedshb.theory.resilience import swing, withstands
from flwr_safedshb.theory.robustness import (
    check_num_malicious,
    kappa_geometric_median,
    kappa_krum,
    kappa_lower_bound,
    kappa_median,
    kappa_nnm,
    kappa_smea,
    kappa_smea_paper,
    kappa_spectral,
    kappa_trimmed_mean,
)
from flwr_safedshb.theory.schedules import NonConvex, StronglyConvex
from flwr_safedshb.theory.spread import (
    heterogeneity,
    heterogeneity_estimate,
    noise_in_momentum,
    noise_spread,
    spectral_factor,
)
from flwr_safedshb.theory.trilemma import Term, Trilemma
from flwr_safedshb.theory.upper import (
    closed_form_noise_std,
    corollary_violations,
    mean_estimation_bound,
    non_convex_corollary,
    stopping_radius,
    strongly_convex_corollary,
)
from flwr_safedshb.theory.variance import (
    batch_variance,
    batch_variance_paper,
    drift_bounds,
    effective_variance,
    effective_variance_paper,
)

__all__ = [
    "Bound",
    "NonConvex",
    "StronglyConvex",
    "Term",
    "Trilemma",
    "batch_variance",
    "batch_variance_paper",
    "check_num_malicious",
    "closed_form_noise_std",
    "corollary_violations",
    "drift_bounds",
    "effective_variance",
    "effective_variance_paper",
    "error_cap",
    "filter_certificate",
    "filter_eta",
    "filter_eta_paper",
    "heterogeneity",
    "heterogeneity_estimate",
    "joint_lower_bound",
    "kappa_filter",
    "kappa_filter_agnostic",
    "kappa_filter_paper",
    "kappa_geometric_median",
    "kappa_krum",
    "kappa_lb",
    "kappa_lower_bound",
    "kappa_median",
    "kappa_nnm",
    "kappa_smea",
    "kappa_smea_paper",
    "kappa_spectral",
    "kappa_trimmed_mean",
    "lower_bound",
    "lower_bound_violations",
    "mean_estimation_bound",
    "noise_in_momentum",
    "noise_spread",
    "non_convex_bound",
    "non_convex_bound_paper",
    "non_convex_corollary",
    "privacy_lower_bound",
    "robustness_lower_bound",
    "spectral_factor",
    "stopping_radius",
    "strongly_convex_bound",
    "strongly_convex_bound_paper",
    "strongly_convex_corollary",
    "swing",
    "term_violations",
    "withstands",
]
