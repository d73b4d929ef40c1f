"""What a schedule of the convergence theorem needs to know, taken from a simulation.

**L, the initial gap and sbar are functions of the data here.** A simulation may look at
them; the server of a real federation cannot, and must be given public bounds, such as
L = R^2/4 + lambda for logistic regression on inputs (with their constant 1) of norm at
most R.
"""

from __future__ import annotations

import math

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import nn

from flwr_safedshb.aggregation import Rule
from flwr_safedshb.algorithm.schedules import Rates
from flwr_safedshb.theory import batch_variance, effective_variance
from simulations.data import Federation
from simulations.models import LogisticRegression, training_loss
from simulations.plans import make_plans


def make_schedule(
    cfg: DictConfig, data: Federation, model: nn.Module, rule: Rule
) -> Rates:
    """Return the schedule of a configuration; what it leaves at null is estimated."""
    estimates = {
        "smoothness": lambda: logistic_smoothness(data, model, cfg.weight_decay),
        "initial_gap": lambda: training_loss(
            model, data.training, data.sizes, cfg.weight_decay
        ),
        "effective_std": lambda: effective_std(cfg, data, model, rule),
    }
    unknown = [str(name) for name, value in cfg.schedule.items() if value is None]
    for name in unknown:
        if name not in estimates:
            raise ValueError(f"schedule.{name}=null is not estimated; give it")
    rates: Rates = instantiate(
        cfg.schedule, **{name: estimates[name]() for name in unknown}
    )
    return rates


def logistic_smoothness(
    data: Federation, model: nn.Module, weight_decay: float
) -> float:
    """Return L = lambda_max(X^T X)/(4 m) + lambda, with a column of ones in X.

    The Hessian of an example's loss is p (1-p) x x^T, at most x x^T/4. The average is
    that of the nodes' own averages, as in the loss that they minimise together.
    """
    if not isinstance(model, LogisticRegression) or data.num_classes != 2:
        raise ValueError(
            f"schedule.smoothness=null is estimated for logistic regression of two "
            f"classes only, got {type(model).__name__} and {data.num_classes}; give it"
        )
    size = math.prod(data.input_shape) + 1
    hessian = torch.zeros(size, size, dtype=torch.float64)
    for inputs, _ in data.shards:
        rows = inputs.flatten(1).double()
        rows = torch.cat([rows, torch.ones(len(rows), 1, dtype=torch.float64)], dim=1)
        hessian += rows.T @ rows / (4 * len(rows) * len(data.shards))
    return float(torch.linalg.eigvalsh(hessian)[-1]) + weight_decay


def effective_std(
    cfg: DictConfig, data: Federation, model: nn.Module, rule: Rule
) -> float:
    """Return sbar; gradients clipped at C have a variance of C^2 at most."""
    n, f = cfg.num_nodes, cfg.num_malicious_nodes
    kappa = 0.0 if f == 0 else rule.kappa(n, f)
    if kappa is None or (f > 0 and rule.kappa_kind != "spectral"):
        raise ValueError(
            f"schedule.effective_std=null needs a rule with a spectral kappa, got "
            f"{rule}; use aggregation=smea or give it"
        )
    plan = make_plans(cfg, min(data.sizes)).training
    sampling = batch_variance(plan.clip_norm, plan.batch_size, max(data.sizes))
    d = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return math.sqrt(effective_variance(n, f, d, sampling, plan.noise_std, kappa))
