"""Clipped sums over persons, against the definition, one example at a time."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from flwr_safedshb.privacy.clipping import clipped_sum as sums
from flwr_safedshb.privacy.clipping import gradients
from flwr_safedshb.privacy.clipping.clipped_sum import GradientPart, clip_and_sum
from flwr_safedshb.privacy.clipping.gradients import ClippedGradients
from tests.clipping import OwnForward, assert_close, cross_entropy, way_of

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")

K = 3


def literal_by_owner(
    model: nn.Module,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    usable: torch.Tensor,
    clip_norm: float,
) -> torch.Tensor:
    """Sum the clipped mean gradients of persons with K places each, in float64."""
    parameters = [*model.parameters()]
    total = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64)
    for start in range(0, len(targets), K):
        gradients = []
        for i in range(start, start + K):
            if usable[i]:
                value = cross_entropy(model(inputs[i : i + 1]), targets[i : i + 1])
                found = torch.autograd.grad(value.sum(), parameters, allow_unused=True)
                whole = [
                    torch.zeros_like(p) if g is None else g
                    for p, g in zip(parameters, found, strict=True)
                ]
                gradients.append(torch.cat([g.flatten() for g in whole]).double())
        if gradients:
            mean = torch.stack(gradients).mean(dim=0)
            total += mean * min(1.0, clip_norm / float(mean.norm()))
    return total


class Words(nn.Module):
    """A table, convolutions over positions, a norm, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.conv, self.norm = nn.Conv1d(4, 6, 2), nn.LayerNorm(6)
        self.scale, self.head = nn.Parameter(torch.ones(6)), nn.Linear(6, 3)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.conv(self.table(words).mT).mT)
        outputs: torch.Tensor = self.head((x * self.scale).mean(dim=1))
        return outputs


class Branching(nn.Module):
    """Decides by the values of an example what to do with it."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(x if bool(x.sum() < 1e9) else 2 * x)
        return y


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "pairs": (
        lambda: nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 3)),
        (40,),
        "plain",
    ),
    "convolution": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3)
        ),
        (2, 5, 5),
        "plain",
    ),
    "positions": (
        lambda: nn.Sequential(nn.Linear(4, 5), nn.Flatten(), nn.Linear(30, 3)),
        (6, 4),
        "plain",
    ),
    "own forward": (lambda: OwnForward(nn.Linear(50, 3)), (50,), "vmap"),
    "words": (Words, (5,), "vmap"),
    "alone": (Branching, (5,), "alone"),
}


def draw(name: str, owners: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw K examples for each person."""
    count, shape = owners * K, MODELS[name][1]
    words = name == "words"
    inputs = torch.randint(7, (count, *shape)) if words else torch.randn(count, *shape)
    return inputs, torch.randint(3, (count,))


@pytest.mark.parametrize("max_float64_size", [10**6, 0])
@pytest.mark.parametrize("clip_norm", [0.3, 100.0])
@pytest.mark.parametrize("name", MODELS)
def test_sum_is_that_of_clipped_means(
    name: str,
    clip_norm: float,
    max_float64_size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ClippedGradients, "max_float64_size", max_float64_size)
    torch.manual_seed(1)
    make, _, way = MODELS[name]
    model, (inputs, targets) = make(), draw(name, 7)
    usable = torch.rand(7 * K) < 0.7
    usable[:K] = False  # a person without any example
    clipped = ClippedGradients(model, cross_entropy, clip_norm, per_owner=K)
    found = clipped.flat_sum(inputs, targets, usable)
    expected = literal_by_owner(model, inputs, targets, usable, clip_norm)
    # In float32 the clip is lowered by what rounding may add.
    assert_close([found], [expected], 1e-5 if max_float64_size else 2e-4)
    assert way_of(clipped) == way


@pytest.mark.parametrize("name", MODELS)
def test_chunks_hold_whole_persons(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(2)
    make, _, _ = MODELS[name]
    model, batch = make(), draw(name, 10)
    clipped = ClippedGradients(model, cross_entropy, 0.3, per_owner=K)
    whole = clipped.consume_batch(batch, 2)
    held = clipped.prepare(*batch).count_elements(K)
    limits = {"per-example": 2 * held + 1}
    monkeypatch.setattr(gradients, "MAX_HELD_ELEMENTS", limits)
    assert_close([*clipped.consume_batch(batch, 2)], [*whole])


@pytest.mark.parametrize("rows", [2, 5, 70])
@pytest.mark.parametrize("count", [1, 9, 60])
def test_norm_of_a_sum_of_pairs_is_bounded_from_above(rows: int, count: int) -> None:
    """Pairs that cancel up to rounding, and pairs that do not."""
    torch.manual_seed(rows * count)
    g, inputs = torch.randn(count, rows, 6), torch.randn(count, rows, 8)
    g[::2, 1:] = 0.0
    g[::2, 1], inputs[::2, 1] = -g[::2, 0], inputs[::2, 0]
    g[::2, 1] *= 1.0 + 2.0**-20
    g *= 2.0 ** torch.randint(-30, 30, (count, 1, 1))
    flat = g.flatten(0, 1), slice(48, 54), inputs.flatten(0, 1), slice(0, 48)
    bound = GradientPart(*flat, rows).squared_norms(1.0).sqrt()
    weight = torch.einsum("krq,krp->kqp", g.double(), inputs.double()).flatten(1)
    exact = torch.cat([weight, g.double().sum(dim=1)], dim=1).norm(dim=1)
    assert bool((bound >= exact).all())
    spread = sums.bound_spread(rows)
    terms = (
        g.double().norm(dim=2) * (1 + inputs.double().norm(dim=2) ** 2).sqrt()
    ).sum(1)
    assert bool((bound <= torch.maximum(exact, terms / spread) * 1.001).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("rows", "count"), [(5, 25), (5, 64), (100, 3)])
def test_exchanging_a_person_moves_the_sum_by_twice_the_clip(
    rows: int, count: int, dtype: torch.dtype
) -> None:
    """Pairs of others that cancel leave their rounding, which must not matter."""
    torch.manual_seed(3)
    worst = 0.0
    for scale in (1.0, 1e3, 1e6):
        g = torch.randn(count, rows, 12, dtype=dtype) * scale
        inputs = torch.randn(count, rows, 13, dtype=dtype)
        g[1:, 1::2] = -g[1:, : rows // 2 * 2 : 2]
        inputs[1:, 1::2] = inputs[1:, : rows // 2 * 2 : 2]
        found = []
        for sign in (1.0, -1.0):
            g[0], inputs[0] = sign * scale, 1.0
            flat = g.flatten(0, 1).clone(), None, inputs.flatten(0, 1).clone()
            part = GradientPart(*flat, slice(0, 156), rows)
            found.append(clip_and_sum([part], (1, count, 156), 1.0, dtype)[0].double())
        worst = max(worst, float((found[0] - found[1]).norm()))
    assert 1.95 < worst <= 2.0


def test_an_owner_with_a_gradient_that_is_not_finite_counts_as_zero() -> None:
    torch.manual_seed(4)
    model = nn.Linear(4, 3)
    clipped = ClippedGradients(model, cross_entropy, 1.0, per_owner=K)
    inputs, targets = torch.randn(3 * K, 4), torch.randint(3, (3 * K,))
    others = clipped.flat_sum(inputs[K:], targets[K:])
    inputs[1] = math.inf
    assert_close([clipped.flat_sum(inputs, targets)], [others])


def test_an_example_without_a_finite_loss_is_an_empty_place() -> None:
    torch.manual_seed(5)
    model = nn.Linear(4, 3)
    clipped = ClippedGradients(model, nn.CrossEntropyLoss(), 100.0, per_owner=K)
    inputs, targets = torch.randn(3 * K, 4), torch.randint(3, (3 * K,))
    usable = torch.ones(3 * K, dtype=torch.bool)
    usable[1] = False
    expected = clipped.flat_sum(inputs, targets, usable)
    targets[1] = 17  # no such class
    assert_close([clipped.flat_sum(inputs, targets)], [expected])


def test_a_batch_must_hold_whole_persons() -> None:
    clipped = ClippedGradients(nn.Linear(4, 3), cross_entropy, 1.0, per_owner=K)
    with pytest.raises(ValueError, match="3 places each"):
        clipped.flat_sum(torch.randn(K + 1, 4), torch.zeros(K + 1, dtype=torch.int64))
