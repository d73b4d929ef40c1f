"""Ways to draw batches (Alg. 1, line 4), each with what its steps give away.

Every module of this folder is looked at: a class in it that is a `Sampler` is known by
its word from then on, and no list has to be told.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from flwr_safedshb.privacy.samplers.base import (
    Adjacency,
    Mixture,
    Pair,
    Profile,
    Sampler,
)

__all__ = [
    "Adjacency",
    "Mixture",
    "Pair",
    "Profile",
    "Sampler",
    "known_samplers",
    "sampler",
]


@cache
def known_samplers() -> Mapping[str, Sampler]:
    """Return every sampler by its word, in the order of the words."""
    for module in iter_modules(__path__, f"{__name__}."):
        import_module(module.name)
    samplers = {kind.word: kind() for kind in Sampler.__subclasses__()}
    return dict(sorted(samplers.items()))


def sampler(word: str) -> Sampler:
    """Return the sampler of a word, or say which words there are."""
    known = known_samplers()
    if not isinstance(word, str) or word not in known:
        raise ValueError(
            f"sampling={word!r} is unknown; use one of {', '.join(map(repr, known))}"
        )
    return known[word]
