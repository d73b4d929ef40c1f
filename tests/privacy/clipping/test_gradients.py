"""Clipped sums against the definition, one example at a time."""

import copy
import functools
import math
from collections.abc import Callable

import pytest
import torch
from opacus.layers import DPLSTM
from torch import nn
from torch.nn import functional

from flwr_safedshb.privacy.clipping import clipped_sum as sums
from flwr_safedshb.privacy.clipping import ghost_norms as layers
from flwr_safedshb.privacy.clipping import gradients
from flwr_safedshb.privacy.clipping.gradients import ClippedGradients
from flwr_safedshb.privacy.plan import Clipping
from tests.clipping import OwnForward, assert_close, cross_entropy, literal, way_of

# Threads cost more than they bring on matrices of this size.
torch.set_num_threads(1)

# torch's way to say that it does one example after the other.
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")

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
    """Attention over words and their positions, which have no axis of examples."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 8, padding_idx=2)
        self.positions = nn.Embedding(6, 8)
        self.norm = nn.LayerNorm(8)
        self.keys, self.values = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        words = self.norm(self.words(x) + self.positions(torch.arange(x.shape[1])))
        weights = (self.keys(words) @ words.mT).softmax(dim=2)
        outputs: torch.Tensor = self.head((weights @ self.values(words)).mean(dim=1))
        return outputs


class Scaled(nn.Module):
    """A layer without a formula."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class Shared(nn.Module):
    """One convolution used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 2, 3, padding=1)
        self.head = nn.Linear(2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.conv(torch.tanh(self.conv(x))).mean(dim=2))
        return y


class Frames(nn.Module):
    """Puts the frames of an example on the axis of the examples."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(2, 4, 2), nn.GroupNorm(2, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        frames = self.norm(self.conv(x.flatten(0, 1)))
        per_example = frames.unflatten(0, x.shape[:2]).tanh().mean(dim=(1, 3))
        y: torch.Tensor = self.head(per_example)
        return y


class Recurrent(nn.Module):
    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.inner, self.head = kind(4, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.inner(x)[0][:, -1])
        return y


class Attention(nn.Module):
    """torch's own attention, which uses a layer's weight behind the layer's back."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.inner(x, x, x)[0].mean(dim=1))
        return y


class Half(nn.Module):
    """Uses a weight through its layer, and once more behind its back."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(self.head(x), self.head.weight)


class Branching(nn.Module):
    """Decides by the values of an example what to do with it."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(x if len(x) > 1 or bool(x.sum() > 0) else 2 * x)
        return y


class Unused(nn.Module):
    """Has a layer that no loss depends on, and one that is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.other = nn.Linear(4, 3), nn.Linear(4, 3)
        self.idle = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.other(x)
        outputs: torch.Tensor = self.inner(input=x)
        return outputs


def floats(*shape: int) -> Callable[[], Batch]:
    return lambda: (torch.randn(7, *shape), torch.randint(3, (7,)))


def words(*shape: int) -> Callable[[], Batch]:
    return lambda: (torch.randint(10, (7, *shape)), torch.randint(3, (7,)))


def partly_frozen() -> nn.Module:
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.GroupNorm(1, 4), nn.Conv2d(4, 4, 1), Head(4)
    )
    model[0].weight.requires_grad_(False)
    model[1].bias.requires_grad_(False)
    model[2].requires_grad_(False)
    return model


def frozen_norm() -> nn.Module:
    model = nn.Sequential(nn.Conv1d(2, 4, 2), nn.BatchNorm1d(4), Head(4))
    norm = model[1].eval()
    assert isinstance(norm.running_mean, torch.Tensor)
    norm.running_mean.normal_()
    return model


def hooked() -> nn.Module:
    layer = nn.Linear(6, 3)
    layer.register_forward_hook(lambda layer, inputs, output: 2.0 * output)
    return layer


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    model[2].weight = model[0].weight
    return model


def chain(*layers: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*(copy.deepcopy(layer) for layer in layers))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch], str]] = {
    "linear": (lambda: nn.Linear(6, 3), floats(6), "plain"),
    "no bias": (lambda: nn.Linear(6, 3, bias=False), floats(6), "plain"),
    "mlp": (chain(nn.Linear(6, 70), nn.ReLU(), nn.Linear(70, 3)), floats(6), "plain"),
    "in place": (
        chain(nn.Linear(6, 9), nn.ReLU(inplace=True), nn.Linear(9, 3)),
        floats(6),
        "plain",
    ),
    "convolutions": (
        chain(
            nn.Conv2d(2, 4, 3, stride=2, padding=1),
            nn.GroupNorm(2, 4),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(16, 3),
        ),
        floats(2, 4, 4),
        "plain",
    ),
    "embedding": (
        chain(nn.Embedding(10, 4, padding_idx=2), nn.Flatten(), nn.Linear(20, 3)),
        words(5),
        "plain",
    ),
    "words, one axis": (lambda: nn.Embedding(10, 3), words(), "plain"),
    "words, two axes": (
        chain(nn.Embedding(10, 3), nn.Flatten(), nn.Linear(36, 3)),
        words(4, 3),
        "plain",
    ),
    "used twice": (
        lambda: nn.Sequential(layer := nn.Linear(6, 6), nn.Tanh(), layer),
        floats(6),
        "plain",
    ),
    "layer norm over two axes": (
        chain(nn.LayerNorm((3, 4)), nn.Tanh(), nn.Flatten(), nn.Linear(24, 3)),
        floats(2, 3, 4),
        "plain",
    ),
    "layer norm without bias": (
        chain(nn.LayerNorm(4, bias=False), nn.Linear(4, 3)),
        floats(4),
        "plain",
    ),
    "conv1d, dilated": (
        chain(nn.Conv1d(2, 4, 3, stride=2, dilation=2, padding=3), Head(4)),
        floats(2, 12),
        "vmap",
    ),
    "conv2d, groups": (
        chain(
            nn.Conv2d(4, 6, (3, 2), stride=(1, 2), padding=(0, 1), groups=2), Head(6)
        ),
        floats(4, 5, 6),
        "vmap",
    ),
    "conv2d, same": (
        chain(nn.Conv2d(2, 4, 4, padding="same", bias=False), Head(4)),
        floats(2, 5, 5),
        "vmap",
    ),
    "conv2d, circular": (
        chain(nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular"), Head(4)),
        floats(2, 5, 5),
        "vmap",
    ),
    "conv3d": (
        chain(nn.Conv3d(2, 3, 2, stride=2, padding=1), Head(3)),
        floats(2, 3, 4, 5),
        "vmap",
    ),
    "one position": (
        chain(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(4, 3)),
        floats(2, 3, 3),
        "plain",
    ),
    "examples without channels": (
        chain(nn.Conv1d(1, 4, 3), nn.Flatten(), nn.Linear(16, 3)),
        lambda: (torch.randn(7, 1, 6), torch.randint(3, (7,))),
        "plain",
    ),
    "own forward": (lambda: OwnForward(nn.Linear(6, 3)), floats(6), "vmap"),
    "attention, positions": (Words, words(6), "vmap"),
    "torch's attention": (Attention, floats(5, 8), "vmap"),
    "residual, in place": (Residual, floats(2, 4, 4), "vmap"),
    "partly frozen": (partly_frozen, floats(2, 5, 5), "vmap"),
    "frozen batch norm": (frozen_norm, floats(2, 5), "vmap"),
    "unknown layer": (chain(Scaled(), nn.Linear(6, 3)), floats(6), "vmap"),
    "shared layer": (Shared, floats(2, 5), "vmap"),
    "frames": (Frames, floats(3, 2, 5), "vmap"),
    "tied": (tied, floats(6), "vmap"),
    "hooked": (hooked, floats(6), "vmap"),
    "parametrised": (
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 3)),
        floats(6),
        "vmap",
    ),
    "unused": (Unused, floats(4), "vmap"),
    "lstm of Opacus": (lambda: Recurrent(DPLSTM), floats(3, 4), "vmap"),
    "lstm": (lambda: Recurrent(nn.LSTM), floats(3, 4), "alone"),
    "decides by values": (Branching, floats(6), "alone"),
    "behind its back": (Half, floats(6), "alone"),
}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("clip_norm", [0.05, 0.7, 100.0])
@pytest.mark.parametrize("narrow", [False, True])
def test_sum_is_the_literal_one(
    name: str, clip_norm: float, narrow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if narrow:  # as large models are summed: in float32, many examples in blocks
        monkeypatch.setattr(gradients, "WIDE", 0)
        monkeypatch.setattr(sums, "BLOCK", 3)
        monkeypatch.setattr(layers, "_CACHED", 100)
    make_model, make_batch, way = MODELS[name]
    model = make_model()
    total = ClippedGradients(model, cross_entropy, clip_norm)
    for size in (7, 3, 5):  # nothing of one call is left in the next
        inputs, targets = (part[:size] for part in make_batch())
        expected = literal(model, cross_entropy, inputs, targets, clip_norm)
        assert_close(total(inputs, targets), expected, 2e-5 if narrow else 1e-5)
    assert way_of(total) == way


def test_clip_is_exact_where_opacus_is_not() -> None:
    # Opacus divides by norm + 1e-6: with C = 1e-6 its factor would be half of ours.
    model = nn.Linear(1, 1, bias=False)
    loss = functools.partial(functional.l1_loss, reduction="none")
    total = ClippedGradients(model, loss, 1e-6)
    (found,) = total(torch.tensor([[1e-6]]), torch.tensor([[1e3]]))
    assert float(found) == pytest.approx(-1e-6, rel=1e-5)


def test_zero_gradient_is_no_division_by_zero() -> None:
    total = ClippedGradients(nn.Linear(2, 3), cross_entropy, 1.0)
    flat = ClippedGradients(nn.Linear(2, 3), lambda out, y: 0 * out.sum(1), 1.0)
    inputs, targets = torch.randn(4, 2), torch.randint(3, (4,))
    assert all(bool(t.isfinite().all()) for t in total(0 * inputs, targets))
    assert all(float(t.abs().sum()) == 0 for t in flat(inputs, targets))


def test_empty_batch_sums_to_zero() -> None:
    total = ClippedGradients(nn.Linear(6, 3), cross_entropy, 1.0)
    found = total(torch.empty(0, 6), torch.empty(0, dtype=torch.long))
    assert [tuple(t.shape) for t in found] == [(3, 6), (3,)]
    assert all(float(t.abs().sum()) == 0 for t in found)


@pytest.mark.parametrize("name", ["convolutions", "residual, in place", "lstm"])
def test_model_is_left_as_found_and_its_current_weights_are_used(name: str) -> None:
    make_model, make_batch, _ = MODELS[name]
    model = make_model().eval()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    attributes = [set(vars(m)) for m in (*model.modules(), *model.parameters())]
    total = ClippedGradients(model, cross_entropy, 1.0)
    inputs, targets = make_batch()
    total(inputs, targets)
    assert not model.training
    found = [set(vars(m)) for m in (*model.modules(), *model.parameters())]
    assert found == attributes
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    with torch.no_grad():
        for p in model.parameters():
            p.data = p + 0.3  # new storage, as a careless loader would leave it
    expected = literal(model, cross_entropy, inputs, targets, 1.0)
    assert_close(total(inputs, targets), expected)


@pytest.mark.parametrize("clipping", ["per-example", "ghost"])
@pytest.mark.parametrize("name", ["shared layer", "unknown layer", "lstm"])
def test_what_is_held_is_bounded_and_chunks_add_up(
    name: str, clipping: Clipping, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model, make_batch, _ = MODELS[name]
    model, (inputs, targets) = make_model(), make_batch()
    whole = ClippedGradients(model, cross_entropy, 0.5, clipping)(inputs, targets)
    total = ClippedGradients(model, cross_entropy, 0.5, clipping)
    path = total.prepare(inputs, targets)
    assert path.elements_per_example > 0
    asked: list[int] = []
    run = path.run

    def spy(
        inputs: Batch, targets: torch.Tensor, *_: object
    ) -> tuple[layers.Parts, torch.Tensor]:
        asked.append(len(targets))
        return run(inputs, targets)

    monkeypatch.setattr(path, "run", spy)
    monkeypatch.setitem(
        gradients.MAX_HELD_ELEMENTS, clipping, 3 * path.elements_per_example + 1
    )
    assert_close(total(inputs, targets), whole, 1e-6)
    assert asked == [3, 3, 1]


def test_gradients_of_large_layers_are_not_held() -> None:
    model = nn.Sequential(nn.Linear(6, 50), nn.ReLU(), nn.Linear(50, 3))
    path = ClippedGradients(model, cross_entropy, 1.0).prepare(*floats(6)())
    assert path.elements_per_example == 0


def test_inputs_that_want_a_gradient_change_nothing() -> None:
    total = ClippedGradients(nn.Linear(6, 3), cross_entropy, 1.0)
    inputs, targets = torch.randn(5, 6), torch.randint(3, (5,))
    expected = total(inputs, targets)
    assert_close(total(inputs.clone().requires_grad_(), targets), expected, 0.0)


def test_dropout_differs_between_examples_and_calls() -> None:
    model = nn.Sequential(nn.Linear(6, 20), nn.Dropout(0.5), nn.Linear(20, 3))
    for net in (model, OwnForward(model)):
        total = ClippedGradients(net, cross_entropy, 0.1)
        inputs, targets = torch.randn(1, 6).expand(9, 6), torch.zeros(9).long()
        first, second = (total.flat_sum(inputs, targets) for _ in range(2))
        assert not torch.equal(first, second)
        alone = total.flat_sum(inputs[:1], targets[:1])
        assert 0.0 < float(first.norm()) < 9 * float(alone.norm()) * (1 - 1e-3)


@pytest.mark.parametrize("clip_norm", [0.0, -1.0, math.nan, math.inf, 1e-300, 1e300])
def test_bad_clip(clip_norm: float) -> None:
    with pytest.raises(ValueError, match="clip_norm"):
        ClippedGradients(nn.Linear(2, 3), cross_entropy, clip_norm)


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="clipping='flat'"):
        ClippedGradients(nn.Linear(2, 3), cross_entropy, 1.0, "flat")  # type: ignore[arg-type]
    total = ClippedGradients(nn.Linear(2, 3), cross_entropy, 1.0)
    with pytest.raises(ValueError, match="pair up"):
        total(torch.zeros(3, 2), torch.zeros(2).long())


def test_batches_may_be_nested() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 3), nn.Linear(2, 3)

        def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return {"logits": self.one(batch["a"]) * self.two(batch["b"])}

    def loss(
        outputs: dict[str, torch.Tensor], targets: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        return cross_entropy(outputs["logits"], targets[0]) * targets[1]

    model = Pair()
    inputs = {"a": torch.randn(5, 4), "b": torch.randn(5, 2)}
    targets = torch.randint(3, (5,)), torch.rand(5)
    total = ClippedGradients(model, loss, 0.5)
    each = [
        total.flat_sum(
            {name: part[i : i + 1] for name, part in inputs.items()},
            tuple(part[i : i + 1] for part in targets),
        )
        for i in range(5)
    ]
    found = total.flat_sum(inputs, targets)
    torch.testing.assert_close(found, torch.stack(each).sum(dim=0))
    assert max(float(e.norm()) for e in each) == pytest.approx(0.5)
