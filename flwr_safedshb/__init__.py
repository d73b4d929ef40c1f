"""Safe-DSHB for Flower: private against the server, robust against f of n clients.

Public names are loaded when they are first used, so that a server that only aggregates
does not wait for torch, and a client not for numba.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flwr_safedshb.aggregation import CAF as CAF
    from flwr_safedshb.aggregation import MDA as MDA
    from flwr_safedshb.aggregation import NNM as NNM
    from flwr_safedshb.aggregation import SMEA as SMEA
    from flwr_safedshb.aggregation import Average as Average
    from flwr_safedshb.aggregation import Filter as Filter
    from flwr_safedshb.aggregation import GeometricMedian as GeometricMedian
    from flwr_safedshb.aggregation import Krum as Krum
    from flwr_safedshb.aggregation import Median as Median
    from flwr_safedshb.aggregation import MultiKrum as MultiKrum
    from flwr_safedshb.aggregation import TrimmedMean as TrimmedMean
    from flwr_safedshb.aggregation import Weighing as Weighing
    from flwr_safedshb.attacks import ALIE as ALIE
    from flwr_safedshb.attacks import FOE as FOE
    from flwr_safedshb.attacks import FarCluster as FarCluster
    from flwr_safedshb.attacks import Gaussian as Gaussian
    from flwr_safedshb.attacks import HugeNorm as HugeNorm
    from flwr_safedshb.attacks import LabelFlip as LabelFlip
    from flwr_safedshb.attacks import Mimic as Mimic
    from flwr_safedshb.attacks import MinMax as MinMax
    from flwr_safedshb.attacks import MinSum as MinSum
    from flwr_safedshb.attacks import NonFinite as NonFinite
    from flwr_safedshb.attacks import SignFlip as SignFlip
    from flwr_safedshb.attacks import Zero as Zero
    from flwr_safedshb.client.client import SafeDSHBClient as SafeDSHBClient
    from flwr_safedshb.client.client import client_app as client_app
    from flwr_safedshb.grids.batched import BatchedGrid as BatchedGrid
    from flwr_safedshb.grids.in_process import AdversarialGrid as AdversarialGrid
    from flwr_safedshb.grids.in_process import InProcessGrid as InProcessGrid
    from flwr_safedshb.privacy.clipping.gradients import (
        ClippedGradients as ClippedGradients,
    )
    from flwr_safedshb.privacy.clipping.gradients import check_model as check_model
    from flwr_safedshb.privacy.gaussian import private_gradient as private_gradient
    from flwr_safedshb.privacy.ledger.ledger import BudgetExhausted as BudgetExhausted
    from flwr_safedshb.privacy.ledger.ledger import Ledger as Ledger
    from flwr_safedshb.privacy.plan import PrivacyPlan as PrivacyPlan
    from flwr_safedshb.privacy.plan import PrivacyStatement as PrivacyStatement
    from flwr_safedshb.privacy.policy import NodePolicy as NodePolicy
    from flwr_safedshb.privacy.policy import PolicyViolation as PolicyViolation
    from flwr_safedshb.privacy.randomness.noise import (
        SecureRandomness as SecureRandomness,
    )
    from flwr_safedshb.privacy.randomness.noise import (
        SeededRandomness as SeededRandomness,
    )
    from flwr_safedshb.server.strategy import SafeDSHB as SafeDSHB

_HOMES = {
    "flwr_safedshb.aggregation": (
        "CAF",
        "MDA",
        "NNM",
        "SMEA",
        "Average",
        "Filter",
        "GeometricMedian",
        "Krum",
        "Median",
        "MultiKrum",
        "TrimmedMean",
        "Weighing",
    ),
    "flwr_safedshb.attacks": (
        "ALIE",
        "FOE",
        "FarCluster",
        "Gaussian",
        "HugeNorm",
        "LabelFlip",
        "Mimic",
        "MinMax",
        "MinSum",
        "NonFinite",
        "SignFlip",
        "Zero",
    ),
    "flwr_safedshb.grids.batched": ("BatchedGrid",),
    "flwr_safedshb.client.client": (
        "SafeDSHBClient",
        "client_app",
    ),
    "flwr_safedshb.grids.in_process": (
        "AdversarialGrid",
        "InProcessGrid",
    ),
    "flwr_safedshb.server.strategy": ("SafeDSHB",),
    "flwr_safedshb.privacy.clipping.gradients": (
        "ClippedGradients",
        "check_model",
    ),
    "flwr_safedshb.privacy.ledger.ledger": (
        "BudgetExhausted",
        "Ledger",
    ),
    "flwr_safedshb.privacy.gaussian": ("private_gradient",),
    "flwr_safedshb.privacy.randomness.noise": (
        "SecureRandomness",
        "SeededRandomness",
    ),
    "flwr_safedshb.privacy.plan": (
        "PrivacyPlan",
        "PrivacyStatement",
    ),
    "flwr_safedshb.privacy.policy": (
        "NodePolicy",
        "PolicyViolation",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
