"""Models of well-known layers against the definition, one example at a time."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from flwr_safedshb.privacy.clipping import parts
from flwr_safedshb.privacy.clipping.gradients import (
    ClippedGradients,
    UnsupportedModelError,
)
from flwr_safedshb.privacy.clipping.layers import LayerChain
from flwr_safedshb.privacy.clipping.parts import Products, Rooms
from tests.clipping import OwnForward, assert_close, cross_entropy, literal, path_of

torch.set_num_threads(1)

Batch = tuple[torch.Tensor, torch.Tensor]


class Head(nn.Module):
    """Averages whatever positions there are, and classifies."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.linear(x.flatten(2).mean(dim=2))
        return outputs


class Residual(nn.Module):
    """Layers with functions between them, and one that works in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.relu = nn.ReLU(inplace=True)
        self.second = nn.Conv2d(4, 4, 1)
        self.head = Head(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.norm(self.first(x)))
        outputs: torch.Tensor = self.head(functional.relu(y + self.second(y)))
        return outputs


class Words(nn.Module):
    """Attention over words, in the usual way."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 8, padding_idx=2)
        self.norm = nn.LayerNorm(8)
        self.keys, self.values = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        words = self.norm(self.words(x))
        weights = (self.keys(words) @ words.mT).softmax(dim=2)
        outputs: torch.Tensor = self.head((weights @ self.values(words)).mean(dim=1))
        return outputs


def floats(*shape: int) -> Callable[[], Batch]:
    return lambda: (torch.randn(7, *shape), torch.randint(3, (7,)))


def words(*shape: int) -> Callable[[], Batch]:
    return lambda: (torch.randint(9, (7, *shape)), torch.randint(3, (7,)))


def partly_frozen() -> nn.Module:
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.GroupNorm(1, 4), nn.Conv2d(4, 4, 1), Head(4)
    )
    model[0].weight.requires_grad_(False)
    model[1].bias.requires_grad_(False)
    model[2].requires_grad_(False)
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch]]] = {
    "conv1d, dilated": (
        lambda: nn.Sequential(
            nn.Conv1d(2, 4, 3, stride=2, dilation=2, padding=3), Head(4)
        ),
        floats(2, 12),
    ),
    "conv2d, groups": (
        lambda: nn.Sequential(
            nn.Conv2d(4, 6, (3, 2), stride=(1, 2), padding=(0, 1), groups=2), Head(6)
        ),
        floats(4, 5, 6),
    ),
    "conv2d, same": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 4, padding="same", bias=False), Head(4)),
        floats(2, 5, 5),
    ),
    "conv3d": (
        lambda: nn.Sequential(nn.Conv3d(2, 3, 2, stride=2, padding=1), Head(3)),
        floats(2, 3, 4, 5),
    ),
    "conv with few positions": (
        lambda: nn.Sequential(nn.Conv2d(16, 16, 3), Head(16)),
        floats(16, 4, 4),
    ),
    "layer norm over two axes": (
        lambda: nn.Sequential(
            nn.LayerNorm((3, 4)), nn.Tanh(), nn.Flatten(), nn.Linear(24, 3)
        ),
        floats(2, 3, 4),
    ),
    "layer norm without bias": (
        lambda: nn.Sequential(nn.LayerNorm(4, bias=False), nn.Linear(4, 3)),
        floats(4),
    ),
    "norms without weights": (
        lambda: nn.Sequential(nn.LayerNorm(4, elementwise_affine=False), Head(2)),
        floats(2, 4),
    ),
    "words, one axis": (lambda: nn.Embedding(9, 3), words()),
    "words, two axes": (
        lambda: nn.Sequential(nn.Embedding(9, 3), nn.Flatten(), nn.Linear(36, 3)),
        words(4, 3),
    ),
    "attention": (Words, words(6)),
    "residual, in place": (Residual, floats(2, 4, 4)),
    "partly frozen": (partly_frozen, floats(2, 5, 5)),
}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("clip_norm", [0.05, 0.7, 100.0])
@pytest.mark.parametrize("kept", [parts.MAX_KEPT, 0])
@pytest.mark.parametrize("block", [parts._BLOCK, 100])
def test_sum_is_the_literal_one(
    name: str,
    clip_norm: float,
    kept: int,
    block: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parts, "MAX_KEPT", kept)
    monkeypatch.setattr(parts, "_BLOCK", block)
    make_model, make_batch = MODELS[name]
    model = make_model()
    sums = ClippedGradients(model, cross_entropy, clip_norm)
    for size in (7, 3, 5):  # nothing of one call is left in the next
        inputs, targets = (part[:size] for part in make_batch())
        expected = literal(model, cross_entropy, inputs, targets, clip_norm)
        assert_close(sums(inputs, targets), expected)
    assert path_of(sums) == "LayerChain"


@pytest.mark.parametrize("name", ["conv2d, same", "residual, in place"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_example_that_is_not_finite_contributes_zero(name: str, bad: float) -> None:
    make_model, make_batch = MODELS[name]
    model = make_model()
    inputs, targets = make_batch()
    sums = ClippedGradients(model, cross_entropy, 0.3)
    others = sums(inputs[2:], targets[2:])
    inputs[1].view(-1)[3] = inputs[0].view(-1)[0] = bad
    assert_close(sums(inputs, targets), others, 1e-6)
    inputs.view(len(inputs), -1)[:, 0] = bad
    assert all(float(s.abs().max()) == 0 for s in sums(inputs, targets))


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("form", [True, False])
def test_products_need_not_be_formed(groups: int, kept: bool, form: bool) -> None:
    count, inputs, outputs, positions = 5, 4, 3, 6
    a = torch.randn(count, groups, inputs, positions)
    g = torch.randn(count, groups, outputs, positions)
    right = torch.einsum("kjql,kjpl->kjqp", g.double(), a.double())
    room = torch.full((count, groups * outputs * inputs), math.nan)
    part = Products(
        lambda examples: a[examples],
        g,
        inputs,
        lambda g: torch.einsum("kjql,kjpl->jqp", g, a),
        lambda: room if kept else None,
    )
    part._form = form
    if not form:
        part._room = None
    elif kept:
        part._room = room
    norms = right.flatten(1).norm(dim=1)
    torch.testing.assert_close(part.norms(), norms, rtol=1e-5, atol=0)
    factors = torch.rand(count, dtype=torch.float64)
    expected = torch.einsum("k,kjqp->jqp", factors, right)
    found = part.weighted(factors).view(groups, outputs, inputs)
    torch.testing.assert_close(found, expected.float())


def test_cheaper_way_to_a_norm_is_chosen() -> None:
    def forms(positions: int, size: int, room: bool) -> bool:
        g = torch.empty(1, 1, size, positions)
        kept = torch.empty(1, size * size) if room else None
        part = Products(lambda _: g, g, size, lambda g: g, lambda: kept)
        return part._form

    assert not forms(4, 256, room=True)
    assert forms(100, 8, room=True)
    # Between them, where a gradient that is dropped would be formed twice.
    assert forms(16, 128, room=True)
    assert not forms(16, 128, room=False)


def test_small_norms_do_not_vanish_between_large_and_small() -> None:
    # In float32 the square of either factor's norm is 0 or infinite.
    a = torch.full((1, 1, 2, 3), 1e25)
    g = torch.full((1, 1, 2, 3), 1e-25)
    part = Products(lambda _: a, g, 2, lambda g: g, lambda: None)
    part._form = False
    assert float(part.norms()) == pytest.approx(6.0)


def test_room_is_used_again_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    rooms, layer, other = Rooms(), nn.Linear(4, 2), nn.Linear(4, 2)
    like = torch.empty(0)
    first, fewer = rooms.room(layer, 5, like), rooms.room(layer, 3, like)
    assert first is not None
    assert fewer is not None
    assert first.shape == (5, 8)
    assert fewer.shape == (3, 8)
    assert first.data_ptr() == fewer.data_ptr()
    monkeypatch.setattr(parts, "MAX_KEPT", 8 * 8)
    assert rooms.room(other, 4, like) is None
    assert rooms.room(other, 3, like) is not None


class Flattened(nn.Module):
    """Puts positions on the axis of the examples."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.inner(x.reshape(-1, 4)).reshape(len(x), -1, 4)
        outputs: torch.Tensor = self.head(inner.tanh().mean(dim=1))
        return outputs


class Overwritten(nn.Module):
    """Changes the input of a layer after the layer has seen it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        y = self.inner(x)
        if len(x) > 4:  # not while the first examples are probed
            x.mul_(2.0)
        outputs: torch.Tensor = self.scale(y + x)
        return outputs


class Named(nn.Module):
    """Gives a layer its input by name."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.inner(input=x)
        return outputs


class Unused(nn.Module):
    """Has a layer that no loss depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.other = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.other(x)
        outputs: torch.Tensor = self.inner(x)
        return outputs


class Twice(nn.Module):
    """Uses a layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.head(self.inner(self.inner(x).tanh()))
        return outputs


def test_input_by_name_is_an_input() -> None:
    model = Named()
    inputs, targets = torch.randn(6, 4), torch.randint(3, (6,))
    sums = ClippedGradients(model, cross_entropy, 0.3)
    expected = literal(model, cross_entropy, inputs, targets, 0.3)
    assert_close(sums(inputs, targets), expected)


@pytest.mark.parametrize("make", [Unused, Twice])
def test_what_the_formulas_do_not_cover_goes_through_hooks(
    make: Callable[[], nn.Module],
) -> None:
    model = make()
    inputs, targets = torch.randn(6, 4), torch.randint(3, (6,))
    sums = ClippedGradients(model, cross_entropy, 0.3)
    expected = literal(model, cross_entropy, inputs, targets, 0.3)
    assert_close(sums(inputs, targets), expected)
    assert path_of(sums) == "Hooked"


def test_input_that_was_overwritten_is_refused() -> None:
    sums = ClippedGradients(Overwritten(), cross_entropy, 0.3)
    with pytest.raises(RuntimeError, match="inplace operation"):
        sums(torch.randn(6, 4), torch.randint(3, (6,)))


def test_positions_on_the_axis_of_the_examples_are_refused() -> None:
    sums = ClippedGradients(Flattened(), cross_entropy, 0.3)
    with pytest.raises((UnsupportedModelError, RuntimeError)):
        sums(torch.randn(6, 5, 4), torch.randint(3, (6,)))


def hooked_layer() -> nn.Module:
    layer = nn.Linear(4, 3)
    layer.register_forward_hook(lambda layer, inputs, output: 2.0 * output)
    return OwnForward(layer)


def tied() -> nn.Module:
    model = OwnForward(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    layers = model.inner
    assert isinstance(layers, nn.Sequential)
    layers[1].weight = layers[0].weight
    return model


class Scaled(nn.Linear):
    """A layer with a forward of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2.0 * super().forward(x)


@pytest.mark.parametrize(
    "make",
    [
        hooked_layer,
        tied,
        lambda: OwnForward(Scaled(4, 3)),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)),
        lambda: nn.Bilinear(2, 2, 3),
        lambda: nn.Sequential(nn.Conv1d(1, 1, 2, padding_mode="circular")),
    ],
)
def test_other_models_do_not_fit(make: Callable[[], nn.Module]) -> None:
    assert not LayerChain.fits(make())
