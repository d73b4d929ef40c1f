"""Attacks: honest vectors go in, what f adversaries send comes out."""

from flwr_safedshb.attacks.base import Aggregate, Attack
from flwr_safedshb.attacks.colluding import Drift, MimicShift, Strongest
from flwr_safedshb.attacks.data import LabelFlip
from flwr_safedshb.attacks.hidden import Mimic, MinMax, MinSum
from flwr_safedshb.attacks.plain import (
    FarCluster,
    Gaussian,
    HugeNorm,
    NonFinite,
    SignFlip,
    Zero,
)
from flwr_safedshb.attacks.searched import (
    ALIE,
    FOE,
    TAUS,
    SearchedAttack,
    harms,
    most_harmful_tau,
)

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
    "SearchedAttack",
    "SignFlip",
    "Strongest",
    "Zero",
    "harms",
    "most_harmful_tau",
]
