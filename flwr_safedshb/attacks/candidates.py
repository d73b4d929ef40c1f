"""Many things that f adversaries could send, and the damage that each would do.

What an adversary sends is a combination of a few vectors, the *basis*: the honest
vectors about their mean, and whatever directions an attack has. A rule that needs inner
products only then answers for thousands of candidates from one Gram matrix, that of the
basis: no vector is formed, let alone aggregated.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeGuard

import numpy as np

from flwr_safedshb.aggregation import NNM, CoordinatewiseRule, GramRule
from flwr_safedshb.aggregation.rule import FloatArray
from flwr_safedshb.attacks.base import Aggregate

# What is made at a time: values of Gram matrices, of which rules make many times more,
# few enough for a processor's cache; and values of vectors.
_PRODUCTS, _LEAST = 2**12, 32
_VALUES = 2**18

# Damages that differ by less than this fraction, or by round-off, are a tie.
RESOLUTION = 1e-9
ROUND_OFF = 64 * float(np.finfo(np.float64).eps)


@dataclass(frozen=True)
class Candidates:
    """What each of f adversaries sends, less the honest mean, in each of g candidates.

    Attributes
    ----------
    basis : (r, d) array
        The h honest vectors about their mean, then directions.
    shares : (g, f, r) array
        Candidate k's adversary j sends mean + shares[k, j] @ basis.
    """

    basis: FloatArray
    shares: FloatArray

    def vectors_of(self, k: int, mean: FloatArray) -> FloatArray:
        """Return what the adversaries send in candidate `k`, (f, d)."""
        sent: FloatArray = mean + self.shares[k] @ self.basis
        return sent


def measure_damage(
    honest: FloatArray,
    candidates: Candidates,
    f: int,
    aggregate: Aggregate,
    target: FloatArray | None = None,
) -> FloatArray:
    """Return how far each candidate, (g,), moves the aggregate from the honest mean.

    Parameters
    ----------
    honest : (h, d) array
    candidates : Candidates
        Made from `honest`.
    f : int
    aggregate : Rule, or callable (vectors of shape (n, d), f) -> (d,) array
    target : (d,) array, optional
        Count only the way along this vector; negative if it moves the other way.
    """
    if has_weights(aggregate):
        return _damage_by_weights(len(honest), candidates, f, aggregate, target)
    mean, n = honest.mean(axis=0), len(honest) + f
    found = []
    if isinstance(aggregate, CoordinatewiseRule):
        # To such a rule many candidates are many coordinates.
        part = max(1, _VALUES // (n * len(mean)))
        for start in range(0, len(candidates.shares), part):
            shares = candidates.shares[start : start + part]
            sent = shares @ candidates.basis + mean
            columns = np.vstack((np.tile(honest, len(sent)), np.hstack(sent)))
            moved = aggregate.reduce(columns, f).reshape(len(sent), -1) - mean
            found.append(
                np.linalg.norm(moved, axis=1) if target is None else moved @ target
            )
        return np.concatenate(found)
    for k in range(len(candidates.shares)):
        # Anew for every candidate: a callable may keep or overwrite what it is given.
        vectors = np.concatenate((honest, candidates.vectors_of(k, mean)))
        moved = aggregate(vectors, f) - mean
        found.append(np.linalg.norm(moved) if target is None else moved @ target)
    # An aggregate that is no vector any more is as far away as can be.
    return np.where(np.isnan(found), np.inf, found)


def _damage_by_weights(
    h: int, candidates: Candidates, f: int, rule: GramRule, target: FloatArray | None
) -> FloatArray:
    """Return damages, (g,), by the weights of vectors that are never formed."""
    basis = candidates.basis
    products = basis @ basis.T
    ahead = None if target is None else basis @ target
    part = max(_LEAST, _PRODUCTS // (h + f) ** 2)
    found = []
    for start in range(0, len(candidates.shares), part):
        shares = candidates.shares[start : start + part]
        unmoved = np.broadcast_to(np.eye(h, len(basis)), (len(shares), h, len(basis)))
        rows = np.concatenate((unmoved, shares), axis=1)
        grams = (rows @ products) @ rows.swapaxes(1, 2)
        weights = rule.weigh_many(grams, f)
        # The centred honest vectors sum to zero, so a share that all of them have drops
        # out; taken away first, it leaves exactly zero where the rule returns their
        # mean.
        weights[:, :h] -= weights[:, :1].copy()
        if ahead is None:
            squares = np.einsum("gi,gij,gj->g", weights, grams, weights)
            found.append(np.sqrt(np.maximum(squares, 0.0)))
        else:
            found.append(np.einsum("gi,gi->g", weights, rows @ ahead))
    return np.concatenate(found)


def find_worst(honest: FloatArray, damage: FloatArray) -> int:
    """Return the first candidate that nothing beats by more than `RESOLUTION`."""
    largest = damage.max()
    if np.isfinite(largest):
        # What a sum of the vectors cannot resolve is no damage.
        norm = np.sqrt(np.square(honest).sum(axis=1).max())
        largest -= RESOLUTION * abs(largest) + ROUND_OFF * norm
    return int(np.argmax(damage >= largest))


def has_weights(aggregate: Aggregate) -> TypeGuard[GramRule]:
    """Return True if a rule can answer with weights from a Gram matrix."""
    if isinstance(aggregate, NNM):
        return has_weights(aggregate.rule)
    return isinstance(aggregate, GramRule)


def check_grid(name: str, values: Sequence[float], least: int) -> None:
    """Refuse what is no increasing grid of at least `least` finite numbers."""
    grid = np.asarray(values, dtype=np.float64)
    if grid.ndim != 1 or len(grid) < least or not np.isfinite(grid).all():
        count = {1: "one", 2: "two"}[least]
        raise ValueError(f"{name}={values} must be {count} or more finite numbers")
    if (np.diff(grid) <= 0.0).any():
        raise ValueError(f"{name}={values} must increase; sort it, each value once")


def check_finite(honest: FloatArray) -> None:
    """Refuse honest vectors against which no damage can be measured."""
    if not np.isfinite(honest).all():
        raise ValueError(
            "honest holds NaN or infinity, against which no damage can be measured; "
            "leave those clients out"
        )
