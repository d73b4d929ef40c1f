import subprocess
import sys

import numpy as np
import pytest

from flwr_safedshb.aggregation.gram import (
    BLOCK_BYTES,
    gram_matrix,
    weighted_sum,
)
from flwr_safedshb.aggregation.scatter import nearest_sums, squared_distances


def clients(n: int, shapes: list[tuple[int, ...]]) -> list[list[np.ndarray]]:
    rng = np.random.default_rng(0)
    return [[rng.normal(size=s).astype(np.float32) for s in shapes] for _ in range(n)]


def stacked(layers: list[list[np.ndarray]]) -> np.ndarray:
    rows = [np.concatenate([layer.ravel() for layer in c]) for c in layers]
    return np.array(rows, dtype=np.float64)


# The last shapes are wider than a block, and not a multiple of it.
SHAPES = [
    [(3,)],
    [(2, 3), (), (0,), (4, 1, 2)],
    [(BLOCK_BYTES // 8 + 5,), (3, BLOCK_BYTES // 50)],
]


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("n", [1, 4])
def test_gram_and_weighted_sum_equal_the_stacked_ones(
    n: int, shapes: list[tuple[int, ...]]
) -> None:
    layers = clients(n, shapes)
    x = stacked(layers)
    np.testing.assert_allclose(gram_matrix(layers), x @ x.T, rtol=1e-10, atol=1e-8)
    y = x - x[n - 1]
    np.testing.assert_allclose(
        gram_matrix(layers, n - 1), y @ y.T, rtol=1e-10, atol=1e-8
    )
    weights = np.arange(n) / 3.0
    result = weighted_sum(layers, weights)
    assert [r.shape for r in result] == [layer.shape for layer in layers[0]]
    assert all(r.dtype == np.float32 for r in result)
    np.testing.assert_allclose(
        np.concatenate([r.ravel() for r in result]), weights @ x, rtol=1e-5, atol=1e-6
    )


def test_gram_matrix_accumulates_in_double_precision() -> None:
    """In float32 the ones would vanish beside the large coordinate."""
    x = np.ones((2, 5000), np.float32)
    x[:, 0] = 1e5
    assert gram_matrix([[row] for row in x])[0, 1] == 1e10 + 4999


def test_one_huge_vector_does_not_blur_the_others() -> None:
    x = np.random.default_rng(0).normal(size=(5, 50)).astype(np.float32)
    before = gram_matrix([[row] for row in x])
    x[4] *= np.float32(1e30)
    after = gram_matrix([[row] for row in x])
    assert (after[:4, :4] == before[:4, :4]).all()


def test_input_is_not_changed() -> None:
    layers = clients(3, [(4,), (2, 2)])
    before = stacked(layers)
    gram_matrix(layers, centre=0)
    weighted_sum(layers, np.array([1.0, -1.0, 2.0]))
    assert (stacked(layers) == before).all()


def test_layers_need_not_be_contiguous() -> None:
    x = np.random.default_rng(0).normal(size=(6, 8))
    views = [[row.reshape(4, 2).T] for row in x]
    np.testing.assert_allclose(gram_matrix(views), x @ x.T)
    result = weighted_sum(views, np.eye(6)[2])
    assert (result[0] == views[2][0]).all()


def test_equal_vectors_are_at_distance_zero() -> None:
    x = np.random.default_rng(0).normal(size=(4, 1000)) + 100.0
    x[3] = x[1]
    distances = squared_distances(x @ x.T)
    assert distances[1, 3] == 0.0
    assert (distances == distances.T).all()
    direct = ((x[:, None] - x[None]) ** 2).sum(axis=-1)
    np.testing.assert_allclose(distances, direct, rtol=1e-6)
    np.testing.assert_allclose(
        nearest_sums(distances, 3), np.sort(direct, axis=1)[:, :3].sum(axis=1), 1e-6
    )


MEMORY = """
import resource
import numpy as np
from flwr_safedshb.aggregation import Filter
n, d = 20, 2_000_000
rng = np.random.default_rng(0)
replies = [[rng.standard_normal((d // 2, 2), dtype=np.float32)] for _ in range(n)]
Filter()([[layer[:64] for layer in reply] for reply in replies], 4)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
Filter()(replies, 4)
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print((after - before) * 1024 / (4 * d))
"""


@pytest.mark.process
def test_extra_memory_is_one_and_a_half_models() -> None:
    output = subprocess.run(
        [sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True
    ).stdout
    assert float(output) <= 1.5
