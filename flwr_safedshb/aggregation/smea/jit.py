"""Compile numerical kernels where numba is installed, and run them as numpy where not.

A kernel is one source for both. Its inner loops over matrices exist twice, as numpy for
the interpreter and as loops for the compiler, which is ten times faster than compiled
array expressions; tests hold the two to the same results.
"""

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")

try:
    import numba

    COMPILED = not numba.config.DISABLE_JIT  # type: ignore[attr-defined]
except ImportError:
    COMPILED = False


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Return `function`, compiled where possible."""
    if not COMPILED:
        return function
    # numpy's error model: a division by zero is an infinity, not an exception.
    try:
        jit = numba.njit(cache=True, error_model="numpy")(function)
    except RuntimeError:  # no writable place for the cache
        jit = numba.njit(error_model="numpy")(function)
    return cast(Callable[P, R], jit)


def compiled_for(
    vectorised: Callable[P, R],
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Mark loops that do the same as `vectorised`, to be used where compiled."""

    def choose(loops: Callable[P, R]) -> Callable[P, R]:
        return compiled(loops) if COMPILED else vectorised

    return choose
