"""Select the model that a run returns: the last, a random one, or a mean.

The mean is over the last half of the run. It costs no privacy, because the server has
seen all models, and the memory of one model, because it is a running mean.
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
from flwr.app import ArrayRecord

from flwr_safedshb.algorithm.progress import Progress
from flwr_safedshb.algorithm.wire import decode_arrays, encode_record

Output = Literal["last", "uniform", "average"]
# The stream of a run's seed that the choice is drawn from; `run` has the others.
_STREAM = 1


def check_output(output: str, may_stop: bool = False) -> None:
    """Refuse an unknown output, and one that needs a run which cannot stop early."""
    if output not in (words := get_args(Output)):
        raise ValueError(
            f"output={output!r} must be one of {', '.join(map(repr, words))}"
        )
    if may_stop and output != "last":
        raise ValueError(
            f"output={output!r} needs a fixed number of rounds, and stop_when may end "
            "the run earlier; use output='last'"
        )


def draw_index(seed: int, num_rounds: int) -> int:
    """Draw which of theta_0 .. theta_{T-1} a run with output "uniform" returns."""
    return int(np.random.default_rng([seed, _STREAM, 0]).integers(num_rounds))


def add_to_mean(progress: Progress) -> None:
    """Add theta_t to the mean if t is in the last half of 1 .. T.

    The mean is kept in float64, also across restarts: rounding it to a smaller dtype in
    every step would lose precision, and would make it depend on restarts.
    """
    count = progress.step - progress.num_rounds // 2
    if count < 1:
        return
    newest = [array.astype(np.float64) for array in decode_arrays(progress.arrays)]
    if count > 1 and progress.kept is not None:
        means = [array.astype(np.float64) for array in decode_arrays(progress.kept)]
        newest = [
            mean + (new - mean) / count for mean, new in zip(means, newest, strict=True)
        ]
    progress.kept = encode_record(progress.arrays, newest)


def select_output(progress: Progress, output: Output) -> ArrayRecord:
    """Return the model that a run returns, in the dtypes of its arrays."""
    kept = progress.kept
    if output == "last" or kept is None:
        return progress.arrays
    if output == "uniform":
        return kept
    types = [array.dtype for array in decode_arrays(progress.arrays)]
    means = [
        np.rint(mean).astype(dtype) if dtype.kind in "biu" else mean.astype(dtype)
        for mean, dtype in zip(decode_arrays(kept), types, strict=True)
    ]
    return encode_record(progress.arrays, means)
