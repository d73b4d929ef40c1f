import functools
import math
from collections.abc import Callable
from typing import Literal

import pytest
import torch
from opacus.grad_sample.linear import compute_linear_norm_sample
from torch import nn
from torch.nn import functional

from flwr_safedshb.privacy.clipping import checks, gradients, hooked, hooks, parts
from flwr_safedshb.privacy.clipping.gradients import (
    ClippedGradients,
    Loss,
    UnsupportedModelError,
    check_model,
)
from flwr_safedshb.privacy.plan import Clipping
from tests.clipping import (
    OwnForward,
    assert_close,
    cross_entropy,
    literal,
    path_of,
    summed,
)

# Threads cost more than they bring on matrices of this size.
torch.set_num_threads(1)

# What a model takes by itself, and the two that go through hooks.
PATHS = ("closed", "per-example", "ghost")
# torch's way to say that data have no gradient.
pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")
all_paths = pytest.mark.parametrize("path", PATHS)
Batch = tuple[torch.Tensor, torch.Tensor]


class Unflat(nn.Module):
    """A linear layer on inputs with two axes of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x)).mean(dim=(1, 2))


class Scaled(nn.Module):
    """A layer that Opacus has no formula for, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class Positions(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(dim=1)


class Shared(nn.Module):
    """One convolution used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 2, 3, padding=1)
        self.head = nn.Linear(2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.conv(torch.tanh(self.conv(x))).mean(dim=2))
        return y


def frozen_first_layer() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), Scaled(), nn.LayerNorm(6), nn.Linear(6, 3))
    model[0].requires_grad_(False)
    model[3].bias.requires_grad_(False)
    return model


def floats(*shape: int) -> Callable[[], Batch]:
    return lambda: (torch.randn(7, *shape), torch.randint(3, (7,)))


def words() -> Batch:
    return torch.randint(8, (7, 5)), torch.randint(3, (7,))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch]]] = {
    "linear, own forward": (
        lambda: OwnForward(nn.Linear(6, 3)),
        lambda: (torch.randn(9, 6), torch.randint(3, (9,))),
    ),
    "mlp, own forward": (
        lambda: OwnForward(
            nn.Sequential(nn.Linear(6, 70), nn.ReLU(), nn.Linear(70, 3))
        ),
        lambda: (torch.randn(9, 6), torch.randint(3, (9,))),
    ),
    "linear": (lambda: nn.Linear(6, 3), floats(6)),
    "no bias": (lambda: nn.Linear(6, 3, bias=False), floats(6)),
    "mlp": (
        lambda: nn.Sequential(nn.Linear(6, 70), nn.ReLU(), nn.Linear(70, 3)),
        floats(6),
    ),
    "conv and group norm": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, stride=2, padding=1),
            nn.GroupNorm(2, 4),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(16, 3),
        ),
        floats(2, 4, 4),
    ),
    "embedding": (
        lambda: nn.Sequential(
            nn.Embedding(8, 4, padding_idx=2), nn.Flatten(), nn.Linear(20, 3)
        ),
        words,
    ),
    "linear on few positions": (
        lambda: nn.Sequential(nn.Embedding(8, 9), nn.Linear(9, 9), Positions()),
        words,
    ),
    "linear on many positions": (
        lambda: nn.Sequential(nn.Linear(2, 3), nn.Tanh(), Positions()),
        floats(11, 2),
    ),
    "two axes of positions": (
        lambda: nn.Sequential(Unflat(), nn.Linear(4, 3)),
        floats(2, 2, 6),
    ),
    "unknown and frozen layers": (frozen_first_layer, floats(6)),
    "shared layer": (Shared, floats(2, 5)),
}


@all_paths
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("clip_norm", [0.05, 0.7, 100.0])
def test_sum_is_the_literal_one(name: str, path: str, clip_norm: float) -> None:
    torch.manual_seed(1)
    make_model, make_batch = MODELS[name]
    model = make_model()
    sums = summed(model, cross_entropy, clip_norm, path)
    for _ in range(2):  # the second call must not remember the first
        inputs, targets = make_batch()
        expected = literal(model, cross_entropy, inputs, targets, clip_norm)
        assert_close(sums(inputs, targets), expected)


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("linear", "LinearChain"),
        ("mlp", "LinearChain"),
        ("mlp, own forward", "LayerChain"),
        ("conv and group norm", "LayerChain"),
        ("embedding", "LayerChain"),
        ("two axes of positions", "LayerChain"),
        ("unknown and frozen layers", "Hooked"),
        ("shared layer", "Hooked"),
    ],
)
def test_the_best_path_is_taken(name: str, path: str) -> None:
    torch.manual_seed(1)
    make_model, make_batch = MODELS[name]
    sums = ClippedGradients(make_model(), cross_entropy, 1.0)
    sums(*make_batch())
    assert path_of(sums) == path


@all_paths
def test_clip_is_exact_where_opacus_is_not(path: str) -> None:
    # Opacus divides by norm + 1e-6: with C = 1e-6 its factor would be half of ours.
    model = nn.Linear(1, 1, bias=False)
    loss = functools.partial(functional.l1_loss, reduction="none")
    sums = summed(model, loss, 1e-6, path)
    (total,) = sums(torch.tensor([[1e-6]]), torch.tensor([[1e3]]))
    assert float(total) == pytest.approx(-1e-6, rel=1e-5)


@all_paths
def test_zero_gradient_is_no_division_by_zero(path: str) -> None:
    sums = summed(nn.Linear(2, 3), cross_entropy, 1.0, path)
    flat = summed(nn.Linear(2, 3), lambda out, y: 0 * out.sum(1), 1.0, path)
    inputs, targets = torch.randn(4, 2), torch.randint(3, (4,))
    assert all(bool(t.isfinite().all()) for t in sums(0 * inputs, targets))
    assert all(float(t.abs().sum()) == 0 for t in flat(inputs, targets))


@all_paths
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_example_that_is_not_finite_contributes_zero(path: str, bad: float) -> None:
    torch.manual_seed(2)
    model = MODELS["mlp"][0]()
    inputs, targets = torch.randn(6, 6), torch.randint(3, (6,))
    sums = summed(model, cross_entropy, 1.0, path)
    others = sums(inputs[[0, 1, 3, 5]], targets[[0, 1, 3, 5]])
    inputs[2, 1] = inputs[4, 0] = bad
    assert_close(sums(inputs, targets), others, 1e-6)
    inputs[:, 0] = bad
    assert all(float(t.abs().max()) == 0 for t in sums(inputs, targets))


@all_paths
def test_infinite_gradient_contributes_zero_and_not_zero_times_infinity(
    path: str,
) -> None:
    model = nn.Linear(2, 1, bias=False)
    sums = summed(model, lambda out, y: out[:, 0], 1.0, path)
    (total,) = sums(torch.tensor([[math.inf, 1.0], [0.3, 0.4]]), torch.zeros(2))
    assert total.flatten().tolist() == pytest.approx([0.3, 0.4])


@all_paths
def test_huge_but_finite_gradient_is_clipped(path: str) -> None:
    # Squares overflow float32; the clipped gradient is a unit vector all the same.
    model = nn.Linear(2, 1, bias=False)
    sums = summed(model, lambda out, y: out[:, 0], 1.0, path)
    (total,) = sums(torch.tensor([[3e30, 4e30]]), torch.zeros(1))
    assert total.flatten().tolist() == pytest.approx([0.6, 0.8], rel=1e-5)


def test_ghost_norm_does_not_vanish_in_small_squares() -> None:
    # Opacus' float32 norm of this layer is 0, which would let the gradient pass.
    layer = nn.Linear(1, 1, bias=False)
    inputs, backprops = torch.tensor([[1e18]]), torch.tensor([[1e-24]])
    theirs = compute_linear_norm_sample(layer, [inputs], backprops)
    assert float(theirs[layer.weight]) == 0
    ours = hooks.GhostModule.NORM_SAMPLERS[nn.Linear](layer, [inputs], backprops)
    assert float(ours[layer.weight]) == pytest.approx(1e-6)


def test_row_norms_keep_their_digits_over_many_elements() -> None:
    torch.manual_seed(0)
    rows = torch.randn(3, 1000, 1001)
    exact = rows.double().flatten(1).norm(dim=1)
    assert float((parts.row_norms(rows) / exact - 1).abs().max()) < 3e-7


@all_paths
def test_empty_batch_sums_to_zero(path: str) -> None:
    sums = summed(nn.Linear(6, 3), cross_entropy, 1.0, path)
    total = sums(torch.empty(0, 6), torch.empty(0, dtype=torch.long))
    assert [tuple(t.shape) for t in total] == [(3, 6), (3,)]
    assert all(float(t.abs().sum()) == 0 for t in total)


@all_paths
def test_model_is_left_as_found_and_its_current_weights_are_used(
    path: str,
) -> None:
    model = MODELS["conv and group norm"][0]().eval()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    attributes = [set(vars(p)) for p in model.parameters()]
    sums = summed(model, cross_entropy, 1.0, path)
    inputs, targets = MODELS["conv and group norm"][1]()
    sums(inputs, targets)
    assert not model.training
    assert [set(vars(p)) for p in model.parameters()] == attributes
    assert all(p.grad is None for p in model.parameters())
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._backward_hooks
        assert "autograd_grad_sample_hooks" not in vars(module)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    with torch.no_grad():
        for p in model.parameters():
            p.data = p + 0.3  # new storage, as a careless loader would leave it
    expected = literal(model, cross_entropy, inputs, targets, 1.0)
    assert_close(sums(inputs, targets), expected)


@all_paths
@pytest.mark.parametrize("max_examples", [1, 3, 7])
def test_chunks_add_up(path: str, max_examples: int) -> None:
    model = MODELS["mlp"][0]()
    inputs, targets = torch.randn(7, 6), torch.randint(3, (7,))
    whole = summed(model, cross_entropy, 0.5, path)
    parts = summed(model, cross_entropy, 0.5, path, max_examples)
    assert_close(parts(inputs, targets), whole(inputs, targets), 1e-6)


def test_default_chunk_bounds_what_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []
    norms = parts.row_norms

    def spy(rows: torch.Tensor) -> torch.Tensor:
        held.append(rows.numel())
        return norms(rows)

    monkeypatch.setattr(hooked, "row_norms", spy)
    monkeypatch.setattr(gradients, "MAX_HELD_ELEMENTS", 50)
    sums = summed(nn.Linear(6, 3), cross_entropy, 1.0, "per-example")  # d = 21
    sums(torch.randn(9, 6), torch.randint(3, (9,)))
    assert max(held) == 2 * 18


@all_paths
def test_failed_call_leaves_no_trace(path: str) -> None:
    model = nn.Linear(6, 3)
    sums = summed(model, cross_entropy, 1.0, path)
    inputs, targets = torch.randn(4, 6), torch.randint(3, (4,))
    expected = sums(inputs, targets)
    with pytest.raises(IndexError):
        sums(inputs, targets + 10)
    assert_close(sums(inputs, targets), expected, 0.0)


@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm1d(6),
        nn.BatchNorm1d(6, affine=False),
        nn.BatchNorm1d(6, affine=False, track_running_stats=False),
    ],
)
def test_batch_norm_is_refused_with_opacus_words(layer: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(6, 6), layer, nn.Linear(6, 3))
    with pytest.raises(UnsupportedModelError, match="GroupNorm") as caught:
        check_model(model)
    assert "ModuleValidator.fix" in str(caught.value)
    with pytest.raises(UnsupportedModelError):
        ClippedGradients(model, cross_entropy, 1.0)


@pytest.mark.parametrize(
    "model",
    [
        nn.LSTM(3, 3),
        nn.Linear(2, 2).requires_grad_(False),
        nn.Embedding(3, 2, max_norm=1.0),
        nn.Embedding(3, 2, scale_grad_by_freq=True),
        nn.InstanceNorm1d(3, affine=True, track_running_stats=True),
    ],
)
def test_other_models_without_bounded_examples_are_refused(model: nn.Module) -> None:
    with pytest.raises(UnsupportedModelError):
        check_model(model)


PaddingMode = Literal["circular", "reflect", "replicate"]
PADDING_MODES: tuple[PaddingMode, ...] = ("circular", "reflect", "replicate")


@pytest.mark.parametrize("mode", PADDING_MODES)
@pytest.mark.parametrize("padding", [1, "same"])
def test_padding_with_other_values_than_zeros_is_refused(
    mode: PaddingMode, padding: int | str
) -> None:
    """Opacus pads with zeros whatever the mode is: the norms would be others."""
    model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=padding, padding_mode=mode))
    with pytest.raises(UnsupportedModelError, match=f"padding_mode='{mode}'"):
        check_model(model)


@all_paths
@pytest.mark.parametrize("mode", PADDING_MODES)
@pytest.mark.parametrize("kind", ["none", "frozen", "before"])
def test_padding_that_no_trained_weight_sees_is_right(
    mode: PaddingMode, kind: str, path: str
) -> None:
    torch.manual_seed(0)
    if kind == "none":
        model = nn.Sequential(nn.Conv1d(1, 3, 3, padding_mode=mode))
    elif kind == "frozen":
        model = nn.Sequential(nn.Conv1d(1, 3, 3, padding=1, padding_mode=mode))
        model[0].weight.requires_grad_(False)
    else:
        pads = {
            "circular": nn.CircularPad1d,
            "reflect": nn.ReflectionPad1d,
            "replicate": nn.ReplicationPad1d,
        }
        model = nn.Sequential(pads[mode](1), nn.Conv1d(1, 3, 3))
    width = 4 if kind == "none" else 6
    model.extend([nn.Tanh(), nn.Flatten(), nn.Linear(3 * width, 3)])
    inputs, targets = torch.randn(4, 1, 6), torch.randint(3, (4,))
    sums = summed(model, cross_entropy, 0.5, path)
    expected = literal(model, cross_entropy, inputs, targets, 0.5)
    assert_close(sums(inputs, targets), expected)


class Centred(nn.Module):
    """Mixes examples where no list of layer types can see it."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(x - x.mean(dim=0))
        return y


class Tempered(nn.Module):
    """Scales every example by how many there are."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(x * len(x))
        return y


class Loose(nn.Module):
    """Uses a layer's weight behind the layer's back."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.head.weight)


def mixing_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(outputs, targets) * outputs.abs().sum()


@all_paths
@pytest.mark.parametrize(
    ("model", "loss"),
    [
        (Centred(), cross_entropy),
        (Loose(), cross_entropy),
        (nn.Linear(6, 3), mixing_loss),
    ],
)
def test_examples_that_mix_are_found_in_the_first_batch(
    model: nn.Module, loss: Loss, path: str
) -> None:
    torch.manual_seed(3)
    for layer in model.modules():  # made at import, before any seed
        if isinstance(layer, nn.Linear):
            layer.reset_parameters()
    sums = summed(model, loss, 1.0, path)
    inputs = torch.randn(5, 6)
    with pytest.raises(UnsupportedModelError):
        sums(inputs, torch.randint(3, (5,)))


@all_paths
def test_example_that_is_not_finite_does_not_hide_that_others_mix(
    path: str,
) -> None:
    model = nn.Linear(6, 3)
    inputs, targets = torch.randn(5, 6), torch.randint(3, (5,))
    summed(model, cross_entropy, 1.0, path)(inputs, targets)
    with pytest.raises(UnsupportedModelError):  # the same model, another loss
        summed(model, mixing_loss, 1.0, path)(inputs, targets)
    inputs[1] = math.nan
    centred = summed(Tempered(), cross_entropy, 1.0, path)
    with pytest.raises(UnsupportedModelError):
        centred(inputs, targets)


@all_paths
def test_inputs_that_want_a_gradient_change_nothing(path: str) -> None:
    sums = summed(nn.Linear(6, 3), cross_entropy, 1.0, path)
    inputs, targets = torch.randn(5, 6), torch.randint(3, (5,))
    expected = sums(inputs, targets)
    assert_close(sums(inputs.clone().requires_grad_(), targets), expected, 0.0)


@all_paths
def test_dropout_is_allowed_and_bounded(path: str) -> None:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(6, 20), nn.Dropout(0.5), nn.Linear(20, 3))
    sums = summed(model, cross_entropy, 0.1, path)
    inputs, targets = torch.randn(9, 6), torch.randint(3, (9,))
    norm = math.hypot(*(float(t.norm()) for t in sums(inputs, targets)))
    assert 0 < norm <= 0.9 * (1 + 1e-6)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_torch_losses_lose_their_reduction(reduction: str) -> None:
    outputs, targets = torch.randn(5, 3), torch.randint(3, (5,))
    loss = nn.CrossEntropyLoss(reduction=reduction)
    values = checks.per_example_loss(loss)(outputs, targets)
    assert torch.equal(values, cross_entropy(outputs, targets))
    assert loss.reduction == reduction


@pytest.mark.parametrize(
    "loss",
    [
        functional.cross_entropy,  # a mean over the batch
        functools.partial(
            functional.mse_loss, reduction="none"
        ),  # broadcasts to (5, 5)
        lambda outputs, targets: outputs,  # three values per example
    ],
)
def test_loss_without_one_value_per_example_is_refused(loss: Loss) -> None:
    model = nn.Linear(2, 3)
    if isinstance(loss, functools.partial):
        model = nn.Linear(2, 1)
    sums = ClippedGradients(model, loss, 1.0)
    with pytest.raises(UnsupportedModelError, match="one value per example"):
        sums(torch.randn(5, 2), torch.randint(3, (5,)))


def test_weighted_mean_is_refused_because_it_mixes_examples() -> None:
    weight = torch.tensor([1.0, 2.0, 3.0])
    with pytest.raises(UnsupportedModelError, match="reduction='none'"):
        checks.per_example_loss(nn.CrossEntropyLoss(weight=weight))
    none = checks.per_example_loss(nn.CrossEntropyLoss(weight=weight, reduction="none"))
    assert none(torch.zeros(2, 3), torch.tensor([0, 2])).shape == (2,)


@pytest.mark.parametrize(
    ("clip_norm", "clipping", "max_examples"),
    [
        (0.0, "ghost", None),
        (math.nan, "ghost", None),
        (math.inf, "ghost", None),
        (1.0, "flat", None),
        (1.0, "ghost", 0),
    ],
)
def test_bad_arguments(
    clip_norm: float, clipping: Clipping, max_examples: int | None
) -> None:
    with pytest.raises(ValueError, match=r"clip_norm|clipping|max_examples"):
        ClippedGradients(
            nn.Linear(2, 3), cross_entropy, clip_norm, clipping, max_examples
        )
