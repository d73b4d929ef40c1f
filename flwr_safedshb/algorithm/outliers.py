"""Count the replies of a round that lie far from the others.

f is an assumption that nothing can prove: adversaries who stay within the spread of the
honest replies cannot be counted. But those who do not are seen, and if there are as
many as f, the assumption has no room left.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from logging import WARNING

import numpy as np
from flwr.common import log

from flwr_safedshb.aggregation.rule import Floats

# An outlier is this many times as far from the aggregate as the median reply, and this
# many median absolute deviations further. Honest replies with equal noise have neither.
_TIMES, _DEVIATIONS = 1.5, 6.0


def count_outliers(
    momentums: Sequence[Sequence[Floats]], direction: Sequence[Floats]
) -> int:
    """Count the replies far from the aggregate; fewer than half of them can be.

    Parameters
    ----------
    momentums : sequence of n lists of layers
    direction : list of layers
        R_t.
    """
    distances = np.array([_distance(layers, direction) for layers in momentums])
    usual = np.median(distances)
    spread = np.median(np.abs(distances - usual))
    far = max(_TIMES * usual, usual + _DEVIATIONS * spread)
    return int(np.count_nonzero(distances > far))


def warn_of_outliers(found: int, f: int, before: int) -> None:
    """Warn if a round shows as many outliers as f, and the round before showed fewer.

    Parameters
    ----------
    found, before : int
        The outliers of this round and of the round before.
    f : int
        The adversaries assumed among the replies.
    """
    if found < max(f, 1) or before >= found:
        return
    log(
        WARNING,
        "%d replies lie far from the others, and num_malicious_nodes leaves %d: %s",
        found,
        f,
        "more than is assumed, so no bound holds; raise it, or find out who they are"
        if found > f
        else "one more would break the assumption; raise it if there may be others",
    )


def _distance(layers: Sequence[Floats], direction: Sequence[Floats]) -> float:
    pairs = zip(layers, direction, strict=True)
    return math.hypot(
        *(float(np.linalg.norm(x.astype(np.float64) - mean)) for x, mean in pairs)
    )
