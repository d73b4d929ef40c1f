"""What one example can change in the sum, as floating-point numbers, by search.

Every search here is shown to find a defect that is planted in the numbers.
"""

import itertools
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from torch import nn

from flwr_safedshb.privacy.clipping import clipped_sum as sums
from flwr_safedshb.privacy.clipping.clipped_sum import GradientPart
from flwr_safedshb.privacy.clipping.gradients import ClippedGradients

torch.set_num_threads(1)

F32, F64 = torch.float32, torch.float64


def norm(vector: torch.Tensor) -> float:
    """The norm, up to the rounding of float64, of values that do not overflow it."""
    return float(torch.linalg.vector_norm(vector.double()))


def gap(one: torch.Tensor, other: torch.Tensor) -> float:
    return norm(one.double() - other.double())


class Mean(nn.Module):
    """A layer over positions, whose mean is the output."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layer(x)
        return outputs.flatten(2).mean(2) if outputs.dim() > 3 else outputs.mean(1)


def total(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return outputs.sum(dim=1)


def test_positions_that_cancel_do_not_hide_a_gradient() -> None:
    layer = nn.Linear(64, 64, bias=False)
    x = torch.tensor([2.0**24, 1, 1, -(2.0**24) - 2]).view(1, 4, 1).expand(1, 4, 64)
    for dtype in (F32, F64):
        clipped = ClippedGradients(Mean(layer).to(dtype), total, 1.0)
        for scale in (1.0, 2.0**10, 2.0**60):
            found = clipped.flat_sum(x.to(dtype) * scale, torch.zeros(1))
            assert norm(found) <= 1.0


HOSTILE = (0.0, 1e-45, 1e-38, 1e-20, 1.0, 2.0**24, 1e19, 1e30, 3e38, -1.0)
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "outer": (lambda: nn.Linear(70, 70), (70,)),
    "positions": (lambda: Mean(nn.Linear(70, 70)), (5, 70)),
    "convolution": (lambda: Mean(nn.Conv2d(8, 64, 3)), (8, 5, 5)),
    "deep": (
        lambda: nn.Sequential(nn.Linear(70, 70), nn.ReLU(), nn.Linear(70, 4)),
        (70,),
    ),
    "norms": (
        lambda: nn.Sequential(nn.Linear(70, 70), nn.LayerNorm(70), nn.Linear(70, 4)),
        (70,),
    ),
}


@pytest.mark.parametrize("dtype", [F32, torch.float16, torch.bfloat16, F64])
@pytest.mark.parametrize("name", MODELS)
def test_no_weights_and_no_examples_move_the_sum_by_more(
    name: str, dtype: torch.dtype
) -> None:
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model = make().to(dtype)
    clipped = ClippedGradients(model, total, 1.0)
    generator = torch.Generator().manual_seed(1)
    pool = torch.tensor(HOSTILE)

    def drawn(*size: int) -> torch.Tensor:
        choice = torch.randint(3, (), generator=generator)
        plain = torch.randn(size, generator=generator)
        if choice == 0:
            return plain.to(dtype)
        odd = pool[torch.randint(len(pool), size, generator=generator)]
        if choice == 1:
            return odd.to(dtype)
        return (plain * odd.flatten()[0]).to(dtype)

    worst = 0.0
    for _ in range(40):
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(drawn(*p.shape))
        batch, others = drawn(9, *shape), drawn(9, *shape)
        targets = torch.zeros(9)
        other = torch.cat([others[:1], batch[1:]])
        used = torch.ones(9, dtype=torch.bool)
        whole = clipped.flat_sum(batch, targets, used)
        moved = gap(whole, clipped.flat_sum(other, targets))
        used[0] = False
        removed = gap(whole, clipped.flat_sum(batch, targets, used))
        alone = norm(clipped.flat_sum(batch[:1], targets[:1]))
        worst = max(worst, moved / 2.0, removed, alone)
    assert 0.5 < worst <= 1.0


def aligned(dtype: torch.dtype, count: int, width: int = 40) -> list[GradientPart]:
    """Gradients of equal direction, so that every rounding adds up."""
    rows = torch.full((count, width), 1.0 + 2.0**-12, dtype=dtype)
    return [
        GradientPart(rows * torch.linspace(3, 5, count).unsqueeze(1), slice(0, width))
    ]


@pytest.mark.parametrize("count", [1, 2, 25, 64, 65, 300])
@pytest.mark.parametrize("dtype", [F32, F64])
def test_lowered_clip_is_close_to_the_clip(count: int, dtype: torch.dtype) -> None:
    found = sums.clip_and_sum(aligned(dtype, count), (1, count, 40), 0.7, dtype)[0]
    share = norm(found) / (0.7 * count)
    assert found.dtype == (F32 if dtype == F32 and count <= 64 else F64)
    assert 1 - 6e-4 < share <= 1.0
    if dtype == F64:
        assert share > 1 - 1e-8
    if count == 25:
        assert share > 1 - 1e-4


ROWS = {
    # Squares that vanish one by one beside a large one.
    "one large value": torch.cat([torch.ones(1), torch.full((999,), 2.0**-13)]),
    # Values that a narrower type makes smaller.
    "many bits": torch.full((1000,), 1.0 + 2.0**-12),
    "random": torch.randn(1000, generator=torch.Generator().manual_seed(0)),
}


def worst_share() -> float:
    """The most that one example moves a sum, in units of the bound."""
    worst, at = 0.0, slice(0, 1000)
    for row, scale, clip in itertools.product(
        ROWS.values(), (2.0, 6.0, 2.0**30, 2.0**60), (0.7, 0.9, 1.3)
    ):
        rows = (scale * row).expand(64, 1000)
        found = [
            sums.clip_and_sum([GradientPart(batch, at)], (1, 64, 1000), clip, F32)[0]
            for batch in (rows, torch.cat([-rows[:1], rows[1:]]))
        ]
        alone = sums.clip_and_sum(
            [GradientPart(rows[:1], at)], (1, 1, 1000), clip, F32
        )[0]
        worst = max(worst, gap(*found) / (2.0 * clip), norm(alone) / clip)
    return worst


def test_one_among_many_that_round_alike_moves_the_sum_within_bounds() -> None:
    assert 0.999 < worst_share() <= 1.0


def raised(factors: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    return factors * (1 + 2.0**-20)


def in_float32(rows: torch.Tensor) -> torch.Tensor:
    found = torch.zeros(len(rows))
    for column in rows.square().T:
        found += column
    return found.double()


def of_other_numbers(rows: torch.Tensor) -> torch.Tensor:
    return rows.bfloat16().double().square().sum(dim=1)


@pytest.mark.parametrize(
    ("place", "name", "defect"),
    [
        (sums, "lower_clip_norm", lambda clip_norm, *_: clip_norm),
        (torch, "nextafter", raised),
        (sums, "squared_norms", in_float32),
        (sums, "squared_norms", of_other_numbers),
    ],
)
def test_defect_is_found(
    place: object,
    name: str,
    defect: Callable[..., object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(place, name, defect)
    assert worst_share() > 1.0


def test_large_norms_are_never_below_the_exact_ones() -> None:
    generator = torch.Generator().manual_seed(0)
    for length in (1, 255, 2047, 2100):
        for exponent in (-149, -60, 0, 100):
            if length >= 2048 and exponent == 100:
                continue  # of these squares, float32 has none
            rows = torch.randn(2, length, generator=generator) * 2.0**exponent
            for row, found in zip(rows, sums.squared_norms(rows), strict=True):
                exact = sum((Fraction(x) ** 2 for x in row.tolist()), Fraction(0))
                assert Fraction(float(found)) * (1 + Fraction(2) ** -30) >= exact
                # What squares may have lost to underflow is added.
                lost = length * Fraction(2) ** (-125 if length >= 2048 else -1021)
                assert Fraction(float(found)) <= exact * (1 + Fraction(2) ** -14) + lost


@pytest.mark.parametrize("size", [1e-20, 1e-10, 1.0])
def test_factors_that_underflow_let_nothing_through(size: float) -> None:
    # f g is denormal, where a rounding is anything, and the inputs are huge.
    inputs = torch.full((1, 2), 3e38)
    clipped = []
    for g in torch.linspace(1.0, 3.0, 60).tolist():
        outer = GradientPart(torch.full((1, 2), g * size), None, inputs, slice(0, 4))
        clipped.append(sums.clip_and_sum([outer], (1, 1, 4), 2.0**-40, F32)[0])
    assert max(map(norm, clipped)) <= 2.0**-40


@pytest.mark.parametrize("count", [3, 64, 100])
def test_nothing_around_a_call_makes_its_sums_narrower(count: int) -> None:
    clipped = ClippedGradients(nn.Linear(80, 80), total, 1.0)
    x = torch.randn(1, 80).expand(count, 80)
    plain = clipped.flat_sum(x, torch.zeros(count))
    with torch.autocast("cpu", torch.bfloat16):
        found = clipped.flat_sum(x, torch.zeros(count))
    # All examples are the same: the share of C that is lost is that of rounding.
    assert (1 - 6e-4) * count < norm(found) <= count
    with torch.no_grad():
        assert torch.equal(clipped.flat_sum(x, torch.zeros(count)), plain)


def test_products_in_less_than_float32_are_not_trusted() -> None:
    left, right = torch.randn(1, 60, 40), torch.randn(1, 60, 40)
    exact = (left.double().mT @ right.double()).float()
    before = torch.get_float32_matmul_precision()
    try:
        for precision in ("high", "medium"):
            torch.set_float32_matmul_precision(precision)
            found = torch.empty(1, 40, 40)
            sums.sum_outer_products(left, right, found)
            assert torch.equal(found, exact)
    finally:
        torch.set_float32_matmul_precision(before)
    sums.sum_outer_products(left, right, found)
    assert not torch.equal(found, exact)


def test_models_of_a_few_parameters_are_summed_in_float64() -> None:
    for width, dtype in ((4, F64), (70, F32)):
        clipped = ClippedGradients(nn.Linear(width, width), total, 1.0)
        found = clipped.flat_sum(torch.randn(3, width), torch.zeros(3))
        assert found.dtype == dtype
    assert sums.WIDE == 4096
