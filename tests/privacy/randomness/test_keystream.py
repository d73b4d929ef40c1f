import itertools
import math
import os
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from cryptography.hazmat.primitives.ciphers.algorithms import AES128
from scipy import stats

from flwr_safedshb.privacy.randomness import keystream

Words = npt.NDArray[np.uint64]
DRAWS = 60_000


def in_turns(*answers: Words) -> Callable[[int], Words]:
    """Return a source of words that gives these answers, one at each call."""
    waiting = iter(answers)
    return lambda count: next(waiting)


def test_words_are_aes_in_counter_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "urandom", bytes)  # the key of zeros
    # The published encryption of the block of zeros under the key of zeros.
    first = bytes.fromhex("66e94bd4ef8a2c3b884cfa59ca342b2e")
    assert keystream.words(2).tobytes() == first
    # A counter: the second block is another one.
    assert keystream.words(4).tobytes()[:16] == first
    assert keystream.words(4).tobytes()[16:] != first


@pytest.mark.parametrize("count", [0, 1, 2, 3, 1000, 2**17 + 1])
def test_as_many_words_as_asked_for(count: int) -> None:
    drawn = keystream.words(count)
    assert drawn.dtype == np.uint64
    assert len(drawn) == count == len(set(drawn.tolist()))


def test_each_draw_has_its_own_key(monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[bytes] = []

    def spy(key: bytes) -> AES128:
        keys.append(key)
        return AES128(key)

    monkeypatch.setattr(keystream, "AES128", spy)
    keystream.normal(3, 1.0)
    keystream.subset(10, 2)
    keystream.uniform(10)
    assert len(keys) >= 3
    assert len(set(keys)) == len(keys)
    assert all(len(key) == 16 for key in keys)


@pytest.mark.usefixtures("fixed_entropy")
@pytest.mark.parametrize("bound", [2, 3, 7, 64])
def test_integers_are_uniform(bound: int) -> None:
    counts = np.bincount(keystream.integers(bound, DRAWS), minlength=bound)
    assert len(counts) == bound
    assert stats.chisquare(counts).pvalue > 0.01


def test_words_beyond_the_last_whole_range_are_drawn_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bound = 2**63 - 1  # 2^64 has it twice, and two words are left over
    good = np.array([5, 2**64 - 3], np.uint64)
    for left_over in (2**64 - 2, 2**64 - 1):
        bad = np.array([5, left_over], np.uint64)
        monkeypatch.setattr(keystream, "words", in_turns(bad, good))
        assert keystream.integers(bound, 2).tolist() == [5, bound - 1]


@pytest.mark.usefixtures("fixed_entropy")
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_subsets_are_uniform(size: int) -> None:
    subsets = list(itertools.combinations(range(5), size))
    position = {members: i for i, members in enumerate(subsets)}
    counts = np.zeros(len(subsets))
    for _ in range(4000):
        drawn = keystream.subset(5, size)
        assert len(drawn) == size
        counts[position[tuple(sorted(drawn.tolist()))]] += 1
    assert stats.chisquare(counts).pvalue > 0.01


@pytest.mark.usefixtures("fixed_entropy")
@pytest.mark.parametrize("size", [2, 3])
def test_all_orders_of_a_subset_are_equally_likely(size: int) -> None:
    orders = list(itertools.permutations(range(4), size))
    drawn = [tuple(keystream.subset(4, size).tolist()) for _ in range(4000)]
    counts = [drawn.count(order) for order in orders]
    assert stats.chisquare(counts).pvalue > 0.01


@pytest.mark.parametrize("size", [0, 1, 499, 500, 501, 999, 1000])
def test_subsets_have_distinct_members(size: int) -> None:
    drawn = keystream.subset(1000, size)
    assert drawn.dtype == np.int64
    assert len(drawn) == size == len(set(drawn.tolist()) & set(range(1000)))


def test_a_subset_of_too_few_distinct_numbers_draws_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    same, more = np.full(4, 7, np.uint64), np.array([7, 3, 7, 1], np.uint64)
    monkeypatch.setattr(keystream, "words", in_turns(same, more))
    assert keystream.subset(10, 2).tolist() == [7, 3]


@pytest.mark.usefixtures("fixed_entropy")
def test_uniform_numbers() -> None:
    drawn = keystream.uniform(DRAWS)
    assert stats.kstest(drawn, "uniform").pvalue > 0.01
    assert drawn.min() >= 0.0
    assert drawn.max() < 1.0


def test_the_largest_word_stays_below_one(monkeypatch: pytest.MonkeyPatch) -> None:
    largest = np.array([2**64 - 1], np.uint64)
    monkeypatch.setattr(keystream, "words", lambda count: largest)
    assert keystream.uniform(1) == 1.0 - 2.0**-53


@pytest.mark.usefixtures("fixed_entropy")
def test_normals_are_gaussian_far_out_too() -> None:
    drawn = keystream.normal(2_000_000, 1.0)
    assert stats.kstest(drawn, "norm").pvalue > 0.01
    for far in (3.0, 4.0, 4.5):
        expected = 2 * stats.norm.sf(far) * len(drawn)
        found = np.count_nonzero(abs(drawn) > far)
        assert abs(found - expected) < 4 * math.sqrt(expected)


def test_normals_are_literally_those_of_the_polar_method(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = keystream.words(2 * 200)
    asked: list[int] = []

    def words(count: int) -> Words:
        asked.append(count)
        return given[:count]

    monkeypatch.setattr(keystream, "words", words)
    drawn = keystream.normal(41, 3.0)
    tries = asked[0] // 2
    first: list[float] = []
    second: list[float] = []
    for i in range(tries):
        signed = [int(w) - 2**64 * (int(w) >= 2**63) for w in given[[i, tries + i]]]
        x, y = (number / 2**63 for number in signed)
        s = x**2 + y**2
        if s < 1 and len(first) < 21:
            first.append(3.0 * x * math.sqrt(-2 * math.log(s) / s))
            second.append(3.0 * y * math.sqrt(-2 * math.log(s) / s))
    np.testing.assert_allclose(drawn, [*first, *second][:41], rtol=1e-13)


def test_too_few_points_in_the_disc_are_all_drawn_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    corner = np.full(1000, 2**63 - 1, np.uint64)  # x = y, nearly 1: outside
    good = keystream.words(1000)
    tries: list[int] = []

    def words(count: int) -> Words:
        tries.append(count)
        return corner[:count] if len(tries) == 1 else good[:count]

    monkeypatch.setattr(keystream, "words", words)
    drawn = keystream.normal(50, 1.0)
    assert len(tries) == 2
    assert len(set(drawn.tolist())) == 50
