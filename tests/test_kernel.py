import os
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest

from flwr_safedshb.aggregation import primitives
from flwr_safedshb.aggregation.compiled import COMPILED
from tests.oracles import Floats

NAMES = ("lowest", "highest", "eliminate", "residual", "conflicts", "partners")


def loops(name: str) -> Callable[..., object]:
    function: Callable[..., object] = getattr(primitives, name)
    plain: Callable[..., object] = getattr(function, "py_func", function)
    return plain


def symmetric(seed: int, definite: bool) -> Floats:
    rng = np.random.default_rng(seed)
    matrix = rng.normal(size=(9, 9))
    matrix = matrix + matrix.T
    return matrix + 6.0 * np.eye(9) if definite else matrix


def test_the_compiler_is_installed_for_the_tests() -> None:
    assert COMPILED or os.environ.get("NUMBA_DISABLE_JIT") == "1"


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("c", [1, 2, 6, 9])
@pytest.mark.parametrize("name", NAMES)
def test_loops_do_the_same_as_numpy(name: str, c: int, seed: int) -> None:
    arguments: dict[str, tuple[object, ...]] = {
        "lowest": (symmetric(seed, False), c),
        "highest": (symmetric(seed, False), c),
        "eliminate": (symmetric(seed, True), c, c // 2),
        "residual": (symmetric(seed, True), symmetric(seed + 1, True), c, c // 2),
        "conflicts": (symmetric(seed, True) + 10 * np.eye(9) * (seed % 2), c),
        "partners": (symmetric(seed, False), c, [1.0, -1.0][seed % 2]),
    }
    ours = [a.copy() if isinstance(a, np.ndarray) else a for a in arguments[name]]
    theirs = [a.copy() if isinstance(a, np.ndarray) else a for a in arguments[name]]
    left = loops(name)(*ours)
    right = getattr(primitives, f"{name}_vectorised")(*theirs)
    pairs = [(ours[0], theirs[0])]
    if left is not None:
        tuples = isinstance(left, tuple)
        pairs += list(zip(left, right, strict=True)) if tuples else [(left, right)]  # type: ignore[call-overload]
    for one, other in pairs:
        np.testing.assert_allclose(
            np.asarray(one, float), np.asarray(other, float), rtol=1e-9, atol=1e-9
        )


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("seed", range(30))
def test_pairs_are_found_alike(seed: int, sign: float) -> None:
    matrix = symmetric(seed, False)
    if seed % 3 == 0:  # definite, so that one of the signs finds nothing
        matrix = matrix @ matrix.T
    assert loops("find_pair")(matrix, 9, sign) == primitives.find_pair_vectorised(
        matrix, 9, sign
    )


SCRIPT = """
import numpy as np
from flwr_safedshb.aggregation import SMEA
for seed in range(12):
    x = np.random.default_rng(seed).normal(size=(22, 5 + seed))
    x[:4] *= 1 + seed % 3
    result = SMEA(max_nodes=3000).weigh(x @ x.T, 7)
    print(result.subset.tolist(), f"{result.lambda_max:.9e}")
"""


@pytest.mark.slow
def test_numpy_and_compiled_search_give_the_same_answers() -> None:
    outputs = [
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env={**os.environ, "NUMBA_DISABLE_JIT": disabled},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for disabled in ("0", "1")
    ]
    assert outputs[0] == outputs[1]
    assert outputs[0].count("[") == 12
