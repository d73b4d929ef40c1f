import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest

from flwr_safedshb.aggregation import SMEA
from flwr_safedshb.aggregation.gram import gram_matrix
from simulations.benchmarks import aggregation, grid, growth, large, peers, result
from simulations.benchmarks.aggregation import FULL, QUICK, GridSettings
from simulations.benchmarks.families import (
    ALIE_DEVIATIONS,
    FAMILIES,
    HOSTILE,
    Vectors,
    make_family,
)
from simulations.benchmarks.grid import (
    Cell,
    GridSample,
    count_best,
    measure_sample,
    median_ratio,
    median_speedup,
    read_certificate,
)
from simulations.benchmarks.growth import Growth
from simulations.benchmarks.measure import call_alone, thread_seconds, time_in_turns
from simulations.benchmarks.peers import Price, Subset, brute_force, measure_price
from simulations.benchmarks.result import compare_thresholds
from tests.oracles import Floats, brute_force_smea

T = TypeVar("T")


@pytest.mark.parametrize("name", FAMILIES)
def test_families_repeat_and_differ_by_seed(name: str) -> None:
    x = make_family(name, 9, 3, 12, seed=1)
    assert x.shape == (9, 12)
    assert x.dtype == np.float32
    assert x.tobytes() == make_family(name, 9, 3, 12, seed=1).tobytes()
    assert not np.array_equal(x, make_family(name, 9, 3, 12, seed=2))


def test_families_hold_the_attacks_they_are_named_after() -> None:
    for seed, deviation in enumerate(ALIE_DEVIATIONS):
        x = make_family("alie", 9, 3, 12, seed)
        expected = x[3:].mean(axis=0) + deviation * x[3:].std(axis=0)
        np.testing.assert_allclose(x[:3], np.tile(expected, (3, 1)), rtol=1e-5)
    x = make_family("sign-flip", 9, 3, 500, 0)
    np.testing.assert_allclose(x[0], -x[3:].mean(axis=0), rtol=1e-6)
    # A flipped sign is an attack only on a mean that is not near zero.
    assert np.linalg.norm(x[3:].mean(axis=0)) > 0.9 * np.sqrt(500)
    spreads = make_family("heterogeneous", 200, 1, 500, 0).std(axis=1)
    assert spreads.max() > 10 * spreads.min()
    spreads = make_family("isotropic", 200, 1, 500, 0).std(axis=1)
    assert spreads.max() < 1.5 * spreads.min()


def test_hostile_inputs_have_the_sizes_of_their_names() -> None:
    for name, (vectors, f) in HOSTILE.items():
        assert name.endswith(f"({len(vectors)}, {f})")
        assert 2 * f < len(vectors)


def test_calls_take_turns_until_it_is_enough() -> None:
    order: list[str] = []
    calls = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    seconds = time_in_turns(calls, enough=60.0, most=3)
    assert order == ["a", "b"] * 3
    assert [len(s) for s in seconds.values()] == [3, 3]
    # A first turn is always complete.
    assert [len(s) for s in time_in_turns(calls, -1.0, 9).values()] == [1, 1]


def test_waiting_for_the_processor_is_not_work() -> None:
    seconds, _ = thread_seconds(lambda: time.sleep(0.2))
    assert seconds < 0.1


@pytest.mark.parametrize("seed", range(4))
def test_brute_force_finds_the_best_subset(seed: int) -> None:
    x = np.random.default_rng(seed).normal(size=(8, 5)).astype(np.float32)
    _, best = brute_force_smea(x.astype(np.float64), 3)
    np.testing.assert_allclose(brute_force(x, 3), x[best[0]].mean(axis=0), rtol=1e-5)


def test_brute_force_goes_through_all_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.random.default_rng(7).normal(size=(9, 4)).astype(np.float32)
    whole = brute_force(x, 3)
    monkeypatch.setattr(peers, "BATCH", 5)
    assert np.array_equal(brute_force(x, 3), whole)


@pytest.mark.parametrize("d", [6, 1000])
def test_peers_look_only_at_the_subsets_they_are_given(d: int) -> None:
    """Or else a price from a sample would not be the price of the sample."""
    x = np.random.default_rng(0).normal(size=(7, d)).astype(np.float32)
    for peer in peers.load_peers().values():
        for subset in [(0, 2, 3, 5, 6), (0, 1, 2, 3, 4)]:
            answer = peer(x, 2, [subset])
            np.testing.assert_allclose(
                answer, x[list(subset)].mean(axis=0), rtol=1e-4, atol=1e-6
            )
        # And at all of them otherwise: the answer is a mean of five.
        assert peer(x, 2, None).shape == (d,)


class Clock:
    """A peer whose call takes 0.03 s and 0.01 s for each subset, by its own clock.

    The first calls take a second more each.
    """

    def __init__(self, total: int, slow: int = 0) -> None:
        self.now, self.total, self.calls, self.slow = 0.0, total, 0, slow

    def peer(self, x: Vectors, f: int, subsets: list[Subset] | None) -> Floats:
        self.now += 0.03 + 0.01 * (self.total if subsets is None else len(subsets))
        self.now += self.slow > 0
        self.slow -= 1
        self.calls += subsets is None
        return np.zeros(x.shape[1])

    def thread_seconds(self, call: Callable[[], T]) -> tuple[float, T]:
        before = self.now
        value = call()
        return self.now - before, value


@pytest.mark.parametrize(("limit", "sampled"), [(460.0, True), (461.0, False)])
def test_price_of_a_sample_is_that_of_all_subsets(
    limit: float, sampled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = make_family("isotropic", 20, 6, 4, 0)
    clock = Clock(math.comb(20, 6))
    monkeypatch.setattr(peers, "thread_seconds", clock.thread_seconds)
    best = tuple(range(14))
    found = measure_price(clock.peer, x, 6, best, limit, np.random.default_rng(0))
    assert found.seconds == pytest.approx(0.03 + 0.01 * 38_760)
    assert found.extrapolated is sampled
    assert clock.calls == (0 if sampled else 1)
    # Zeros are not the mean of the best subset.
    assert found.found is (None if sampled else False)


@pytest.mark.parametrize("slow", [1, 2, 3, 4])
def test_a_slow_moment_makes_no_whole_call_of_a_long_one(
    slow: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = make_family("isotropic", 20, 6, 4, 0)
    clock = Clock(math.comb(20, 6), slow)
    monkeypatch.setattr(peers, "thread_seconds", clock.thread_seconds)
    rng = np.random.default_rng(0)
    found = measure_price(clock.peer, x, 6, tuple(range(14)), 60.0, rng)
    assert clock.calls == 0
    assert 380 < found.seconds < 500


def test_price_knows_the_right_answer_from_a_neighbouring_one() -> None:
    x = make_family("isotropic", 9, 3, 40, 0)
    subset = SMEA().weigh(gram_matrix([[row] for row in x]), 3).subset
    assert subset is not None
    best = tuple(subset.tolist())
    rng = np.random.default_rng(0)
    assert measure_price(brute_force, x, 3, best, 60.0, rng).found is True
    outside = next(i for i in range(9) if i not in best)
    assert not peers.is_mean(x[list(best)].mean(axis=0), x, (outside, *best[1:]))


def sample(
    cell: Cell,
    smea: float,
    name: str = "alie",
    gap: float = 0.0,
    prices: dict[str, Price] | None = None,
) -> GridSample:
    seconds = {"SMEA": smea, "gram": 1.0, "BLAS": 0.5, "eigvalsh": 1e-3}
    return GridSample(cell, name, 0, seconds, gap, 1.5, prices or {})


def test_ratios_are_medians_over_inputs() -> None:
    cell = (20, 6, 69)
    prices = [Price(s, extrapolated=False, found=s > 15) for s in (10.0, 20.0, 90.0)]
    group = [
        sample(cell, smea, prices={"ByzFL": p})
        for smea, p in zip((1.0, 4.0, 3.0), prices, strict=True)
    ]
    assert median_ratio(group, "SMEA", "BLAS") == 6.0
    assert median_speedup(group, "ByzFL") == result.Measurement(10.0, "whole calls")
    assert median_speedup(group, "ByzPy") is None
    assert count_best(group, "ByzFL") == (2, 3)
    assert count_best(group, "ByzPy") == (0, 0)


def verdicts(figures: dict[str, result.Measurement]) -> dict[str, str]:
    rows = compare_thresholds("aggregation", figures).rows
    return {str(row[0]): str(row[3]) for row in rows if row[3] != result.NOT_MEASURED}


@pytest.mark.parametrize("slow", [False, True])
def test_thresholds_see_what_they_are_about(slow: bool) -> None:
    def asked(peer: str, seconds: float) -> dict[str, Price]:
        found = None if peer == "ByzFL" else True
        return {peer: Price(seconds / (2 if slow else 1), found is None, found)}

    samples = [
        sample((20, 6, 69), 1.0, prices=asked("ByzFL", 301.0)),
        sample((20, 6, 100_000), 1.0, prices=asked("ByzFL", 10_001.0)),
        sample((20, 6, 4096), 1.0, prices=asked("ByzPy", 51.0)),
        # The worst size decides, of those with n <= 30.
        sample((30, 9, 100_000), 3.5 if slow else 2.9, "isotropic"),
        sample((40, 8, 100_000), 99.0),
        sample((50, 10, 69), 5.1 if slow else 4.9),
        sample((50, 10, 100_000), 5.1 if slow else 4.9, gap=0.01 if slow else 0.0),
    ]
    found = verdicts(grid.read_figures(samples))
    assert len(found) == 7
    assert set(found.values()) == {"MISSED" if slow else "met"}


def test_answers_that_differ_from_brute_force_are_reported() -> None:
    right, wrong = (Price(1.0, False, found) for found in (True, False))
    first = sample((7, 3, 69), 1.0, prices={"brute force": right})
    second = sample((7, 3, 69), 1.0, prices={"brute force": wrong})
    name = "same subset as brute force"
    assert verdicts(grid.read_figures([first, first])) == {name: "met"}
    assert verdicts(grid.read_figures([first, second])) == {name: "MISSED"}


def test_an_answer_without_a_certificate_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "hostile inputs: certified answers"
    monkeypatch.setattr(aggregation, "HOSTILE", {"three": (np.eye(3), 1)})
    for kappa, verdict in ((9.0, "met"), (math.inf, "MISSED")):
        found = (1.0, kappa)
        monkeypatch.setattr(aggregation, "read_certificate", lambda _, f=found: f)
        table, share = aggregation.measure_hostile()
        assert len(table.rows) == 1
        assert verdicts({name: share}) == {name: verdict}


def test_certificate_is_exact_or_a_gap() -> None:
    x = np.zeros((7, 2))
    assert read_certificate(SMEA().weigh(x @ x.T, 3)) == (0.0, 12.0)
    circle, f = HOSTILE["circle (40, 15)"]
    wide = circle.astype(np.float64)
    gap, kappa = read_certificate(SMEA(max_nodes=10).weigh(wide @ wide.T, f))
    assert gap > 0.1
    assert kappa > 6.0


def test_measure_asks_peers_and_compares_answers() -> None:
    found = measure_sample(
        (9, 3, 20), "isotropic", 0, {"brute force": brute_force}, 60.0
    )
    assert found.gap == 0.0
    assert found.seconds.keys() == {"SMEA", "gram", "BLAS", "eigvalsh"}
    assert found.prices["brute force"].found is True


@pytest.mark.process
def test_functions_are_called_in_processes_of_their_own() -> None:
    (seconds,) = call_alone(grid.time_cells, [(7, 3, 8)], NUMBA_DISABLE_JIT="1")
    assert seconds > 0.0
    # Memory that a compiler has freed would be used again: let it be in the cache.
    call_alone(grid.compile_search)
    # A second copy of ten models of 4 MB could not be missed.
    assert 0.5 < call_alone(aggregation.measure_memory, 10, 1_000_000) < 5.0


def test_full_run_covers_the_sizes_that_targets_ask_for() -> None:
    needed = {(20, 6, 69), (20, 6, 4096), (20, 6, 100_000), (50, 10, 69), (100, 10, 69)}
    assert needed <= set(FULL.cells)
    assert set(QUICK.cells).isdisjoint(needed)


def curve(costs: list[float], theory: list[float]) -> Growth:
    sizes = [1, 10, 100, 1000]
    bounds = dict(zip(sizes, theory, strict=True))
    name = "Gram matrix: exponent of n"
    return Growth(name, "", "s", "n", dict(zip(sizes, costs, strict=True)), bounds)


def test_exponent_is_that_of_the_last_points() -> None:
    squares = [5.0, 1e2, 1e4, 1e6]
    assert curve(squares, squares).measured == pytest.approx(2.0)
    cubes = [5.0, 1e3, 1e6, 1e9]
    for costs, verdict in ((squares, "met"), (cubes, "MISSED")):
        found = growth.read_figures([curve(costs, squares)])
        assert {*verdicts(found).values()} == {verdict}


def test_search_visits_less_than_all_subsets_and_says_if_not() -> None:
    nodes = growth.count_nodes(12, 4)
    assert nodes.costs.keys() == {2, 3, 4}
    assert all(cost >= 1 for cost in nodes.costs.values())
    assert nodes.theory == {2: 66.0, 3: 220.0, 4: 495.0}
    assert {*verdicts(growth.read_figures([nodes])).values()} == {"met"}
    slow = Growth("SMEA's nodes", "", "nodes", "f", {2: 67.0}, {2: 66.0})
    assert {*verdicts(growth.read_figures([slow])).values()} == {"MISSED"}


def test_calls_on_many_vectors_are_held_against_their_thresholds() -> None:
    call = large.LargeCall("circle", "n/5", 128, 25, 1.0, 0.1, 9.0, true=True)
    later = large.LargeCall("circle", "n/5", 200, 40, 2.0, 0.3, 9.0, true=True)
    good = [call, call, later, call]
    assert [row[:2] for row in large.make_table(good).rows] == [("circle", "n/5")]
    assert {*verdicts(large.read_figures(good)).values()} == {"met"}
    slow = large.LargeCall("circle", "n/5", 200, 40, 2.1, 0.33, 9.0, true=False)
    bad = verdicts(large.read_figures([call, call, slow, call]))
    assert {*bad.values()} == {"MISSED"}


def test_a_certificate_that_is_false_is_seen() -> None:
    x = make_family("isotropic", 12, 2, 20, 0).astype(np.float64)
    answer = SMEA().weigh(x @ x.T, 2)
    gap, kappa = read_certificate(answer)
    assert large.is_true(x @ x.T, answer, gap, kappa)
    assert not large.is_true(x @ x.T, answer, gap, 0.9 * kappa)
    assert not large.is_true(2.0 * x @ x.T, answer, gap, kappa)


@pytest.mark.federation
def test_tiny_run_prints_a_table_and_writes_its_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = GridSettings(((5, 2, 8), (7, 3, 8)), 2, peer_limit=2.0, whole=False)
    monkeypatch.setattr(aggregation, "QUICK", tiny)
    monkeypatch.setattr(aggregation, "load_peers", lambda: {"brute force": brute_force})
    monkeypatch.setenv("COLUMNS", "160")
    costs, bounds = {1: 1.0, 2: 2.0, 4: 4.0}, {1: 1.0, 2: 4.0, 4: 16.0}
    name = "Gram matrix: exponent of n"
    gram_matrix = Growth(name, "d = 1", "s", "n", costs, bounds)
    curves = [gram_matrix, growth.count_nodes(9, 3)]
    monkeypatch.setattr(growth, "measure_growth", lambda far: curves)
    result.run_benchmark("aggregation", ["--quick", "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    # A peer that is not installed has a column that says so.
    assert printed.count("absent") == 2 * 2 + 1
    assert "Gram matrix: exponent of n, d = 1" in printed
    assert "brute force 8 of 8" in printed
    written = json.loads((tmp_path / "aggregation.json").read_text())
    assert len(written["raw"]["samples"]) == 2 * 2 * len(FAMILIES)
    assert written["raw"]["settings"]["seeds"] == 2
    assert (tmp_path / "aggregation.png").stat().st_size > 10_000
