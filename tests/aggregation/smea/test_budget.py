"""Work is bounded by the budget, whatever is sent, and all of it is counted."""

from collections.abc import Callable

import numpy as np
import pytest

from flwr_safedshb.aggregation import SMEA
from flwr_safedshb.aggregation.scatter import sort_by_isolation, squared_distances
from flwr_safedshb.aggregation.smea import branch_and_bound as bnb
from flwr_safedshb.aggregation.smea import search_state as st
from flwr_safedshb.aggregation.smea.budget import (
    DECOMPOSITION,
    NODE,
    WorkBudget,
    work_of_passes,
)
from flwr_safedshb.aggregation.smea.certificate import ROUND, ROUNDS
from flwr_safedshb.aggregation.smea.root_cases import group_equal_vectors
from flwr_safedshb.aggregation.smea.search import find_best_subset
from tests.oracles import Floats

HOSTILE: dict[str, Callable[[int, np.random.Generator], Floats]] = {
    "isotropic": lambda n, rng: rng.normal(size=(n, 30)),
    "circle": lambda n, rng: np.stack(
        [np.cos(2 * np.pi * np.arange(n) / n), np.sin(2 * np.pi * np.arange(n) / n)], 1
    ),
    "clusters": lambda n, rng: (
        rng.normal(size=(n, 30)) + 9.0 * rng.normal(size=(4, 30))[np.arange(n) % 4]
    ),
    "duplicates": lambda n, rng: rng.normal(size=(n, 9))[rng.integers(0, n // 3, n)],
    "simplex": lambda n, rng: np.eye(n) + 1e-3 * rng.normal(size=(n, n)),
    "huge offset": lambda n, rng: rng.normal(size=(n, 9)) + 1e6,
    "collinear": lambda n, rng: np.outer(rng.normal(size=n), np.ones(4)),
    "heavy tails": lambda n, rng: rng.standard_t(1.1, size=(n, 9)),
    "two that nearly tie": lambda n, rng: (
        np.repeat(rng.normal(size=(n // 2 + 1, 9)), 2, axis=0)[:n]
        + 1e-9 * rng.normal(size=(n, 9))
    ),
}


def ordered(x: Floats, f: int) -> Floats:
    return sort_by_isolation(x @ x.T, len(x) - f)[0]


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize(("n", "f"), [(60, 29), (120, 24)])
def test_no_input_takes_more_than_the_budget(name: str, n: int, f: int) -> None:
    x = HOSTILE[name](n, np.random.default_rng(0))
    budget = WorkBudget(1000 * NODE)
    _, value, bound = find_best_subset(ordered(x, f), n - f, budget)
    assert bound <= value
    # What may come on top: a step of the search with its exclusions, and the game.
    most = work_of_passes(2 * DECOMPOSITION + ROUND * ROUNDS + 20 * f, n)
    assert budget.spent <= budget.total + most


@pytest.mark.parametrize("name", HOSTILE)
def test_every_decomposition_is_paid_for(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    n, f = 60, 12
    sizes: list[int] = []
    for function in ("eigh", "eigvalsh"):
        plain = getattr(np.linalg, function)

        def counted(matrix: Floats, plain: Callable[..., object] = plain) -> object:
            # Stacks of small ones come with a decomposition that is paid for.
            sizes.append(matrix.shape[-1])
            return plain(matrix)

        monkeypatch.setattr(np.linalg, function, counted)
    x = HOSTILE[name](n, np.random.default_rng(0))
    budget = WorkBudget(1000 * NODE)
    find_best_subset(ordered(x, f), n - f, budget)
    paid = sum(work_of_passes(DECOMPOSITION // 2, c) for c in sizes if c > n // 2)
    assert sizes
    assert paid <= budget.spent


def test_larger_matrices_are_charged_for_more() -> None:
    """A node over 1,000 vectors must not count like one over 100."""
    assert work_of_passes(3, 10) == work_of_passes(3, 100) == 3 * 100**2
    assert work_of_passes(1, 1000) >= 100 * work_of_passes(1, 100)
    rows = [work_of_passes(1, c) for c in range(1, 1200)]
    assert rows == sorted(rows)


@pytest.mark.parametrize("dimension", [5, 20, 60])
def test_levels_that_do_not_fit_are_computed_anew(
    dimension: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room for two levels, the answers are those with room for all."""
    restored = 0
    plain = st.restore_level

    def counted(search: st.SearchState) -> None:
        nonlocal restored
        restored += 1
        plain(search)

    for seed in range(3):
        x = np.random.default_rng(seed).normal(size=(34, dimension))
        roomy = SMEA().weigh(x @ x.T, 9)
        with monkeypatch.context() as patch:
            patch.setattr(st, "BYTES", 0)
            patch.setattr(st, "restore_level", counted)
            tight = SMEA().weigh(x @ x.T, 9)
        assert roomy.lower_bound == roomy.lambda_max
        assert tight.lower_bound == tight.lambda_max
        assert tight.subset is not None
        assert roomy.subset is not None
        assert tight.subset.tolist() == roomy.subset.tolist()
    assert restored >= 30


def test_memory_of_a_search_is_bounded() -> None:
    search = st.new_search(np.eye(600), 500, np.arange(600))
    assert search.memory.nbytes <= st.BYTES
    search = st.new_search(np.eye(90), 80, np.arange(90))
    assert search.memory.shape[1] == 81


def test_a_search_goes_on_where_it_was_stopped() -> None:
    """Sliced finely, it visits the same nodes and ends with the same verdict."""
    rng = np.random.default_rng(6)
    points = rng.normal(size=(40, 30))
    matrix = 1.0 + np.eye(40) - points @ points.T / 72.0
    whole, sliced = (st.new_search(matrix, 32, np.arange(40)) for _ in range(2))
    assert bnb.advance_search(whole, 10**12) == bnb.EXHAUSTED
    slices = 0
    while (state := bnb.advance_search(sliced, 1)) == bnb.OUT_OF_WORK:
        slices += 1
    assert state == bnb.EXHAUSTED
    nodes = int(whole.cursor[st.NODES])
    assert sliced.cursor[st.NODES] == nodes
    assert slices >= nodes >= 100


def test_equal_vectors_are_found_however_many() -> None:
    x = np.repeat(np.random.default_rng(7).normal(size=(5, 3)), 80, axis=0)
    groups = group_equal_vectors(squared_distances(x @ x.T))
    assert groups.tolist() == [80 * (i // 80) for i in range(400)]


@pytest.mark.parametrize("f", [30, 149])
def test_hundreds_of_vectors_are_searched_and_certified(f: int) -> None:
    """What was left out above 256 vectors: a bound as good as at 200, and a search."""
    n = 300
    gaps = []
    for size in (200, n):
        x = np.random.default_rng(0).normal(size=(size, 40))
        hostile = f * size // n
        result = SMEA(max_nodes=8_000).weigh(x @ x.T, hostile)
        assert result.lower_bound is not None
        gaps.append(result.lambda_max / result.lower_bound - 1.0)
    assert gaps[1] <= 1.1 * gaps[0]
