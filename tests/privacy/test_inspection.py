"""What the owner of data is told about examples that cannot be used."""

import numpy as np
import pytest
import torch
from sklearn.datasets import load_breast_cancer
from torch import nn
from torch.utils.data import Dataset

from flwr_safedshb.privacy.clipping.gradients import ClippedGradients
from flwr_safedshb.privacy.datasets import make_examples
from flwr_safedshb.privacy.inspection import DataReport, inspect_examples
from flwr_safedshb.privacy.owners import make_owned_examples

INPUTS = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(60) % 3


def inspect(
    inputs: object, labels: object, loss: nn.Module | None = None, outputs: int = 3
) -> DataReport:
    size = inputs.shape[1] if isinstance(inputs, torch.Tensor) else 4
    model = nn.Linear(size, outputs)
    gradients = ClippedGradients(model, loss or nn.CrossEntropyLoss(), 1.0)
    return inspect_examples(gradients, make_examples((inputs, labels)))


def test_nothing_is_said_of_good_examples() -> None:
    found = inspect(INPUTS, LABELS)
    assert found == DataReport(60, 0, ())
    assert not found.is_hopeless
    assert str(found) == ""


def test_columns_with_missing_values_are_named() -> None:
    inputs = INPUTS.clone()
    inputs[:5, 1], inputs[7, 3] = torch.nan, torch.inf
    found = inspect(inputs, LABELS)
    assert (found.seen, found.unusable, found.is_hopeless) == (60, 6, False)
    assert "column 1, 3 of the inputs has values that are not finite" in str(found)
    inputs[:, 1] = torch.nan
    found = inspect(inputs, LABELS)
    assert (found.unusable, found.is_hopeless) == (60, True)
    assert str(found).startswith("60 of 60 examples cannot be used; column 1")


def test_labels_that_start_at_1_are_named_with_their_range() -> None:
    found = inspect(INPUTS, LABELS + 1)
    assert (found.unusable, found.is_hopeless) == (20, True)
    text = "labels go from 1 to 3, and the loss cannot take 3 (20 examples)"
    assert text in str(found)
    assert "for k classes give 0 to k - 1" in str(found)


def test_columns_of_other_scales_are_named() -> None:
    table, labels = load_breast_cancer(return_X_y=True)
    found = inspect(torch.tensor(table).float(), torch.tensor(labels), outputs=2)
    assert found.unusable == 0
    (text,) = found.causes
    assert text.startswith(
        "column 2, 3, 13, 22, 23 goes up to 4.25e+03, and the middle one to"
    )
    assert "scale all columns by public bounds" in text
    scaled = torch.tensor(table / table.max(axis=0)).float()
    assert inspect(scaled, torch.tensor(labels), outputs=2).causes == ()


def test_items_that_cannot_be_read_are_counted() -> None:
    class Broken(Dataset[tuple[torch.Tensor, int]]):
        def __len__(self) -> int:
            return 60

        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            if index % 2:
                raise KeyError(index)
            return INPUTS[index], int(LABELS[index])

    gradients = ClippedGradients(nn.Linear(4, 3), nn.CrossEntropyLoss(), 1.0)
    data = make_examples(Broken(), like=(torch.zeros(4), 0))
    found = inspect_examples(gradients, data)
    assert (found.seen, found.unusable) == (60, 30)
    assert "30 cannot be read" in str(found)
    found = inspect_examples(gradients, data, limit=7)
    assert found.seen == 7


def test_the_examples_of_persons_are_looked_at_one_by_one() -> None:
    inputs = INPUTS.clone()
    inputs[3, 2] = torch.nan
    owned = make_owned_examples((inputs, LABELS), np.arange(60) % 10, 2)
    gradients = ClippedGradients(nn.Linear(4, 3), nn.CrossEntropyLoss(), 1.0)
    found = inspect_examples(gradients, owned)
    assert (found.seen, found.unusable) == (60, 1)
    assert "column 2" in str(found)


@pytest.mark.parametrize("seed", range(2))
def test_looking_changes_neither_random_numbers_nor_the_model(seed: int) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 3))
    gradients = ClippedGradients(model, nn.CrossEntropyLoss(), 1.0)
    before = [p.detach().clone() for p in model.parameters()]
    torch.manual_seed(seed)
    expected = torch.rand(3)
    torch.manual_seed(seed)
    inspect_examples(gradients, make_examples((INPUTS, LABELS)))
    assert torch.equal(torch.rand(3), expected)
    after = model.parameters()
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
