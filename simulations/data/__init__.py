"""Data for simulations: where they come from, and who holds what."""

from simulations.data.bundled import BreastCancer, Digits, FLChain, Synthetic
from simulations.data.federation import (
    Examples,
    Federation,
    Overlap,
    flip_labels,
    hash_data,
    split_data,
)
from simulations.data.files import FashionMNIST, Libsvm
from simulations.data.phishing import Phishing
from simulations.data.splits import ByLabel, Dirichlet, Iid, Split, Unequal
from simulations.data.table import Source, Table

__all__ = [
    "BreastCancer",
    "ByLabel",
    "Digits",
    "Dirichlet",
    "Examples",
    "FLChain",
    "FashionMNIST",
    "Federation",
    "Iid",
    "Libsvm",
    "Overlap",
    "Phishing",
    "Source",
    "Split",
    "Synthetic",
    "Table",
    "Unequal",
    "flip_labels",
    "hash_data",
    "split_data",
]
