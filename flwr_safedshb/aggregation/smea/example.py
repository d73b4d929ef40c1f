"""A worked example of SMEA's search: seven points in the plane, two may be hostile.

SMEA averages the five points whose scatter has the smallest top eigenvalue. Say that
some five are known, with the value t. Is there a set with a smaller value?
`derive_conclusions` answers for the sets that hold one point, the anchor, the way
`branch_and_bound` does; here every conclusion is a sentence, for reading:

  python -m flwr_safedshb.aggregation.smea.example
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from flwr_safedshb.aggregation.rule import FloatArray
from flwr_safedshb.aggregation.scatter import RESOLUTION

POINTS: FloatArray = np.array(
    [[2, 6], [5, 7], [4, 7], [6, 9], [7, 3], [2, 7], [8, 0]], dtype=np.float64
)
F = 2
# Five points that are known, and are not the best.
KNOWN: tuple[int, ...] = (0, 1, 2, 3, 4)


@dataclass(frozen=True)
class Conclusion:
    """The conclusion of one prune.

    Attributes
    ----------
    prune : str
        ``far``, ``pairs``, ``inertia``, ``found`` or ``nothing``.
    text : str
        A sentence with its figures.
    out, in_ : tuple of int
        Points that are now known to be outside or inside every better set.
    pairs : tuple of pairs of int
        Points that are not both in a better set.
    """

    prune: str
    text: str
    out: tuple[int, ...] = ()
    in_: tuple[int, ...] = ()
    pairs: tuple[tuple[int, int], ...] = ()


def top_eigenvalue(points: FloatArray) -> float:
    """Return the largest eigenvalue of the scatter of points, (m, d)."""
    centred = points - points.mean(axis=0)
    return float(np.linalg.eigvalsh(centred.T @ centred)[-1])


def improvement_threshold(known: tuple[int, ...]) -> float:
    """Return the value that a better set must be below: a tie is no improvement."""
    return (1.0 - RESOLUTION) * top_eigenvalue(POINTS[list(known)])


def decision_matrix(points: FloatArray, anchor: int, t: float) -> FloatArray:
    """Return M = (I + 1 1^T) - G/t, (n, n), about the anchor; see `branch_and_bound`.

    A set with the anchor has a top eigenvalue below t exactly if M, restricted to its
    other points, is positive definite.
    """
    moved = points - points[anchor]
    matrix: FloatArray = np.eye(len(points)) + 1.0 - moved @ moved.T / t
    return matrix


def derive_conclusions(
    points: FloatArray, f: int, anchor: int, t: float, excluded: Iterable[int] = ()
) -> Iterator[Conclusion]:
    """Yield what is known of sets of n - f points with the anchor, and below t.

    The last conclusion is ``found`` or ``nothing``, or there is none: then the search
    would have to branch.

    Parameters
    ----------
    points : (n, d) array
    f : int
    anchor : int
        A point that all these sets hold.
    t : float
    excluded : iterable of int
        Points that they do not hold.
    """
    matrix = decision_matrix(points, anchor, t)
    left = [i for i in range(len(points)) if i not in {anchor, *excluded}]
    slack = len(left) - (len(points) - f - 1)
    far = tuple(i for i in left if matrix[i, i] <= 0.0)
    if far:
        left = [i for i in left if i not in far]
        slack -= len(far)
        text = (
            f"{_join(far)}: farther from {anchor} than sqrt(2t) = "
            f"{np.sqrt(2 * t):.2f}, so M_jj <= 0"
        )
        yield Conclusion("far", text, out=far)
    if slack < 0:
        yield Conclusion("nothing", "fewer points are left than a set needs")
        return
    pairs = tuple(
        (j, k)
        for j in left
        for k in left
        if j < k and matrix[j, k] ** 2 >= matrix[j, j] * matrix[k, k]
    )
    if pairs:
        text = f"{_join(pairs)}: of each pair one at most, as its 2 x 2 minor is <= 0"
        yield Conclusion("pairs", text, pairs=pairs)
    block = matrix[np.ix_(left, left)]
    negative = int((np.linalg.eigvalsh(block) < 0.0).sum())
    counted = f"negative eigenvalues of M: {negative}; points that must go: {slack}"
    if negative > slack:
        yield Conclusion("nothing", f"{counted}, and each takes away at most one")
    elif negative == 0:
        best = tuple(sorted([anchor, *left[: len(left) - slack]]))
        yield Conclusion("found", f"{counted}, no matter which", in_=best)
    elif negative == slack:
        diagonal = np.diag(np.linalg.inv(block))
        stays = tuple(i for i, v in zip(left, diagonal, strict=True) if v >= 0.0)
        text = f"{counted}; V_jj >= 0 where j takes none away: {_join(stays)} stay"
        yield Conclusion("inertia", text, in_=stays)
        if len(stays) > len(left) - slack:
            yield Conclusion("nothing", "more must stay than a set holds")
        elif slack == 1:
            goes = left[int(np.argmin(diagonal))]
            found = tuple(sorted({anchor, *left} - {goes}))
            value = top_eigenvalue(points[list(found)])
            text = f"without {goes}: {_join(found)}, with {value:.2f} < t = {t:.2f}"
            yield Conclusion("found", text, out=(goes,), in_=found)


def _join(points: Iterable[object]) -> str:
    return ", ".join(str(point).strip("()").replace(", ", "-") for point in points)


def main() -> None:
    """Print the example: an improvement, and the proof that there is no other."""
    known = KNOWN
    while True:
        t = improvement_threshold(known)
        print(f"{_join(known)} has the value t = {t:.2f}. Is there a better set?")
        better = None
        # A set of n - f points has one of any f + 1: the first of them that it has.
        for anchor in range(F + 1):
            print(f"  with {anchor}; without {_join(range(anchor)) or 'none'}")
            for one in derive_conclusions(POINTS, F, anchor, t, range(anchor)):
                print(f"    {one.prune}: {one.text}")
                if one.prune == "found":
                    better = one.in_
            if better is not None:
                break
        if better is None:
            break
        known = better
    mean = POINTS[list(known)].mean(axis=0)
    print(f"There is none: SMEA answers {mean}, the mean of {_join(known)}.")


if __name__ == "__main__":
    main()
