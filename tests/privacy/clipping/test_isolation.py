"""Nothing that an example leaves behind reaches another, in this step or a later."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional

from flwr_safedshb.privacy.clipping.gradients import ClippedGradients
from flwr_safedshb.privacy.losses import Loss, UnsupportedModelError
from tests.clipping import OwnForward, cross_entropy, way_of

torch.set_num_threads(1)

Forward = Callable[["Own", torch.Tensor], torch.Tensor]


class Own(nn.Module):
    """A linear layer, a frozen parameter and a buffer, and a forward of one's own."""

    shared = torch.zeros(6)

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.frozen = nn.Parameter(torch.zeros(6), requires_grad=False)
        self.buffer: torch.Tensor
        self.register_buffer("buffer", torch.zeros(6))
        self.attribute = torch.zeros(6)
        self.own = forward

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.own(self, inputs)


def newest(old: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """Return a running mean, which stays finite."""
    mean = inputs.detach().mean(dim=0).nan_to_num(0.0).clamp(-1e3, 1e3)
    return 0.9 * old + 0.1 * mean


def in_place(model: Own, inputs: torch.Tensor) -> torch.Tensor:
    outputs: torch.Tensor = model.layer(inputs - model.frozen)
    if model.training:
        with torch.no_grad():
            model.frozen.copy_(newest(model.frozen, inputs))
    return outputs


def by_data(model: Own, inputs: torch.Tensor) -> torch.Tensor:
    outputs: torch.Tensor = model.layer(inputs - model.frozen)
    if model.training:
        model.frozen.data = newest(model.frozen, inputs)
    return outputs


def in_a_buffer(model: Own, inputs: torch.Tensor) -> torch.Tensor:
    outputs: torch.Tensor = model.layer(inputs - model.buffer)
    if model.training:
        model.buffer = newest(model.buffer, inputs)
    return outputs


def in_an_attribute(model: Own, inputs: torch.Tensor) -> torch.Tensor:
    outputs: torch.Tensor = model.layer(inputs - model.attribute)
    if model.training:
        model.attribute = newest(model.attribute, inputs)
    return outputs


def in_the_class(model: Own, inputs: torch.Tensor) -> torch.Tensor:
    outputs: torch.Tensor = model.layer(inputs - Own.shared)
    if model.training:
        Own.shared = newest(Own.shared, inputs)
    return outputs


def in_a_closure() -> Forward:
    seen = [torch.zeros(6)]

    def forward(model: Own, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = model.layer(inputs - seen[0])
        if model.training:
            seen[0] = newest(seen[0], inputs)
        return outputs

    return forward


def only_for_large_values(model: Own, inputs: torch.Tensor) -> torch.Tensor:
    outputs: torch.Tensor = model.layer(inputs - model.frozen)
    if bool((inputs > 100).any()):
        model.frozen.data = newest(model.frozen, inputs)
    return outputs


def renormalised(model: Own, inputs: torch.Tensor) -> torch.Tensor:
    table = model.layer.weight
    entries = inputs.detach().long().clamp(0, 2)
    rows = functional.embedding(entries, table, max_norm=0.5)
    outputs: torch.Tensor = model.layer(inputs + rows.mean(dim=1))
    return outputs


class RunningLoss(nn.Module):
    """Scales by a running mean of the losses."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: torch.Tensor
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        values = cross_entropy(outputs, targets)
        scaled = values * (1.0 + self.mean)
        self.mean = newest(self.mean, values)
        return scaled


class CopiesItself(nn.Linear):
    def __deepcopy__(self, memo: dict[int, object]) -> "CopiesItself":
        return self


@pytest.fixture(autouse=True)
def _start() -> Iterator[None]:
    torch.manual_seed(0)
    Own.shared = torch.zeros(6)
    yield
    Own.shared = torch.zeros(6)


def batch(count: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(count, 6), torch.randint(3, (count,))


@pytest.mark.parametrize(
    ("model", "loss", "words"),
    [
        (Own(in_place), cross_entropy, "the parameter frozen changes"),
        (Own(by_data), cross_entropy, "the parameter frozen changes"),
        (Own(in_a_buffer), cross_entropy, "the buffer buffer changes"),
        (Own(in_an_attribute), cross_entropy, "the attribute attribute changes"),
        (Own(only_for_large_values), cross_entropy, "the parameter frozen changes"),
        (Own(renormalised), cross_entropy, "mixes"),
        (Own(in_the_class), cross_entropy, "in a class"),
        (Own(in_a_closure()), cross_entropy, "a closure"),
        (nn.Linear(6, 3), RunningLoss(), "mixes"),
        (CopiesItself(6, 3), cross_entropy, "remove its __deepcopy__"),
    ],
)
def test_a_model_that_keeps_values_of_examples_is_refused(
    model: nn.Module, loss: Loss, words: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        ClippedGradients(model, loss, 1.0).prepare(*batch())


def test_a_hook_on_all_modules_is_refused_before_and_after_the_check() -> None:
    clipped = ClippedGradients(nn.Linear(6, 3), cross_entropy, 1.0)
    clipped.prepare(*batch())
    hook = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        with pytest.raises(UnsupportedModelError, match="all modules"):
            clipped(*batch())
        with pytest.raises(UnsupportedModelError, match="all modules"):
            ClippedGradients(nn.Linear(6, 3), cross_entropy, 1.0)
    finally:
        hook.remove()


def test_what_an_example_writes_to_a_frozen_parameter_is_gone_after_it() -> None:
    # The check does not see it: made-up examples are not the one that writes.
    def forward(model: Own, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = model.layer(inputs - model.frozen)
        if bool((inputs == 42.0).any()):
            model.frozen.data.add_(inputs.detach()[0])
        return outputs

    model = Own(forward)
    clipped = ClippedGradients(model, cross_entropy, 100.0)
    inputs, targets = batch()
    others = torch.tensor([False, True, True, True, True])
    expected = clipped.flat_sum(inputs, targets, others)
    inputs[0, 0] = 42.0
    found = clipped.flat_sum(inputs, targets, others)
    assert way_of(clipped) == "alone"
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)
    assert not model.frozen.any()


def doubled(model: Own, inputs: torch.Tensor) -> torch.Tensor:
    if model.training:
        inputs.mul_(2.0)
    outputs: torch.Tensor = model.layer(inputs)
    return outputs


IN_PLACE: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: nn.Sequential(nn.Dropout(0.5, inplace=True), nn.Linear(6, 3)),
    "relu": lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 3)),
    "own": lambda: Own(doubled),
    "own dropout": lambda: OwnForward(
        nn.Sequential(nn.Dropout(0.5, inplace=True), nn.Linear(6, 3))
    ),
}


@pytest.mark.parametrize("kind", IN_PLACE)
def test_layers_that_work_in_place_leave_the_examples_as_they_are(kind: str) -> None:
    clipped = ClippedGradients(IN_PLACE[kind](), nn.CrossEntropyLoss(), 0.5)
    inputs, targets = batch()
    before = inputs.clone()
    clipped(inputs, targets)
    torch.testing.assert_close(inputs, before, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("kind", IN_PLACE)
def test_a_wrong_label_under_layers_in_place_moves_the_sum_by_its_own_share(
    kind: str,
) -> None:
    clipped = ClippedGradients(IN_PLACE[kind](), nn.CrossEntropyLoss(), 1.0)
    inputs, targets = batch(25)
    torch.manual_seed(1)
    whole = clipped.flat_sum(inputs, targets).double()
    targets[3] = 77
    torch.manual_seed(1)
    moved = (clipped.flat_sum(inputs, targets).double() - whole).norm()
    assert 0.0 < float(moved) <= 1.0


def smallest_so_far() -> Loss:
    best = [float("inf")]

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        values = cross_entropy(outputs, targets)
        best[0] = min(best[0], float(values.detach().min()))
        return values * (1.0 + best[0])

    return loss


def prototypes() -> Loss:
    seen: dict[int, torch.Tensor] = {}

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        first = seen.setdefault(int(targets[0]), outputs.detach()[0])
        return cross_entropy(outputs, targets) + (outputs - first).square().sum(dim=1)

    return loss


def only_in_evaluation(model: Own, inputs: torch.Tensor) -> torch.Tensor:
    outputs: torch.Tensor = model.layer(inputs - Own.shared)
    if not model.training and not torch.is_grad_enabled():
        Own.shared = torch.maximum(Own.shared, inputs.detach().nan_to_num(0.0)[0])
    return outputs


@pytest.mark.parametrize(
    ("model", "loss"),
    [
        (nn.Linear(6, 3), smallest_so_far()),
        (nn.Linear(6, 3), prototypes()),
        (Own(only_in_evaluation), cross_entropy),
    ],
)
def test_what_is_left_outside_a_model_or_a_loss_is_found_where_it_is(
    model: nn.Module, loss: Loss
) -> None:
    with pytest.raises(UnsupportedModelError, match=r"closure|class"):
        ClippedGradients(model, loss, 1.0).prepare(*batch())


def test_a_closure_that_is_only_read_is_no_state() -> None:
    weights = torch.tensor([1.0, 2.0, 3.0])

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return cross_entropy(outputs, targets) * weights[targets]

    ClippedGradients(nn.Linear(6, 3), loss, 1.0).prepare(*batch())
