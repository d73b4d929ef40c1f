"""What SMEA may spend: work that is counted, so that equal input gets equal answers.

The unit is one entry of a matrix that is read or written, and everything that takes
more than a few passes over a matrix is charged, compiled or not. A pass over c rows and
columns is charged for its c^2 entries; between `TYPICAL` and `LARGE` rows for
c/`TYPICAL` times that, while the matrix leaves a core's cache; and never for less than
one of `TYPICAL` rows, because calls and loops have costs of their own. So work bounds
time, within a factor of about two, whatever n is and whatever adversaries send.

After the budget is spent, what can still run is one step of the search, which looks at
it before every conclusion, and the game of `certificate`: at most some hundred passes
over n rows and f exclusions, so O(n^3) together.
"""

import math
import time
from dataclasses import dataclass, field

from flwr_safedshb.aggregation.smea.kernels import compile_kernel

# Rows up to which a pass costs the same, and those between which an entry costs more.
TYPICAL, LARGE = 100, 256
# Passes that an eigenvalue decomposition with vectors costs; without vectors, a half.
DECOMPOSITION = 300
# Work of a node of the search over 100 vectors, as measured on isotropic ones.
NODE = 11 * TYPICAL**2
# Work between two looks at the clock.
SLICE = 256 * NODE


@compile_kernel
def work_of_passes(count: int, c: int) -> int:
    """Return the work of `count` passes over a matrix of c rows."""
    rows = max(c, TYPICAL)
    return count * rows * rows * min(rows, LARGE) // TYPICAL


@dataclass
class WorkBudget:
    """Work, and seconds by the clock if there is a limit.

    Attributes
    ----------
    total : int
        Work that may be done.
    seconds : float or None
    spent : int
        Work that was done.
    nodes : int
        Nodes of the search that were visited.
    share : float
        How much of the whole may be spent before the present phase has to end.
    """

    total: int
    seconds: float | None = None
    spent: int = 0
    nodes: int = 0
    share: float = 1.0
    _began: float = field(default_factory=time.monotonic, repr=False)

    def spend_passes(self, count: int, c: int) -> None:
        """Note the work of `count` passes over a matrix of c rows."""
        self.spent += work_of_passes(count, c)

    def remaining_work(self) -> int:
        """Return the work that the present phase may still do; 0 ends it."""
        limit = math.inf if self.seconds is None else self.share * self.seconds
        if time.monotonic() - self._began >= limit:
            return 0
        return max(0, int(self.share * self.total) - self.spent)
