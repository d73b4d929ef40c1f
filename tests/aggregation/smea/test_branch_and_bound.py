import os
import subprocess
import sys
from collections.abc import Callable
from itertools import combinations

import numpy as np
import pytest

from flwr_safedshb.aggregation.smea import branch_and_bound as bnb
from flwr_safedshb.aggregation.smea import kernels
from flwr_safedshb.aggregation.smea import search_state as st
from tests.oracles import Floats, subsets

NAMES = (
    "take_schur_complement",
    "inverse_error",
    "count_conflicts",
    "matching_exceeds",
    "count_partners",
)


def interpreted(name: str) -> Callable[..., object]:
    """The source of a kernel, run by Python."""
    function: Callable[..., object] = getattr(kernels, name)
    plain: Callable[..., object] = getattr(function, "py_func", function)
    return plain


def symmetric(seed: int, definite: bool) -> Floats:
    rng = np.random.default_rng(seed)
    matrix = rng.normal(size=(9, 9))
    matrix = matrix + matrix.T
    return matrix + 6.0 * np.eye(9) if definite else matrix


def test_the_compiler_is_installed_for_the_tests() -> None:
    assert kernels.COMPILED or os.environ.get("NUMBA_DISABLE_JIT") == "1"


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("c", [1, 2, 6, 9])
@pytest.mark.parametrize("name", NAMES)
def test_loops_do_the_same_as_numpy(
    name: str, c: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    definite = symmetric(seed, True) + 10 * np.eye(9) * (seed % 2)
    degrees = np.arange(c) % 3
    arguments: dict[str, tuple[object, ...]] = {
        "take_schur_complement": (c, c // 2),
        "inverse_error": (symmetric(seed + 1, True), c, c // 2),
        "count_conflicts": (c,),
        "matching_exceeds": (c, degrees, seed % 4),
        "count_partners": (c, [1.0, -1.0][seed % 2]),
    }
    found = []
    for compiled in (True, False):
        matrix = symmetric(seed, False) if name == "count_partners" else definite.copy()
        monkeypatch.setattr(kernels, "COMPILED", compiled)
        answer = interpreted(name)(matrix, *arguments[name])
        found.append([matrix, *(answer if isinstance(answer, tuple) else (answer,))])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(
            np.asarray(one, float), np.asarray(other, float), rtol=1e-9, atol=1e-9
        )


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("seed", range(30))
def test_loops_and_numpy_find_the_same_pair(
    seed: int, sign: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix = symmetric(seed, False)
    if seed % 3 == 0:  # definite, so that one of the signs finds nothing
        matrix = matrix @ matrix.T
    found = []
    for compiled in (True, False):
        monkeypatch.setattr(kernels, "COMPILED", compiled)
        found.append(interpreted("find_pair")(matrix, 9, sign))
    assert found[0] == found[1]


def definite(matrix: Floats) -> bool:
    return bool(np.linalg.eigvalsh(matrix)[0] > 0.0)


@pytest.mark.parametrize("kind", ["plain", "low-rank", "nearly", "integer"])
def test_decides_what_looking_at_every_submatrix_decides(kind: str) -> None:
    verdicts = {bnb.SOLVED: 0, bnb.EXHAUSTED: 0}
    for seed in range(150):
        rng = np.random.default_rng(seed)
        c = int(rng.integers(3, 11))
        needed = int(rng.integers(1, c + 1))
        rank = 2 if kind == "low-rank" else c
        points = rng.normal(size=(c, rank))
        if kind == "integer":
            points = np.round(points)
        gram = points @ points.T
        if kind == "nearly":
            gram += 0.3 * symmetric(seed, False)[:c, :c] if c <= 9 else 0.0
        matrix = 1.0 + np.eye(c) - gram / rng.uniform(0.3, 4.0)
        exists = any(
            definite(matrix[np.ix_(s, s)]) for s in map(list, subsets(c, needed))
        )
        search = st.new_search(matrix, needed, np.arange(c))
        state = bnb.advance_search(search, 10**10)
        verdicts[state] += 1
        if state == bnb.SOLVED:
            rows = st.solution_rows(search)
            assert len(rows) >= needed
            assert definite(matrix[np.ix_(rows, rows)])
        assert exists == (state == bnb.SOLVED)
    assert min(verdicts.values()) >= 20


def test_finds_the_only_three_that_may_go() -> None:
    """Each of them has just two partners in V, the other two; all others have none."""
    tried = 0
    for seed in range(400):
        rng = np.random.default_rng(seed)
        c = int(rng.integers(5, 9))
        inverse = np.triu(rng.choice([-2.0, 2.0], size=(c, c)), 1)
        inverse[:3, :3] = np.triu(rng.uniform(-0.3, 0.3, size=(3, 3)), 1)
        inverse += inverse.T - np.eye(c)
        values = np.linalg.eigvalsh(inverse)
        if (values < 0).sum() != 3 or np.abs(values).min() < 0.05:
            continue
        tried += 1
        matrix = np.linalg.inv(inverse)
        search = st.new_search(0.5 * (matrix + matrix.T), c - 3, np.arange(c))
        assert bnb.advance_search(search, 10**8) == bnb.SOLVED
        assert sorted(st.solution_rows(search)) == list(range(3, c))
    assert tried >= 10


@pytest.mark.parametrize("seed", range(40))
def test_goes_on_to_every_other_solution(seed: int) -> None:
    """Doubting each find must in the end visit all sets that do."""
    rng = np.random.default_rng(seed)
    c, needed = 7, 4
    points = rng.normal(size=(c, 5))
    matrix = 1.0 + np.eye(c) - points @ points.T / 2.5
    expected = {tuple(s) for s in subsets(c, needed) if definite(matrix[np.ix_(s, s)])}
    search = st.new_search(matrix, needed, np.arange(c))
    seen = set()
    while bnb.advance_search(search, 10**10) == bnb.SOLVED:
        rows = sorted(st.solution_rows(search).tolist())
        seen |= {tuple(s) for s in combinations(rows, needed)}
        bnb.reject_solution(search)
    assert seen == expected


SCRIPT = """
import numpy as np
from flwr_safedshb.aggregation import SMEA
for seed in range(12):
    x = np.random.default_rng(seed).normal(size=(22, 5 + seed))
    x[:4] *= 1 + seed % 3
    result = SMEA(max_nodes=3000).weigh(x @ x.T, 7)
    print(result.subset.tolist(), f"{result.lambda_max:.9e}")
"""


@pytest.mark.process
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
