"""A reply longer than any honest one proves an adversary, and no honest one is."""

import itertools
import math
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid

from flwr_safedshb import NormBound, PrivacyPlan, SafeDSHB
from flwr_safedshb.aggregation import Average, TrimmedMean
from flwr_safedshb.algorithm.participation import bound_adversaries, split_risk
from flwr_safedshb.algorithm.run import NODES
from flwr_safedshb.app import client_app
from flwr_safedshb.client import SafeDSHBClient
from flwr_safedshb.flower.compat import set_message_id
from flwr_safedshb.flower.grid import WrappedGrid
from flwr_safedshb.privacy.randomness.noise import SeededRandomness
from flwr_safedshb.simulation.adversarial import replace_arrays
from flwr_safedshb.simulation.batched import BatchedGrid
from tests.federation import federation, flat, model
from tests.replies import Layers, record

D = 13  # of tests.federation's model
N, F, FRACTION = 100, 10, 0.3


def float32(values: np.ndarray[tuple[int, ...], np.dtype[np.floating]]) -> Array:
    return Array(values.astype(np.float32))


def test_noise_is_longer_with_about_the_risk_that_is_stated() -> None:
    """Gaussian concentration: never above the risk, and no factor two to spare."""
    rng = np.random.default_rng(0)
    for d in (1, 13, 300):
        lengths = np.linalg.norm(rng.normal(scale=0.5, size=(20_000, d)), axis=1)
        for risk in (Fraction(1, 10), Fraction(1, 1000)):
            bound = NormBound(1e-9, 0.5).gradient_norm(d, risk)
            assert np.mean(lengths > bound) <= risk
            assert np.mean(lengths > bound / 2) > risk


def test_poisson_batches_are_longer_with_at_most_the_risk_that_is_stated() -> None:
    rng = np.random.default_rng(0)
    for b, m in ((1, 50), (20, 40), (100, 10_000)):
        sizes = rng.binomial(m, b / m, size=100_000)
        for risk in (Fraction(1, 10), Fraction(1, 1000)):
            # All gradients along one direction, at the clip.
            bound = NormBound(2.0, 0.0, poisson_batch_size=b).gradient_norm(D, risk)
            assert np.mean(2.0 * sizes / b > bound) <= risk
            assert 2.0 < bound < 2.0 * (1 + 25 / b + 5 / math.sqrt(b))


def test_the_risk_is_divided_over_rounds_nodes_and_local_steps() -> None:
    strategy = SafeDSHB(norm_bound=NormBound(1.0, 0.1, confidence=0.9), local_steps=2)
    short = lambda partition, step, layers: record([0.01 * x for x in layers])  # noqa: E731
    found = strategy.start(federation(5, short), model(), 4).train_metrics_clientapp
    expected = 1.001 * (1 + 0.1 * (math.sqrt(D) + math.sqrt(2 * math.log(40 * 10))))
    assert [m["norm-bound"] for m in found.values()] == [pytest.approx(expected)] * 4


def test_with_weight_decay_the_bound_remembers_the_longest_weights() -> None:
    figures = NormBound(1.0, 0.0, weight_decay=0.5)
    # Three local steps: a gradient of 2 at weights of norm 10, which move by 0.1 g.
    longest, weights, slack = 0.0, 10.0, 1.001
    for _ in range(3):
        longest = max(longest, 2.0 + slack * 0.5 * weights)
        weights += 0.1 * longest
    assert figures.reply_norm(2.0, 0.0, 10.0, 0.1, 3) == pytest.approx(longest)
    # A momentum remembers gradients at longer weights.
    assert figures.reply_norm(2.0, 50.0, 10.0, 0.1, 3) == 50.0
    assert NormBound(1.0, 0.0).reply_norm(2.0, 0.0, 1e9, 1.0, 3) == 2.0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0.0, 1.0), r"clip_norm=0\.0 must be finite and above 0"),
        ((math.nan, 1.0), "clip_norm=nan"),
        ((1.0, -1.0), r"noise_std=-1\.0 must be finite and at least 0"),
        ((1.0, math.inf), "noise_std=inf"),
        ((1.0, 1.0, -1.0), r"weight_decay=-1\.0"),
        ((1.0, 1.0, 0.0, 0), "poisson_batch_size=0 must be at least 1"),
        ((1.0, 1.0, 0.0, None, 1.0), r"confidence=1\.0 must lie in \(0, 1\)"),
    ],
)
def test_figures_that_bound_nothing_are_refused(
    arguments: tuple[float, ...], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        NormBound(*arguments)  # type: ignore[arg-type]


def aligned(plan: PrivacyPlan, weight_decay: float, dimension: int = 20) -> BatchedGrid:
    """Return private clients whose every gradient is the same, at the clip."""
    inputs = torch.ones(plan.num_examples, dimension)
    linear = torch.nn.Linear(dimension, 1, bias=False)

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return 100.0 * outputs.squeeze(1) + 0.0 * targets

    def make(context: Context) -> SafeDSHBClient:
        return SafeDSHBClient(
            linear,
            loss,
            (inputs, torch.zeros(plan.num_examples)),
            plan,
            context,
            weight_decay=weight_decay,
            randomness=SeededRandomness(1),
        )

    return BatchedGrid(client_app(make), 20)


def weights(dimension: int = 20) -> ArrayRecord:
    return ArrayRecord({"weight": float32(np.full((1, dimension), 3.0))})


@pytest.mark.parametrize("local_steps", [1, 3])
@pytest.mark.parametrize("noise_multiplier", [0.0, 0.1, 3.0])
@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
def test_no_honest_reply_is_excluded(
    sampling: str, noise_multiplier: float, local_steps: int
) -> None:
    """Not even of clients whose gradients all point one way, with weight decay."""
    plan = PrivacyPlan(0.5, noise_multiplier, 4, 40, sampling=sampling)
    figures = NormBound(
        0.5, plan.noise_std, 0.1, 4 if sampling == "poisson" else None, 0.9
    )
    strategy = SafeDSHB(
        Average(),
        server_learning_rate=0.5,
        momentum=0.2,
        local_steps=local_steps,
        norm_bound=figures,
    )
    result = strategy.start(aligned(plan, 0.1), weights(), 10)
    for metrics in result.train_metrics_clientapp.values():
        assert metrics["replies"] == 20
        assert metrics["excluded"] == 0


def test_of_the_lengths_that_are_stated_none_is_vacuous() -> None:
    """Honest clients come within a third of the bound, and pass half of it."""
    plan = PrivacyPlan(0.5, 0.1, 4, 40)
    grid = Measured(aligned(plan, 0.0))
    figures = NormBound(0.5, plan.noise_std)
    strategy = SafeDSHB(Average(), momentum=0.0, norm_bound=figures)
    result = strategy.start(grid, weights(), 5)
    bound = result.train_metrics_clientapp[5]["norm-bound"]
    assert isinstance(bound, float)
    assert 2 / 3 * bound < max(grid.lengths) < bound
    half = SafeDSHB(
        Average(), momentum=0.0, norm_bound=NormBound(0.25, plan.noise_std / 2)
    )
    with pytest.raises(RuntimeError, match="20 too-long"):
        half.start(grid, weights(), 5)


class Measured(WrappedGrid):
    """A network that measures how long replies are."""

    def __init__(self, grid: Grid) -> None:
        super().__init__(grid)
        self.lengths: list[float] = []

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        replies = list(self.grid.pull_messages(message_ids))
        for reply in replies:
            (arrays,) = reply.content.array_records.values()
            self.lengths.append(float(np.linalg.norm(flat(arrays))))
        return replies


@pytest.mark.parametrize("factor", [0.999, 1.001, 2.0, 1e30])
def test_a_longer_reply_is_excluded_and_proves_an_adversary(factor: float) -> None:
    figures = NormBound(5.0, 1.0)
    bound = figures.gradient_norm(
        D, split_risk(1 - Fraction(figures.confidence), 1, 1) / 5
    )

    def spoil(partition: int, step: int, layers: Layers) -> RecordDict:
        if partition < 3:
            return record(list(layers))
        length = math.hypot(*(np.linalg.norm(layer) for layer in layers))
        scaled = [factor * bound / length * layer for layer in layers]
        return record([layer.astype(np.float32) for layer in scaled])

    strategy = SafeDSHB(TrimmedMean(), 2, norm_bound=figures)
    metrics = strategy.start(federation(5, spoil), model(), 1).train_metrics_clientapp
    excluded = 0 if factor < 1 else 2
    assert metrics[1].get("excluded-too-long", 0) == excluded
    assert metrics[1]["num-malicious-nodes"] == 2 - excluded
    assert metrics[1]["norm-bound"] == pytest.approx(bound)


def test_a_resumed_run_remembers_the_bound(tmp_path: Path) -> None:
    def spoil(partition: int, step: int, layers: Layers) -> RecordDict:
        # Only the first round starts from long weights: it takes them to 0.
        return record(
            [np.float32(1000.0 if step == 0 else 0.0) + 0 * x for x in layers]
        )

    def run(rounds: int, checkpoint: str) -> dict[int, MetricRecord]:
        strategy = SafeDSHB(
            norm_bound=NormBound(5000.0, 0.0, weight_decay=0.5),
            seed=1,
            momentum=0.0,
            checkpoint=tmp_path / checkpoint,
            stop_when=lambda number, _: number == stop,
        )
        start = ArrayRecord(
            {k: float32(a.numpy() + 1000.0) for k, a in model().items()}
        )
        return strategy.start(
            federation(3, spoil), start, rounds
        ).train_metrics_clientapp

    stop = 4
    whole = run(4, "whole.npz")
    stop = 2
    run(4, "parts.npz")
    stop = 4
    parts = run(4, "parts.npz")
    bounds = [metrics["norm-bound"] for metrics in parts.values()]
    assert bounds == [metrics["norm-bound"] for metrics in whole.values()]
    # Momentums may remember the long weights for ever.
    assert bounds == [bounds[0]] * 4
    assert bounds[0] == pytest.approx(1.001 * (5000 + 0.5 * 1000 * math.sqrt(D)))


class Colluders(WrappedGrid):
    """The F last nodes behave until `step`, and then send the same vector."""

    def __init__(self, grid: Grid, step: int, length: float) -> None:
        super().__init__(grid)
        self.step, self.length, self.sent = step, length, 0
        self.hostile = {*sorted(grid.get_node_ids())[-F:]}

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [self.spoil(r) for r in self.grid.pull_messages(message_ids)]

    def spoil(self, reply: Message) -> Message:
        due = reply.metadata.group_id == str(self.step + 1)
        if not due or reply.metadata.src_node_id not in self.hostile:
            return reply
        self.sent += 1
        (arrays,) = reply.content.array_records.values()
        size = sum(array.numpy().size for array in arrays.values())
        vector = np.full(size, self.length / math.sqrt(size))
        spoilt = Message(replace_arrays(reply.content, vector), reply_to=reply)
        set_message_id(spoilt, reply.metadata.message_id)
        spoilt.metadata.__dict__.update(reply.metadata.__dict__)
        return spoilt


def test_the_confidence_bounds_the_adversaries_of_all_rounds() -> None:
    """Exactly computed: N = 100, f = 10, fraction 0.3, 400 rounds."""
    rounds, chosen = 400, 30

    def exceeds(bound: int) -> Fraction:
        """Return P(more than `bound` of the drawn are adversarial in some round)."""
        ways = sum(
            math.comb(F, k) * math.comb(N - F, chosen - k) for k in range(bound + 1)
        )
        return 1 - Fraction(ways, math.comb(N, chosen)) ** rounds

    strategy = SafeDSHB(
        TrimmedMean(),
        F,
        fraction_train=FRACTION,
        stop_when=lambda number, _: number > 2,
    )
    result = strategy.start(federation(N), model(), rounds)
    metrics = result.train_metrics_clientapp.values()
    # The same in all rounds, of which these are the first.
    (bound,) = {m["num-malicious-nodes"] for m in metrics}
    assert {m["replies"] for m in metrics} == {chosen}
    assert isinstance(bound, int)
    assert exceeds(bound) <= Fraction(1, 1000)
    # With one less it does not hold, nor with what bounds each round alone.
    assert exceeds(bound - 1) > Fraction(1, 1000)
    assert 0.25 < exceeds(bound_adversaries(N, F, chosen, 0.999)) < 0.35


def test_an_open_number_of_rounds_has_a_series_that_sums_to_the_risk() -> None:
    risk = Fraction(1, 1000)
    parts = [split_risk(risk, t, None) for t in range(1, 2001)]
    assert risk * Fraction(999, 1000) < sum(parts) < risk
    assert all(later < part for part, later in itertools.pairwise(parts))
    assert sum(split_risk(risk, t, 7) for t in range(1, 8)) == risk


def exceeding_draw(step: int, bound: int) -> int:
    """Return a seed with which more than `bound` colluders are drawn in a step."""
    for seed in range(100_000):
        drawn = np.random.default_rng([seed, NODES, step]).choice(
            N, int(N * FRACTION), replace=False
        )
        if (drawn >= N - F).sum() > bound:
            return seed
    raise AssertionError


@pytest.mark.federation
def test_colluders_who_wait_for_their_round_gain_nothing_with_a_norm_bound() -> None:
    """Eight of ten are drawn, seven are withstood, and they send 1e6."""
    rounds, step = 25, 15
    # What bounds a round with 0.999 and seven, and not the run.
    confidence = 1 - 0.001 * rounds
    assert bound_adversaries(N, F, 30, 0.999) == 7
    seed = exceeding_draw(step, 7)
    plan = PrivacyPlan(1.0, 0.5, 20, 40)
    target = torch.linspace(-1.0, 1.0, 10)
    inputs = torch.from_numpy(
        np.random.default_rng(0).normal(size=(40, 10)).astype(np.float32)
    )
    linear = torch.nn.Linear(10, 1, bias=False)

    def squares(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs.squeeze(1) - targets) ** 2

    def make(context: Context) -> SafeDSHBClient:
        data = (inputs, inputs @ target)
        return SafeDSHBClient(
            linear, squares, data, plan, context, randomness=SeededRandomness(1)
        )

    def error(
        length: float, figures: NormBound | None, step: int = step, sent: int = 8
    ) -> float:
        grid = Colluders(BatchedGrid(client_app(make), N), step, length)
        strategy = SafeDSHB(
            TrimmedMean(),
            F,
            server_learning_rate=1.0,
            momentum=0.5,
            fraction_train=FRACTION,
            participation_confidence=confidence,
            norm_bound=figures,
            seed=seed,
        )
        initial = ArrayRecord({"weight": float32(np.zeros((1, 10)))})
        result = strategy.start(grid, initial, rounds)
        assert grid.sent == sent
        found = result.train_metrics_clientapp.values()
        excluded = sum(m.get("excluded-too-long", 0) for m in found)  # type: ignore[misc]
        assert excluded == (sent if figures and length > 100 else 0)
        return float(np.linalg.norm(flat(result.arrays) - target.numpy()))

    figures = NormBound(1.0, plan.noise_std)
    assert error(1e6, None) > 1e4
    without_attack = error(1e6, figures, step=rounds, sent=0)
    assert without_attack < 0.25 * float(target.norm())
    assert error(1e6, figures) < without_attack + 0.05
    # Just below the bound, they move a step by no more than it.
    bound = figures.gradient_norm(10, Fraction(1, 10**6) / (rounds * 30))
    assert error(0.99 * bound, figures) < without_attack + 1.0 * bound
