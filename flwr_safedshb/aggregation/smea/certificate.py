r"""Lower bounds on the top eigenvalue of the scatter of every m vectors.

They certify a search that was stopped. *Interlacing*: each of the f vectors left out
lowers the scatter by a matrix of rank one, so that no more than f eigenvalues of the
scatter of all vectors can be above the top one of a subset.

*Windows*: along any one direction, the m points of the smallest scatter are neighbours.

*Directions*: for any W, positive semidefinite of trace 1, the top eigenvalue of
scatter_S is at least <W, scatter_S>, the spread of S in the metric of W,

    (1/2m) sum_{i,j in S} (x_i - x_j)^T W (x_i - x_j),

and that is at least what is left when every i may choose its own m nearest instead of
S, and the m cheapest i are taken (`trace_bound`). The best W is the answer of a game:
one side picks the subset with the smallest spread in the metric, the other moves the
metric to where the subsets so far had much (multiplicative weights on matrices; Arora
and Kale, 2007). Every W on the way gives a valid bound; the largest is kept.
"""

import numpy as np
from numpy.typing import NDArray

from flwr_safedshb.aggregation.rule import FloatArray
from flwr_safedshb.aggregation.scatter import (
    Subset,
    nearest_sums,
    squared_distances,
)
from flwr_safedshb.aggregation.smea.budget import WorkBudget
from flwr_safedshb.aggregation.smea.root_cases import Spectrum

# The game is played in so many of the vectors' principal directions, for so many
# rounds; the larger the rate, the more uneven the metric.
DIRECTIONS = 64
ROUNDS = 20
RATE = 8.0
# What a round costs, in passes.
ROUND = 128
# Round-off of a spread, relative to the largest square that goes into it.
ROUND_OFF = 16 * float(np.finfo(float).eps)


def quick_bound(spectrum: Spectrum, distances: FloatArray, m: int) -> float:
    """Return a lower bound from the spectrum of all vectors and from distances."""
    # The trace is spread over at most m - 1 eigenvalues.
    trace = trace_bound(distances, m)[0] / max(1, m - 1)
    interlaced = float(spectrum.values[m - 1]) - spectrum.noise
    return max(
        0.0,
        interlaced,
        trace,
        window_bound(principal_coordinates(spectrum), m) - spectrum.noise,
    )


def principal_coordinates(spectrum: Spectrum) -> FloatArray:
    """Return the vectors, (n, k), in their first principal directions."""
    kept = np.flatnonzero(spectrum.values > spectrum.noise)[::-1][:DIRECTIONS]
    along: FloatArray = spectrum.vectors[:, kept] * np.sqrt(spectrum.values[kept])
    return along


def window_bound(points: FloatArray, m: int) -> float:
    """Return the largest bound that a single coordinate of the points, (n, k), gives.

    On a line, the m points of the smallest scatter are neighbours.
    """
    if not points.shape[1]:
        return 0.0
    line = np.sort(points, axis=0)
    squares = np.square(line)
    sums, totals = (
        np.vstack((np.zeros(line.shape[1]), np.cumsum(part, axis=0)))
        for part in (line, squares)
    )
    means = (sums[m:] - sums[:-m]) / m
    scatters = (totals[m:] - totals[:-m]) - m * np.square(means)
    noise = ROUND_OFF * len(line) * squares.sum(axis=0)
    return float((scatters.min(axis=0) - noise).max())


def game_bound(spectrum: Spectrum, subset: Subset, budget: WorkBudget) -> float:
    """Return the largest bound that the metrics of the game give.

    Parameters
    ----------
    spectrum : Spectrum
        Of all vectors.
    subset : (m,) index array
        Where the game begins; the bound holds for any.
    budget : WorkBudget
        What the game costs is noted.
    """
    points = principal_coordinates(spectrum)
    if not points.shape[1]:
        return 0.0
    n, m = len(points), len(subset)
    centred = points[subset] - points[subset].mean(axis=0)
    total = centred.T @ centred
    scale = float(np.linalg.eigvalsh(total)[-1])
    largest = 0.0
    for turn in range(ROUNDS if scale > 0.0 else 0):
        rate = RATE / (scale * np.sqrt(turn + 1.0))
        seen = points @ _metric_root(rate * total)
        apart = squared_distances(seen @ seen.T)
        bound, chosen = trace_bound(apart, m)
        noise = ROUND_OFF * n * m * float(np.square(seen).sum(axis=1).max())
        largest = max(largest, bound - noise)
        # Where that spread is: (1/2m) of the sum over chosen pairs, as a Laplacian.
        pairs = 0.5 * (chosen + chosen.T)
        total += (points.T * pairs.sum(axis=1)) @ points / m
        total -= points.T @ (pairs @ points) / m
        budget.spend_passes(ROUND, n)
    return largest - spectrum.noise


def trace_bound(distances: FloatArray, m: int) -> tuple[float, FloatArray]:
    """Return a lower bound on the trace of the scatter of every m vectors.

    The trace is half of the mean squared distance times m; here every vector has its
    own m nearest.

    Returns
    -------
    bound : float
    chosen : (n, n) array
        1 where the distance of a pair is in it, else 0.
    """
    nearest = np.argpartition(distances, m - 1, axis=1)[:, :m]
    sums = np.take_along_axis(distances, nearest, axis=1).sum(axis=1)
    cheapest = np.argpartition(sums, m - 1)[:m]
    chosen = np.zeros_like(distances)
    chosen[cheapest[:, None], nearest[cheapest]] = 1.0
    return float(sums[cheapest].sum()) / (2 * m), chosen


def find_reachable(distances: FloatArray, m: int, value: float) -> NDArray[np.bool_]:
    """Return which vectors may be in a set of m below `value`, (n,) boolean.

    Let x be one of S, and l the top eigenvalue. About the mean, the scatter along x is
    at least m/(m-1) |x - mean|^2 <= l, and the trace is at most (m-1) l; so the squared
    distances of x to the others, which sum to trace + m |x - mean|^2, sum to at most
    2 (m-1) l, and those to its m nearest do.
    """
    reach = 2.0 * (m - 1) * value * (1.0 + 1e-6)
    inside: NDArray[np.bool_] = nearest_sums(distances, m) <= reach
    return inside


def _metric_root(exponent: FloatArray) -> FloatArray:
    """Return a root R of W = R R^T = exp(exponent) / trace."""
    values, vectors = np.linalg.eigh(exponent)
    weights = np.exp(values - values[-1])
    # A little below trace 1, for the round-off of the sum and of the root.
    weights *= (1.0 - 1e-12) / weights.sum()
    root: FloatArray = vectors * np.sqrt(weights)
    return root
