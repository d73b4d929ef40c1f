"""Nothing that an example leaves behind reaches another, in this step or a later."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from flwr_safedshb.audit.target_model import TargetModel
from flwr_safedshb.audit.zoo import state
from flwr_safedshb.audit.zoo.state import Stateful
from flwr_safedshb.privacy.clipping.gradients import ClippedGradients
from flwr_safedshb.privacy.losses import Loss, UnsupportedModelError
from tests.clipping import OwnForward, cross_entropy, way_of

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _start() -> Iterator[None]:
    torch.manual_seed(0)
    Stateful.in_class = torch.zeros(6)
    yield
    Stateful.in_class = torch.zeros(6)


def batch(count: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(count, 6), torch.randint(3, (count,))


# What the refusal says of each; of most others that the examples mix.
PLACES = {
    "frozen running mean": "the parameter frozen changes",
    "frozen running mean, by data": "the parameter frozen changes",
    "trained weight, by data": "the parameter layer.weight changes",
    "buffer": "the buffer buffer changes",
    "attribute": "the attribute attribute changes",
    "class attribute": "in a class",
    "closure": "a closure",
    "state of large values": "the parameter frozen changes",
    "frozen memory, by numpy": "the parameter frozen changes",
    "max_norm on a weight": "the parameter layer.weight changes",
}


@pytest.mark.parametrize("target", state.MUST_REFUSE, ids=lambda target: target.name)
def test_a_model_that_keeps_values_of_examples_is_refused(target: TargetModel) -> None:
    words = PLACES.get(target.name, "mixes")
    with pytest.raises(UnsupportedModelError, match=words):
        ClippedGradients(target.make(), target.loss, 1.0).prepare(*batch())


class CopiesItself(nn.Linear):
    def __deepcopy__(self, memo: dict[int, object]) -> "CopiesItself":
        return self


def test_a_model_that_cannot_be_copied_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="remove its __deepcopy__"):
        ClippedGradients(CopiesItself(6, 3), cross_entropy, 1.0).prepare(*batch())


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
    def work(model: Stateful, inputs: torch.Tensor) -> torch.Tensor:
        hidden = inputs - model.frozen
        if bool((inputs == 42.0).any()):
            model.frozen.data.add_(inputs.detach()[0])
        return hidden

    model = Stateful(work)
    clipped = ClippedGradients(model, cross_entropy, 100.0)
    inputs, targets = batch()
    others = torch.tensor([False, True, True, True, True])
    expected = clipped.flat_sum(inputs, targets, others)
    inputs[0, 0] = 42.0
    found = clipped.flat_sum(inputs, targets, others)
    assert way_of(clipped) == "alone"
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)
    assert not model.frozen.any()


IN_PLACE: dict[str, Callable[[], nn.Module]] = {
    **{target.name: target.make for target in state.IN_PLACE},
    "own forward": lambda: OwnForward(
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


class InEvaluation(nn.Module):
    """Keeps the largest inputs in its class, but never while it trains."""

    largest = torch.zeros(6)

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layer(inputs - InEvaluation.largest)
        if not self.training and not torch.is_grad_enabled():
            new = inputs.detach().nan_to_num(0.0)[0]
            InEvaluation.largest = torch.maximum(InEvaluation.largest, new)
        return outputs


@pytest.mark.parametrize(
    ("model", "loss"),
    [
        (nn.Linear(6, 3), smallest_so_far()),
        (nn.Linear(6, 3), prototypes()),
        (InEvaluation(), cross_entropy),
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
