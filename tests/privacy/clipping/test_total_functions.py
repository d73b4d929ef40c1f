"""No value of an example or of a weight makes a whole batch fail."""

import functools
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from flwr_safedshb.privacy.clipping.gradients import ClippedGradients
from flwr_safedshb.privacy.clipping.total_functions import TotalFunctions
from flwr_safedshb.privacy.losses import UnsupportedModelError
from tests.clipping import OwnForward, cross_entropy, way_of

torch.set_num_threads(1)

SCORES = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
BAD = torch.tensor([0, 3, -1, 2])  # the middle two do not exist
RAISING: dict[str, Callable[[], torch.Tensor]] = {
    "cross_entropy": lambda: functional.cross_entropy(SCORES, BAD, reduction="none"),
    "nll_loss": lambda: functional.nll_loss(SCORES, BAD, reduction="none"),
    "module": lambda: nn.CrossEntropyLoss(reduction="none")(SCORES, BAD),
    "binary_cross_entropy": lambda: functional.binary_cross_entropy(
        torch.tensor([0.5, 1.1, torch.nan, 0.0]), torch.ones(4), reduction="none"
    ),
    "its target": lambda: functional.binary_cross_entropy(
        torch.rand(4), torch.tensor([0.0, 1.1, torch.nan, 1.0]), reduction="none"
    ),
    "embedding": lambda: functional.embedding(BAD, SCORES[:3]).sum(dim=1),
    "gather": lambda: SCORES.gather(1, BAD.unsqueeze(1)).squeeze(1),
    "torch.gather": lambda: torch.gather(SCORES, 1, BAD.unsqueeze(1)).squeeze(1),
    "index": lambda: SCORES[torch.arange(4), torch.tensor([0, 3, -4, 2])],
}
USABLE = torch.tensor([True, False, False, True])


@pytest.mark.parametrize("name", RAISING)
def test_every_replaced_function_gives_nan_where_the_original_raises(name: str) -> None:
    with pytest.raises((IndexError, RuntimeError)):
        RAISING[name]()
    with TotalFunctions() as total:
        found = RAISING[name]()
    assert total.used
    assert found.isnan().tolist() == (~USABLE).tolist()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_reduced_loss_with_a_wrong_label_is_nan(reduction: str) -> None:
    with TotalFunctions():
        assert functional.cross_entropy(SCORES, BAD, reduction=reduction).isnan()
        fine = functional.cross_entropy(SCORES, BAD.clamp(0, 2), reduction=reduction)
    assert fine.isfinite()


def test_a_replaced_function_is_the_original_for_good_values() -> None:
    target = torch.tensor([0, -100, 2, 1])
    soft = torch.rand(4, 3)
    for given in (target, soft):
        expected = functional.cross_entropy(SCORES, given, label_smoothing=0.1)
        with TotalFunctions():
            found = functional.cross_entropy(SCORES, given, label_smoothing=0.1)
        torch.testing.assert_close(found, expected)


class Own(nn.Module):
    """A linear layer around an operation."""

    def __init__(self, operation: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.operation = operation

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layer(self.operation(inputs))
        return outputs


def solved(x: torch.Tensor) -> torch.Tensor:
    squares = x.unsqueeze(2) @ x.unsqueeze(1)
    found: torch.Tensor = torch.linalg.solve(squares + torch.eye(4), x)
    return found


def branched(x: torch.Tensor) -> torch.Tensor:
    return x if bool((x < 1e6).all()) else x.cumsum(1)


def divided(x: torch.Tensor) -> torch.Tensor:
    return x + (7 // (1 + x.detach().long().abs())).to(x.dtype)


def looked_up(x: torch.Tensor) -> torch.Tensor:
    return x + torch.arange(40)[x.detach().long().clamp(0, 30)].to(x.dtype)


def flipped(x: torch.Tensor) -> torch.Tensor:
    chances = x.detach().clamp(0.0, 1.0)
    return x + 0.0 * torch.bernoulli(chances)


PARTIAL = {
    "linalg.solve": solved,
    "a branch": branched,
    "a division of whole numbers": divided,
    "a table of whole numbers": looked_up,
    "probabilities": flipped,
}


@pytest.mark.parametrize("name", PARTIAL)
def test_a_model_with_another_partial_operation_goes_one_example_at_a_time(
    name: str,
) -> None:
    clipped = ClippedGradients(Own(PARTIAL[name]), cross_entropy, 1.0)
    clipped.prepare(torch.randn(3, 4), torch.randint(4, (3,)))
    assert way_of(clipped) == "alone"


def test_a_loss_with_a_check_of_its_own_goes_one_example_at_a_time() -> None:
    def checked(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if bool((targets > 3).any()):
            raise ValueError("no such class")
        return cross_entropy(outputs, targets)

    clipped = ClippedGradients(nn.Linear(4, 4), checked, 1.0)
    inputs, targets = torch.randn(7, 4), torch.randint(4, (7,))
    expected = clipped.flat_sum(inputs, targets, torch.arange(7) != 2)
    targets[2] = 9
    found = clipped.flat_sum(inputs, targets)
    assert way_of(clipped) == "alone"
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)


def test_a_loss_that_would_end_the_process_is_refused() -> None:
    def connectionist(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        scores = outputs.reshape(len(outputs), 5, 4).transpose(0, 1).log_softmax(2)
        lengths = torch.full((len(outputs),), 5), torch.full((len(outputs),), 2)
        return functional.ctc_loss(scores, targets, *lengths, reduction="none")

    clipped = ClippedGradients(nn.Linear(4, 20), connectionist, 1.0)
    with pytest.raises(UnsupportedModelError, match="do without it"):
        clipped.prepare(torch.randn(3, 4), torch.randint(1, 4, (3, 2)))


def test_a_layer_that_would_end_the_process_is_refused() -> None:
    def sampled(x: torch.Tensor) -> torch.Tensor:
        grid = x.reshape(len(x), 1, 2, 2)
        image = torch.ones(len(x), 4, 3, 3)
        found = functional.grid_sample(
            image, grid, padding_mode="border", align_corners=False
        )
        return found[:, :, 0, 0]

    clipped = ClippedGradients(Own(sampled), cross_entropy, 1.0)
    with pytest.raises(UnsupportedModelError, match="do without it"):
        clipped.prepare(torch.randn(3, 4), torch.randint(4, (3,)))


@pytest.mark.parametrize("entry", [12, 77, -1, 2**40])
@pytest.mark.parametrize("own", [False, True])
def test_an_entry_that_a_table_does_not_have_moves_nothing_else(
    own: bool, entry: int
) -> None:
    layers = nn.Sequential(nn.Embedding(12, 6), nn.Flatten(), nn.Linear(30, 4))
    clipped = ClippedGradients(
        OwnForward(layers) if own else layers, cross_entropy, 1.0
    )
    inputs, targets = torch.randint(12, (7, 5)), torch.randint(4, (7,))
    expected = clipped.flat_sum(inputs, targets, torch.arange(7) != 2)
    inputs[2, 3] = entry
    found = clipped.flat_sum(inputs, targets)
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(
    "loss", [nn.NLLLoss(), functools.partial(functional.nll_loss, reduction="none")]
)
def test_common_losses_keep_batches_together(own: bool, loss: nn.Module) -> None:
    model: nn.Module = nn.Linear(4, 4)
    clipped = ClippedGradients(OwnForward(model) if own else model, loss, 1.0)
    clipped.prepare(torch.randn(3, 4), torch.randint(4, (3,)))
    assert way_of(clipped) == ("vmap" if own else "plain")


def saturated() -> tuple[nn.Sequential, torch.Tensor, torch.Tensor]:
    """A model whose dropout decides whether an example's output is a number."""
    model = nn.Sequential(
        nn.Linear(2, 2, bias=False), nn.Dropout(0.5), nn.Linear(2, 1), nn.Sigmoid()
    )
    with torch.no_grad():
        for parameter, values in zip(
            model.parameters(),
            ([[1.0, 3e38], [1.0, -3e38]], [[1.0, 1.0]], [0.0]),
            strict=True,
        ):
            parameter.copy_(torch.tensor(values))
    inputs = torch.tensor([1.0, 0.0]).repeat(25, 1)
    return model, inputs, torch.ones(25, 1)


def test_an_example_that_fails_under_its_own_dropout_alone_moves_nothing_else() -> None:
    model, inputs, targets = saturated()
    clipped = ClippedGradients(model, nn.BCELoss(), 1.0)
    exchanged = inputs.clone()
    exchanged[0] = torch.tensor([1.0, 1.0])
    for seed in range(200):
        sums = []
        for batch in (inputs, exchanged):
            torch.manual_seed(seed)
            sums.append(clipped.flat_sum(batch, targets).double())
        assert float((sums[0] - sums[1]).norm()) <= 2.0
        assert float(sums[0].norm()) > 2.0
