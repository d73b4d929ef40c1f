"""Other ways to SMEA's answer, and what one call of each costs.

Each looks at every subset, so a call may take years. `price` then times the rival's own
code on a sample of the subsets and multiplies by their number.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec, module_from_spec
from itertools import combinations, count, islice
from types import ModuleType, SimpleNamespace
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from simulations.benchmarks.families import Vectors
from simulations.benchmarks.measure import worked

Subset = tuple[int, ...]
# Vectors, f, and the subsets to look at instead of all; returns the mean, (d,).
Rival = Callable[[Vectors, int, list[Subset] | None], NDArray[np.floating]]

# Subsets whose eigenvalues brute force asks for at once.
BATCH = 2048
# From so many coordinates on ByzFL is faster on torch tensors than on numpy arrays.
TENSOR_COORDINATES = 1000
# A sample has so many subsets, between the bounds as the seconds allow.
SAMPLE, SAMPLE_SECONDS = (16, 400), 0.15


@dataclass(frozen=True)
class Price:
    """What one call costs.

    Attributes
    ----------
    seconds : float
    extrapolated : bool
        From a sample of the subsets.
    found : bool or None
        Whether it answered with the mean of the best subset; None where only sampled.
    """

    seconds: float
    extrapolated: bool
    found: bool | None


def price(
    rival: Rival,
    vectors: Vectors,
    f: int,
    best: Subset,
    limit: float,
    rng: np.random.Generator,
) -> Price:
    """Time one call, or a sample of its work if it would take more than `limit`.

    The best subset is the first of the sample: a rival that does more work whenever it
    finds a better one then does it once, about as often as in a whole call.

    Parameters
    ----------
    rival : Rival
    vectors : (n, d) array
    f : int
    best : tuple of int
        The subset of size n - f with the smallest top eigenvalue.
    limit : float
        Seconds.
    rng : Generator
        For the sample.
    """
    n, total = len(vectors), math.comb(len(vectors), f)
    least, most = (min(total, size) for size in SAMPLE)
    sample = [best]
    while len(sample) < most:
        sample.append(tuple(np.sort(rng.permutation(n)[: n - f]).tolist()))
    rival(vectors, f, sample[:1])  # loads what a library loads late
    # A moment of the machine may slow one of these down, and not all.
    once = min(worked(lambda: rival(vectors, f, sample[:1]))[0] for _ in range(3))
    pilot, _ = worked(lambda: rival(vectors, f, sample[:least]))
    size = min(most, max(least, int(SAMPLE_SECONDS / pilot * least)))
    seconds, _ = worked(lambda: rival(vectors, f, sample[:size]))
    # Whole calls only where they are short even if no part of the sample's time was
    # spent on more than its subsets: another moment must not make hours of them.
    if seconds / size * total > limit:
        more = seconds - once if seconds > once else seconds
        estimate = once + more / (size - 1) * (total - 1)
        return Price(estimate, extrapolated=True, found=None)
    seconds, answer = worked(lambda: rival(vectors, f, None))
    return Price(seconds, extrapolated=False, found=same(answer, vectors, best))


def same(answer: NDArray[np.floating], vectors: Vectors, subset: Subset) -> bool:
    """Say whether an answer is the mean of a subset, up to float32.

    Another subset moves the mean by more than a hundredth of the spread; equal vectors
    make subsets with the same mean, and any of them will do.
    """
    mean = vectors[list(subset)].mean(axis=0, dtype=np.float64)
    return bool(np.abs(answer - mean).max() <= 1e-4 * np.abs(vectors).max())


def brute_force(
    vectors: Vectors, f: int, subsets: list[Subset] | None = None
) -> NDArray[np.floating]:
    """Average the best subset by the eigenvalues of all of them, from Gram matrices."""
    wide = vectors.astype(np.float64)
    gram = wide @ wide.T
    n = len(vectors)
    least, best = math.inf, np.arange(n - f)
    remaining = iter(combinations(range(n), n - f) if subsets is None else subsets)
    while batch := list(islice(remaining, BATCH)):
        members = np.array(batch)
        block = gram[members[:, :, None], members[:, None, :]]
        rows, columns = block.mean(-1, keepdims=True), block.mean(-2, keepdims=True)
        centred = block - rows - columns + rows.mean(-2, keepdims=True)
        values = np.linalg.eigvalsh(centred)[:, -1]
        if values.min() < least:
            least, best = float(values.min()), members[values.argmin()]
    mean: NDArray[np.floating] = wide[best].mean(axis=0)
    return mean


def rivals() -> dict[str, Rival]:
    """Return what is installed, by name; brute force is always there."""
    found: dict[str, Rival] = {"brute force": brute_force}
    for name, load in (("ByzFL", _byzfl), ("ByzPy", _byzpy)):
        if find_spec(name.lower()) is not None:
            found[name] = load()
    return found


def _byzfl() -> Rival:
    """Return ByzFL's SMEA: one step of a power iteration for each subset."""
    # Its __init__ imports data sets and plots (torchvision, seaborn), which the
    # aggregators do without: take the package as a place to import them from.
    spec = find_spec("byzfl")
    assert spec is not None
    sys.modules.setdefault("byzfl", module_from_spec(spec))
    module = importlib.import_module("byzfl.aggregators.aggregators")
    torch = _torch()
    seeds = count()

    def byzfl(
        vectors: Vectors, f: int, subsets: list[Subset] | None
    ) -> NDArray[np.floating]:
        tensors = vectors.shape[1] >= TENSOR_COORDINATES
        given = torch.from_numpy(vectors) if tensors else vectors
        if subsets is None:
            # It draws from the global generators: its answers should be repeatable.
            seed = next(seeds)
            np.random.seed(seed)  # noqa: NPY002
            torch.manual_seed(seed)
            return np.asarray(module.SMEA(f)(given))
        with patch.object(module, "itertools", _only(subsets)):
            return np.asarray(module.SMEA(f)(given))

    return byzfl


def _byzpy() -> Rival:
    """Return ByzPy's SMEA: an eigenvalue problem on the Gram matrix for each subset."""
    module = importlib.import_module("byzpy.aggregators.geometric_wise.smea")
    torch = _torch()

    def byzpy(
        vectors: Vectors, f: int, subsets: list[Subset] | None
    ) -> NDArray[np.floating]:
        given = list(torch.from_numpy(vectors))
        if subsets is None:
            return np.asarray(module.SMEA(f).aggregate(given))
        with patch.object(module, "combinations", _only(subsets).combinations):
            return np.asarray(module.SMEA(f).aggregate(given))

    return byzpy


def _torch() -> ModuleType:
    torch = importlib.import_module("torch")
    torch.set_num_threads(1)
    return torch


def _only(subsets: Iterable[Subset]) -> SimpleNamespace:
    """Stand in for itertools with a sample for all combinations."""
    return SimpleNamespace(combinations=lambda *_: iter(subsets))
