"""Binary classification data for simulations: where it comes from, who holds what."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

Examples = tuple[torch.Tensor, torch.Tensor]


class Source(Hashable, Protocol):
    """A dataset; equal sources hold equal data."""

    @property
    def test_fraction(self) -> float:
        """Share of the examples kept for testing; with 0 all train and all test."""
        ...

    def load(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return features, (m, d), and labels 0 or 1, (m,)."""
        ...


@dataclass(frozen=True)
class Synthetic:
    """Gaussian unit vectors, labelled by a random hyperplane, one in ten wrongly."""

    num_examples: int
    num_features: int
    seed: int
    test_fraction: float

    def load(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return features, (m, d), and labels, (m,)."""
        rng = np.random.default_rng(self.seed)
        features = rng.normal(size=(self.num_examples, self.num_features))
        features /= np.linalg.norm(features, axis=1, keepdims=True)
        labels = features @ rng.normal(size=self.num_features) > 0
        labels ^= rng.random(self.num_examples) < 0.1
        return features.astype(np.float32), labels.astype(np.float32)


@dataclass(frozen=True)
class BreastCancer:
    """The breast cancer data that come with scikit-learn, standardised."""

    test_fraction: float

    def load(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return features, (569, 30), and labels, (569,)."""
        from sklearn.datasets import load_breast_cancer

        features, labels = load_breast_cancer(return_X_y=True)
        features = (features - features.mean(axis=0)) / features.std(axis=0)
        return features.astype(np.float32), labels.astype(np.float32)


@dataclass(frozen=True)
class Phishing:
    """LIBSVM's phishing data, from a local file."""

    path: str
    test_fraction: float

    def load(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return features, (11055, 68), and labels, (11055,)."""
        from sklearn.datasets import load_svmlight_file

        if not Path(self.path).is_file():
            raise FileNotFoundError(
                f"data.path={self.path!r} is not there; give the path of the file "
                "'phishing' of the LIBSVM data page, or its folder as SAFEDSHB_DATA"
            )
        features, labels = load_svmlight_file(self.path, n_features=68)
        return features.toarray().astype(np.float32), labels.astype(np.float32)


@lru_cache(maxsize=4)
def _shuffled(source: Source, seed: int) -> tuple[Examples, Examples]:
    """Return training and test examples, in a random order."""
    features, labels = source.load()
    order = np.random.default_rng(seed).permutation(len(labels))
    inputs = torch.from_numpy(features[order])
    targets = torch.from_numpy(labels[order])
    tested = int(len(order) * source.test_fraction)
    if tested == 0:
        return (inputs, targets), (inputs, targets)
    training = inputs[tested:], targets[tested:]
    return training, (inputs[:tested], targets[:tested])


def num_features(source: Source) -> int:
    """Return the number of features (d without the bias)."""
    return _shuffled(source, 0)[0][0].shape[1]


def partition(source: Source, index: int, count: int, seed: int) -> Examples:
    """Return part `index` of `count` equal parts, drawn at random (iid)."""
    if not 0 <= index < count:
        raise ValueError(f"index={index} must lie in [0, count={count})")
    inputs, targets = _shuffled(source, seed)[0]
    size = len(targets) // count
    part = slice(index * size, (index + 1) * size)
    return inputs[part], targets[part]


def test_set(source: Source, seed: int) -> Examples:
    """Return the examples kept for testing."""
    return _shuffled(source, seed)[1]
