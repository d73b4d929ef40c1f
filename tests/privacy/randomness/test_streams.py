"""Every example has a random stream of its own, and leaves no trace in the next."""

import random
from collections.abc import Callable

import numpy as np
import torch

from flwr_safedshb.privacy.randomness.streams import separate_streams

Draw = Callable[[], object]
DRAWS: tuple[Draw, ...] = (
    lambda: torch.rand(3).tolist(),
    lambda: np.random.rand(3).tolist(),  # noqa: NPY002  # the one that others use
    random.random,
)


def drawn(seed: int, used: dict[int, int]) -> tuple[dict[int, object], object]:
    """Return what some examples draw, one after another draws more, and the rest."""
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    random.seed(seed)
    found: dict[int, object] = {}
    with separate_streams(4) as start:
        for place, more in used.items():
            start(place)
            found[place] = [draw() for draw in DRAWS]
            for _ in range(more):
                [draw() for draw in DRAWS]
    return found, [draw() for draw in DRAWS]


def test_what_an_example_draws_depends_on_its_place_alone() -> None:
    every, after = drawn(1, {0: 0, 1: 0, 2: 0, 3: 0})
    for used in ({0: 5, 1: 0, 2: 3, 3: 0}, {2: 0, 0: 1}, {3: 7}):
        some, rest = drawn(1, used)
        assert some == {place: every[place] for place in used}
        assert rest == after


def test_streams_differ_among_places_and_steps() -> None:
    every, _ = drawn(1, {0: 0, 1: 0, 2: 0, 3: 0})
    others, _ = drawn(2, {0: 0, 1: 0, 2: 0, 3: 0})
    found = [str(value) for value in (*every.values(), *others.values())]
    assert len(set(found)) == 8


def test_an_error_leaves_the_generators_as_they_would_be() -> None:
    _, after = drawn(1, {0: 0})
    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002
    random.seed(1)
    try:
        with separate_streams(4) as start:
            start(2)
            [draw() for draw in DRAWS]
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert [draw() for draw in DRAWS] == after
