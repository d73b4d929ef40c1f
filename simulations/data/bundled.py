"""Data that need neither network nor files: synthetic, or part of scikit-learn.

Features are scaled by constants that are written here and known beforehand. Means and
deviations of the examples would be statistics of private data, released without noise.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simulations.config import check_numbers
from simulations.data.table import Table

# The lower and upper ends of what is measured of cell nuclei: radius, texture,
# perimeter, area, smoothness, compactness, concavity, concave points, symmetry and
# fractal dimension. Round numbers near the ranges in the data's published description
# (Street, Wolberg, Mangasarian 1993), which are taken to be public knowledge.
_MEAN = (
    (5, 5, 40, 100, 0.05, 0, 0, 0, 0.1, 0.05),
    (30, 40, 200, 2500, 0.2, 0.4, 0.5, 0.2, 0.3, 0.1),
)
_STANDARD_ERROR = (
    (0, 0, 0, 0, 0, 0, 0, 0, 0, 0),
    (3, 5, 20, 500, 0.03, 0.15, 0.4, 0.05, 0.08, 0.03),
)
_WORST = (
    (5, 10, 50, 150, 0.05, 0, 0, 0, 0.15, 0.05),
    (40, 50, 250, 4500, 0.25, 1, 1.25, 0.3, 0.65, 0.2),
)
_RANGES = np.hstack([_MEAN, _STANDARD_ERROR, _WORST])


@dataclass(frozen=True)
class Synthetic:
    """Gaussian unit vectors, labelled by a random hyperplane, one in ten wrongly."""

    num_examples: int
    num_features: int
    seed: int
    test_fraction: float

    def __post_init__(self) -> None:
        check_numbers(self, {"num_examples": 1, "num_features": 1, "seed": 0})

    def load(self) -> Table:
        """Return inputs of shape (m, d), in two classes."""
        rng = np.random.default_rng(self.seed)
        features = rng.normal(size=(self.num_examples, self.num_features))
        features /= np.linalg.norm(features, axis=1, keepdims=True)
        labels = features @ rng.normal(size=self.num_features) > 0
        labels ^= rng.random(self.num_examples) < 0.1
        return Table(
            features.astype(np.float32), labels.astype(np.int64), 2, self.test_fraction
        )


@dataclass(frozen=True)
class BreastCancer:
    """Tumours, malignant (0) or benign (1), by 30 measures of their cell nuclei.

    Each measure is placed in its public range, as a share of it; its square root, for
    most are skewed to the right; and moved to [-1, 1].
    """

    test_fraction: float

    def load(self) -> Table:
        """Return inputs of shape (569, 30), in two classes."""
        from sklearn.datasets import load_breast_cancer

        measures, labels = load_breast_cancer(return_X_y=True)
        low, high = _RANGES
        shares = np.clip((measures - low) / (high - low), 0, 1)
        inputs = (2 * np.sqrt(shares) - 1).astype(np.float32)
        return Table(inputs, labels.astype(np.int64), 2, self.test_fraction)


@dataclass(frozen=True)
class Digits:
    """Handwritten digits; pixels, from 0 to 16 by their format, are moved to [0, 1]."""

    test_fraction: float

    def load(self) -> Table:
        """Return inputs of shape (1797, 1, 8, 8), in ten classes."""
        from sklearn.datasets import load_digits

        pixels, labels = load_digits(return_X_y=True)
        inputs = (pixels / 16).astype(np.float32).reshape(-1, 1, 8, 8)
        return Table(inputs, labels.astype(np.int64), 10, self.test_fraction)


@dataclass(frozen=True)
class FLChain:
    """Patients of Olmsted County, dead (1) within ten years or not (0), by blood tests.

    FLCHAIN (Dispenzieri et al. 2012): age, sex, kappa and lambda free light chains,
    creatinine and whether it was measured, monoclonal gammopathy; and the products of
    any two of these. Logarithms of what is skewed, scaled by round numbers. Patients
    who were alive when they were last seen, before ten years, are left out.
    """

    test_fraction: float

    def load(self) -> Table:
        """Return inputs of shape (6834, 35), in two classes."""
        try:
            from sksurv.datasets import load_flchain
        except ImportError as error:
            raise ImportError(
                "data=flchain needs scikit-survival, which ships it: pip install "
                "flwr-safedshb[medical]"
            ) from error

        patients, outcomes = load_flchain()
        years = outcomes["futime"] / 365.25
        known = outcomes["death"] | (years >= 10.0)
        measured = patients["creatinine"].notna()
        measures = np.column_stack(
            [
                (patients["age"].astype(float) - 65.0) / 15.0,
                np.where(patients["sex"] == "M", 1.0, -1.0),
                np.log(patients["kappa"].astype(float)),
                np.log(np.maximum(patients["lambda"].astype(float), 0.04)),
                np.log(patients["creatinine"].astype(float).fillna(1.0)),
                ~measured,
                patients["mgus"] == "yes",
            ]
        )
        measures = np.clip(measures, -2.0, 2.5)
        first, second = np.triu_indices(measures.shape[1])
        inputs = np.hstack([measures, measures[:, first] * measures[:, second]])
        inputs /= np.sqrt(inputs.shape[1])
        labels = outcomes["death"] & (years <= 10.0)
        return Table(
            inputs[known].astype(np.float32),
            labels[known].astype(np.int64),
            2,
            self.test_fraction,
        )
