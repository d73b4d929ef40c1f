import copy
import inspect
import itertools
import math
import os
import pickle
import time

import numpy as np
import pytest
from scipy import stats

from flwr_safedshb.privacy.randomness import keystream, noise
from flwr_safedshb.privacy.randomness.noise import (
    Randomness,
    SecureRandomness,
    SeededRandomness,
)

DRAWS = 60_000


def p_value(draws: np.ndarray[tuple[int], np.dtype[np.float64]], std: float) -> float:
    return float(stats.kstest(draws, "norm", args=(0.0, std)).pvalue)


@pytest.mark.usefixtures("fixed_entropy")
@pytest.mark.parametrize("source", [SecureRandomness(), SeededRandomness(5)])
@pytest.mark.parametrize("std", [0.08, 3.0])
def test_gaussian_has_the_stated_deviation(source: Randomness, std: float) -> None:
    draws = source.gaussian(DRAWS, std)
    assert draws.dtype == np.float64
    assert p_value(draws, std) > 0.01
    # The mutations that this test is for: noise a tenth too small or too large.
    assert p_value(0.9 * draws, std) < 1e-6
    assert p_value(1.1 * draws, std) < 1e-6


@pytest.mark.usefixtures("fixed_entropy")
@pytest.mark.parametrize("source", [SecureRandomness(), SeededRandomness(5)])
def test_draws_are_independent(source: Randomness) -> None:
    first, second = source.gaussian(DRAWS, 1.0), source.gaussian(DRAWS, 1.0)
    bound = 4 / np.sqrt(DRAWS)
    assert abs(np.corrcoef(first, second)[0, 1]) < bound
    assert abs(np.corrcoef(first[1:], first[:-1])[0, 1]) < bound
    assert np.corrcoef(first, first)[0, 1] > bound  # what a repeated stream would give


@pytest.mark.usefixtures("fixed_entropy")
@pytest.mark.parametrize("source", [SecureRandomness(), SeededRandomness(5)])
def test_values_that_share_draws_are_independent(source: Randomness) -> None:
    # Parts of one call, as which both sources compute their values.
    quarters = source.gaussian(4 * DRAWS, 1.0).reshape(4, DRAWS)
    for powers in (quarters, quarters**2, abs(quarters)):
        correlations = np.corrcoef(powers) - np.eye(4)
        assert abs(correlations).max() < 4 / np.sqrt(DRAWS)


@pytest.mark.usefixtures("fixed_entropy")
@pytest.mark.parametrize("source", [SecureRandomness(), SeededRandomness(5)])
@pytest.mark.parametrize("probability", [0.1, 0.5, 1.0])
def test_every_member_is_kept_with_the_stated_probability(
    source: Randomness, probability: float
) -> None:
    kept = np.zeros((400, 200), bool)
    for row in kept:
        row[source.poisson_subset(len(row), probability)] = True
    counts = int(kept.sum())
    assert stats.binomtest(counts, kept.size, probability).pvalue > 0.01
    # The mutation that this test is for: a rate a tenth too small.
    assert stats.binomtest(int(0.9 * counts), kept.size, probability).pvalue < 1e-3
    if probability < 1.0:  # and members and draws have coins of their own
        found = stats.binom(200, probability)
        spread = kept.sum(axis=1).var() / found.var()
        assert 0.7 < spread < 1.4
        assert 0.5 < kept.sum(axis=0).var() / stats.binom(400, probability).var() < 1.6


@pytest.mark.usefixtures("fixed_entropy")
def test_places_of_a_secure_subset_say_nothing_about_its_members() -> None:
    source = SecureRandomness()
    orders = list(itertools.permutations(range(4), 2))
    drawn = [tuple(source.subset(4, 2).tolist()) for _ in range(4000)]
    assert stats.chisquare([drawn.count(order) for order in orders]).pvalue > 0.01


def test_each_secure_value_is_half_a_sum_of_four(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Of the four draws of a value, in turns, one is 1 and the others are 0.
    monkeypatch.setattr(keystream, "normal", lambda count, std: std * np.eye(4).ravel())
    noise = SecureRandomness().gaussian(16, 6.0)
    signs = noise.reshape(4, 4) / 3.0  # which draws, in what sense, are in each value
    assert set(signs.ravel()) == {-1.0, 1.0}
    # Orthogonal: a rotation of independent Gaussians.
    np.testing.assert_array_equal(signs @ signs.T, 4 * np.eye(4))


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 5, 4095, 4096, 4097])
@pytest.mark.parametrize("source", [SecureRandomness(), SeededRandomness(5)])
def test_as_many_values_as_asked_for(source: Randomness, size: int) -> None:
    draws = source.gaussian(size, 1.0)
    assert draws.shape == (size,)
    assert len(set(draws)) == size


@pytest.mark.parametrize("std", [1.0, 0.999, 0.08, 3.0, 1e-30])
def test_rounding_keeps_24_bits_below_the_deviation(std: float) -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(scale=std, size=1000)
    grid = 2.0 ** np.floor(np.log2(std)) / 2**24
    assert std / 2**25 < grid <= std / 2**24
    expected = np.array([round(float(v / grid)) * grid for v in values])
    np.testing.assert_array_equal(noise.round_to_grid(values.copy(), std), expected)


def test_only_the_secure_source_is_private() -> None:
    assert SecureRandomness.private
    assert not SeededRandomness.private
    for source in (SecureRandomness(), SeededRandomness(0)):
        assert isinstance(source, Randomness)
        assert source.for_step(1, 2).private == source.private


def test_secure_source_cannot_be_seeded() -> None:
    assert not inspect.signature(SecureRandomness).parameters
    np.random.seed(0)  # noqa: NPY002  # what a run might seed must not matter
    first = SecureRandomness().gaussian(8, 1.0)
    np.random.seed(0)  # noqa: NPY002
    assert not np.array_equal(first, SecureRandomness().gaussian(8, 1.0))


def test_copies_of_the_secure_source_never_repeat_it() -> None:
    source = SecureRandomness()
    source.gaussian(8, 1.0)  # a source that kept state would have it by now
    twins = [source, copy.copy(source), copy.deepcopy(source)]
    twins += [pickle.loads(pickle.dumps(source)), source.for_step(0, 0)]
    draws = {twin.gaussian(8, 1.0).tobytes() for twin in twins}
    assert len(draws) == len(twins)


@pytest.mark.process
def test_forked_processes_never_repeat_the_secure_source() -> None:
    source = SecureRandomness()
    source.gaussian(8, 1.0)
    children = []
    for _ in range(3):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.write(write, source.gaussian(8, 1.0).tobytes())
            os._exit(0)
        os.close(write)
        children.append((pid, read))
    draws = {source.gaussian(8, 1.0).tobytes()}
    for pid, read in children:
        draws.add(os.read(read, 64))
        os.close(read)
        os.waitpid(pid, 0)
    assert len(draws) == 4


def test_seeded_step_depends_on_seed_node_and_step_only() -> None:
    def draw(seed: int, node: int, step: int, before: int = 0) -> bytes:
        source = SeededRandomness(seed)
        source.gaussian(before, 1.0)
        source = source.for_step(node, step)
        return source.gaussian(4, 1.0).tobytes() + source.subset(100, 5).tobytes()

    assert draw(1, 2, 3) == draw(1, 2, 3, before=7)
    settings = list(itertools.product((1, 2), (0, 1, 2**63), (0, 1, 2)))
    assert len({draw(*setting) for setting in settings}) == len(settings)


def test_seeded_values_are_pinned() -> None:
    # From numpy's documented SeedSequence and PCG64 streams: a change of these figures
    # would silently change every simulation.
    source = SeededRandomness(7).for_step(node=3, step=11)
    generator = np.random.Generator(
        np.random.PCG64(np.random.SeedSequence(7, spawn_key=(3, 11)))
    )
    expected = generator.standard_normal(5) * 0.5
    np.testing.assert_array_equal(source.gaussian(5, 0.5), expected)


def test_many_seeded_values_are_pinned() -> None:
    # Literally Box and Muller's pairs, from numpy's documented stream.
    size, std = 5001, 0.5
    sequence = np.random.SeedSequence(7, spawn_key=(3, 11))
    words = np.random.PCG64(sequence).random_raw(2501).tolist()
    halves = [half for word in words for half in (word & 0xFFFFFFFF, word >> 32)]
    expected = np.empty(5002)
    for i in range(2501):
        radius = std * math.sqrt(-2 * math.log((halves[i] + 0.5) / 2**32))
        angle = 2 * math.pi * halves[2501 + i] / 2**32
        expected[i] = radius * math.cos(angle)
        expected[2501 + i] = radius * math.sin(angle)
    draws = SeededRandomness(7).for_step(node=3, step=11).gaussian(size, std)
    np.testing.assert_allclose(draws, expected[:size], atol=2e-6)


@pytest.mark.parametrize(("seed", "node", "step"), [(-1, 0, 0), (0, -1, 0), (0, 0, -1)])
def test_negative_seeds_are_refused(seed: int, node: int, step: int) -> None:
    with pytest.raises(ValueError, match="at least 0"):
        SeededRandomness(seed).for_step(node, step)


def test_no_global_state_is_touched() -> None:
    before = np.random.get_state()[1].tolist()  # type: ignore[index]  # noqa: NPY002
    SecureRandomness().gaussian(10, 1.0)
    SeededRandomness(time.time_ns()).gaussian(10, 1.0)
    after = np.random.get_state()[1].tolist()  # type: ignore[index]  # noqa: NPY002
    assert before == after
