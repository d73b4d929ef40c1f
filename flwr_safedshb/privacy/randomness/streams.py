"""One random stream for every example, all seeded at once.

Models, losses and datasets may draw from the global generators of torch, numpy and
Python. If examples took their random numbers one after the other, an example that stops
early would shift the numbers of those behind it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def separate_streams(count: int) -> Iterator[Callable[[int], None]]:
    """Yield a function that starts the random stream of an example.

    The streams follow from one draw of torch's global generator. Afterwards all global
    generators go on as if nobody had drawn in between.

    Parameters
    ----------
    count : int
        How many examples there are.
    """
    seeds = torch.randint(2**62, (count,)).tolist()

    # torch.manual_seed seeds all kinds of devices, as slow as a small step.
    seed = torch.default_generator.manual_seed
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        seed = torch.manual_seed

    def start_stream(place: int) -> None:
        seed(seeds[place])
        np.random.seed(seeds[place] % 2**32)  # noqa: NPY002  # the one that others use
        random.seed(seeds[place])

    numpys, pythons = np.random.get_state(), random.getstate()  # noqa: NPY002
    with torch.random.fork_rng(devices=[]):
        try:
            yield start_stream
        finally:
            np.random.set_state(numpys)  # noqa: NPY002
            random.setstate(pythons)
