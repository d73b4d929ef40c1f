"""Attacks: honest vectors go in, what f adversaries send comes out."""

from flwr_safedshb.attacks.base import Aggregate, Attack
from flwr_safedshb.attacks.collusion import (
    Drift,
    MimicShift,
    SignFar,
    Strongest,
    Target,
)
from flwr_safedshb.attacks.label_flip import LabelFlip
from flwr_safedshb.attacks.optimized import (
    ALIE,
    FOE,
    TAUS,
    SearchedAttack,
    damage_by_tau,
    most_damaging_tau,
)
from flwr_safedshb.attacks.planner import PushPlanner
from flwr_safedshb.attacks.simple import (
    FarCluster,
    Gaussian,
    HugeNorm,
    NonFinite,
    SignFlip,
    Zero,
)
from flwr_safedshb.attacks.stealth import Mimic, MinMax, MinSum

__all__ = [
    "ALIE",
    "FOE",
    "TAUS",
    "Aggregate",
    "Attack",
    "Drift",
    "FarCluster",
    "Gaussian",
    "HugeNorm",
    "LabelFlip",
    "Mimic",
    "MimicShift",
    "MinMax",
    "MinSum",
    "NonFinite",
    "PushPlanner",
    "SearchedAttack",
    "SignFar",
    "SignFlip",
    "Strongest",
    "Target",
    "Zero",
    "damage_by_tau",
    "most_damaging_tau",
]
