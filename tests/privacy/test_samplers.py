import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from scipy import stats

from flwr_safedshb.audit.ledger_requests import least_epsilon
from flwr_safedshb.privacy.accounting.baselines import rdp
from flwr_safedshb.privacy.plan import PrivacyPlan, Sampling
from flwr_safedshb.privacy.randomness.noise import (
    Randomness,
    SecureRandomness,
    SeededRandomness,
)
from flwr_safedshb.privacy.samplers import load_samplers

Draw = Callable[[], tuple[int, ...]]
STEPS = 12_000


def plan(m: int, b: int, sampling: Sampling) -> PrivacyPlan:
    return PrivacyPlan(1.0, 1.0, batch_size=b, num_examples=m, sampling=sampling)


def drawn(plan: PrivacyPlan, source: Randomness) -> npt.NDArray[np.int64]:
    return plan.sampler.draw(plan, source)


def drawer(m: int, b: int, sampling: Sampling) -> Draw:
    source = SeededRandomness(11)
    return lambda: tuple(sorted(drawn(plan(m, b, sampling), source).tolist()))


def probabilities(m: int, b: int, sampling: Sampling) -> dict[tuple[int, ...], float]:
    """Every possible batch and how likely it must be."""
    sets = [s for k in range(m + 1) for s in itertools.combinations(range(m), k)]
    if sampling == "fixed":
        possible = [s for s in sets if len(s) == b]
        return dict.fromkeys(possible, 1 / len(possible))
    q = b / m
    return {s: q ** len(s) * (1 - q) ** (m - len(s)) for s in sets}


def uniformity(draw: Draw, expected: dict[tuple[int, ...], float]) -> float:
    """p-value that batches have the expected probabilities (chi-square)."""
    counts = Counter(draw() for _ in range(STEPS))
    if set(counts) - set(expected):
        return 0.0
    observed = [counts[s] for s in expected]
    scaled = [STEPS * p for p in expected.values()]
    return float(stats.chisquare(observed, scaled).pvalue)


def independence(draw: Draw) -> float:
    """p-value that a batch does not depend on the one before it (chi-square)."""
    batches = [draw() for _ in range(STEPS)]
    names = {s: i for i, s in enumerate(sorted(set(batches)))}
    if len(names) < 2:
        return 0.0
    table = np.zeros((len(names), len(names)))
    for before, after in itertools.pairwise(batches):
        table[names[before], names[after]] += 1
    return float(stats.chi2_contingency(table + 1e-9).pvalue)


@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
@pytest.mark.parametrize(("m", "b"), [(4, 2), (5, 1), (4, 3)])
def test_batches_have_the_probabilities_of_the_accountant(
    m: int, b: int, sampling: Sampling
) -> None:
    draw = drawer(m, b, sampling)
    assert uniformity(draw, probabilities(m, b, sampling)) > 1e-3
    assert independence(draw) > 1e-3


def epochs() -> Draw:
    """Shuffle once and walk through, as a data loader does."""
    rng = np.random.default_rng(0)
    order: list[int] = []

    def draw() -> tuple[int, ...]:
        nonlocal order
        if not order:
            order = rng.permutation(4).tolist()
        batch, order = order[:2], order[2:]
        return tuple(sorted(batch))

    return draw


def with_replacement() -> Draw:
    rng = np.random.default_rng(0)
    return lambda: tuple(sorted(rng.integers(4, size=2).tolist()))


def biased() -> Draw:
    """Draw the first example somewhat more often than the others."""
    rng = np.random.default_rng(0)
    weights = np.array([1.3, 1.0, 1.0, 1.0])
    weights /= weights.sum()
    return lambda: tuple(sorted(rng.choice(4, 2, replace=False, p=weights).tolist()))


def stuck() -> Draw:
    return lambda: (0, 1)


@pytest.mark.parametrize("mutation", [epochs, with_replacement, biased, stuck])
def test_wrong_fixed_samplers_are_rejected(mutation: Callable[[], Draw]) -> None:
    uniform = uniformity(mutation(), probabilities(4, 2, "fixed"))
    assert min(uniform, independence(mutation())) < 1e-6


@pytest.mark.parametrize("b", [1, 2])
def test_fixed_batches_are_not_mistaken_for_poisson_ones(b: int) -> None:
    assert uniformity(drawer(4, b, "fixed"), probabilities(4, b, "poisson")) < 1e-6
    assert uniformity(drawer(4, b, "poisson"), probabilities(4, b, "fixed")) < 1e-6


@pytest.mark.parametrize("source", [SecureRandomness(), SeededRandomness(1)])
def test_fixed_batch_has_b_distinct_examples(source: Randomness) -> None:
    for m, b in [(1, 1), (25, 25), (2763, 25)]:
        batch: npt.NDArray[np.int64] = drawn(plan(m, b, "fixed"), source)
        assert batch.dtype == np.int64
        assert len(set(batch.tolist())) == b
        assert 0 <= batch.min() <= batch.max() < m


@pytest.mark.parametrize("source", [SecureRandomness(), SeededRandomness(1)])
def test_poisson_batch_may_be_empty_or_full(source: Randomness) -> None:
    assert drawn(plan(6, 6, "poisson"), source).tolist() == [0, 1, 2, 3, 4, 5]
    sizes = {len(drawn(plan(3, 1, "poisson"), source)) for _ in range(200)}
    assert 0 in sizes  # (1 - 1/3)^3 = 0.3 each time
    assert max(sizes) <= 3


@pytest.mark.parametrize(("m", "b"), [(4, 5), (4, 0), (0, 0)])
@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
def test_impossible_batches_are_refused(m: int, b: int, sampling: Sampling) -> None:
    with pytest.raises(ValueError, match=r"batch_size|num_examples"):
        plan(m, b, sampling)


# What every sampler has to keep to, also one that was added as CONTRIBUTING says


@pytest.mark.parametrize("name", load_samplers())
def test_all_samplers_draw_distinct_examples(name: str) -> None:
    source = SeededRandomness(5)
    for m, b in ((1, 1), (7, 1), (7, 7), (11, 4)):
        if name == "whole" and b < m:
            continue
        for _ in range(50):
            batch = drawn(plan(m, b, name), source)
            assert batch.dtype == np.int64
            assert len(set(batch.tolist())) == len(batch)
            assert all(0 <= i < m for i in batch)


@pytest.mark.parametrize("name", load_samplers())
def test_all_samplers_cost_what_they_should(name: str) -> None:
    for adjacency in load_samplers()[name].adjacencies:
        m = 10 if name == "whole" else 100
        mine = PrivacyPlan(1.0, 2.0, 10, m, name, adjacency)
        for bound in mine.sampler.dominating_pairs(mine):
            for pair in (bound.above, bound.below):
                for mixture in (pair.top, pair.bottom):
                    assert sum(weight for weight, _ in mixture) == pytest.approx(1.0)
        spent = mine.epsilon(50, 1e-6)
        # No less than an attack on one step finds, no more than without any sampling.
        assert least_epsilon(mine, 1e-6) <= mine.epsilon(1, 1e-6) < spent
        assert spent <= PrivacyPlan(1.0, 2.0, 10, 10).epsilon(50, 1e-6) * (1 + 1e-9)
        assert spent <= rdp(mine, 50, 1e-6).epsilon
        louder = dataclasses.replace(mine, noise_multiplier=2.2)
        assert louder.epsilon(50, 1e-6) < spent < mine.epsilon(60, 1e-6)
        assert PrivacyPlan.from_json(mine.to_json()) == mine


def test_an_unknown_sampler_is_refused_with_the_names_that_there_are() -> None:
    words = ", ".join(map(repr, load_samplers()))
    with pytest.raises(ValueError, match=f"'shuffled' is unknown; use one of {words}$"):
        plan(4, 2, "shuffled")
