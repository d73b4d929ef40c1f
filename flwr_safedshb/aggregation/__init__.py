"""Aggregation rules: f of n vectors may be hostile, one vector comes out."""

from flwr_safedshb.aggregation.baselines import (
    Average,
    CentredClipping,
    GeometricMedian,
    Krum,
    MultiKrum,
)
from flwr_safedshb.aggregation.coordinatewise import (
    CoordinatewiseRule,
    Median,
    TrimmedMean,
)
from flwr_safedshb.aggregation.filter import CAF, Filter
from flwr_safedshb.aggregation.gram import GramRule
from flwr_safedshb.aggregation.mda import MDA
from flwr_safedshb.aggregation.peers import (
    CGE,
    Bulyan,
    DnC,
    Meamed,
    MoNNA,
    SignGuard,
)
from flwr_safedshb.aggregation.preaggregation import (
    ARC,
    NNM,
    Bucketing,
    StaticClipping,
)
from flwr_safedshb.aggregation.rule import Rule, Weighing
from flwr_safedshb.aggregation.smea.rule import SMEA

__all__ = [
    "ARC",
    "CAF",
    "CGE",
    "MDA",
    "NNM",
    "SMEA",
    "Average",
    "Bucketing",
    "Bulyan",
    "CentredClipping",
    "CoordinatewiseRule",
    "DnC",
    "Filter",
    "GeometricMedian",
    "GramRule",
    "Krum",
    "Meamed",
    "Median",
    "MoNNA",
    "MultiKrum",
    "Rule",
    "SignGuard",
    "StaticClipping",
    "TrimmedMean",
    "Weighing",
]
