import math
import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from flwr_safedshb.privacy.clipping.gradients import ClippedGradients
from flwr_safedshb.privacy.plan import Clipping
from simulations import models
from simulations.data import Examples
from simulations.models import (
    CNN,
    MLP,
    LogisticRegression,
    build_model,
    classification_loss,
    evaluate_model,
    training_loss,
)

MAKERS: list[Callable[..., nn.Module]] = [
    LogisticRegression,
    partial(MLP, hidden=[7, 5]),
    CNN,
]


def dimension(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def drawn(count: int, shape: tuple[int, ...], classes: int) -> Examples:
    rng = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, *shape, generator=rng)
    return inputs, torch.randint(0, classes, (count,), generator=rng)


@pytest.mark.parametrize(
    ("make", "shape", "classes", "expected"),
    [
        (LogisticRegression, (68,), 2, 69),  # of the paper
        (LogisticRegression, (1, 8, 8), 10, 650),
        (partial(MLP, hidden=[32]), (68,), 2, 68 * 32 + 32 + 32 + 1),
        (partial(MLP, hidden=[4, 3]), (5,), 4, 24 + 15 + 16),
        (CNN, (1, 28, 28), 10, 26_090),
        (CNN, (1, 8, 8), 10, 26_090),
        (CNN, (3, 32, 32), 2, 26_090 + 2 * 16 * 9 - 9 * 257),
    ],
)
def test_models_fit_the_data(
    make: Callable[..., nn.Module],
    shape: tuple[int, ...],
    classes: int,
    expected: int,
) -> None:
    model = build_model(make, shape, classes, seed=0)
    assert dimension(model) == expected
    inputs, labels = drawn(3, shape, classes)
    outputs = model(inputs)
    assert outputs.shape == (3, 1 if classes == 2 else classes)
    assert classification_loss(outputs, labels).shape == (3,)


def test_the_cnn_is_for_images() -> None:
    with pytest.raises(ValueError, match=r"input_shape=\(68,\).*model=logistic"):
        build_model(CNN, (68,), 2, 0)


def test_build_gives_what_is_asked_for_and_not_set() -> None:
    def stated(num_classes: int, input_shape: tuple[int, ...]) -> nn.Module:
        return nn.Linear(input_shape[0], num_classes)

    model = build_model(stated, (5,), 2, 0)
    assert isinstance(model, nn.Linear)
    assert model.weight.shape == (2, 5)
    # What the user has set stays, and a model may ask for nothing.
    twice = build_model(partial(LogisticRegression, num_outputs=2), (5,), 2, 0)
    assert dimension(twice) == 12
    linear = build_model(partial(nn.Linear, in_features=5, out_features=1), (5,), 2, 0)
    assert dimension(linear) == 6


def test_weights_follow_the_seed_and_leave_the_global_generator() -> None:
    def weights(seed: int) -> torch.Tensor:
        model = build_model(CNN, (1, 8, 8), 10, seed)
        return torch.cat([p.flatten() for p in model.parameters()])

    state = torch.get_rng_state()
    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(p.any() for p in LogisticRegression(4).parameters())


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("clipping", ["per-example", "ghost"])
@pytest.mark.parametrize("classes", [2, 10])
def test_gradients_are_those_of_each_example_alone(
    make: Callable[..., nn.Module], clipping: Clipping, classes: int
) -> None:
    model = build_model(make, (1, 8, 8), classes, 0)
    inputs, labels = drawn(6, (1, 8, 8), classes)
    clip = 0.5
    parameters = list(model.parameters())
    expected = [torch.zeros_like(p) for p in parameters]
    for i in range(6):
        loss = classification_loss(model(inputs[i : i + 1]), labels[i : i + 1])[0]
        alone = torch.autograd.grad(loss, parameters)
        norm = math.sqrt(sum(float(g.square().sum()) for g in alone))
        assert norm > clip
        for total, gradient in zip(expected, alone, strict=True):
            total += gradient * (clip / norm)
    with warnings.catch_warnings(action="ignore"):
        found = ClippedGradients(model, classification_loss, clip, clipping)(
            inputs, labels
        )
    for mine, right in zip(found, expected, strict=True):
        # The clip is lowered by what the sum may round: 7.2e-6 of it for six examples.
        torch.testing.assert_close(mine, right.to(mine.dtype), rtol=5e-5, atol=1e-6)


def test_the_loss_is_minus_the_log_of_the_probability() -> None:
    logits = torch.tensor([[0.3], [-2.0], [1.5]])
    labels = torch.tensor([1, 0, 0])
    ones = [1 / (1 + math.exp(-float(x))) for x in logits]
    expected = [-math.log(ones[0]), -math.log(1 - ones[1]), -math.log(1 - ones[2])]
    found = classification_loss(logits, labels)
    assert found.tolist() == pytest.approx(expected)
    # Labels may be floats, and two outputs may stand for two classes.
    assert torch.equal(classification_loss(logits, labels.float()), found)
    both = torch.cat([torch.zeros_like(logits), logits], dim=1)
    assert classification_loss(both, labels).tolist() == pytest.approx(expected)
    three = torch.tensor([[1.0, 2.0, 4.0]])
    norm = sum(math.exp(x) for x in (1, 2, 4))
    loss = classification_loss(three, torch.tensor([1]))
    assert loss.tolist() == pytest.approx([-math.log(math.exp(2) / norm)])


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_evaluation_is_the_mean_over_examples(
    classes: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "_MAX_ELEMENTS", 5 * chunk)
    model = build_model(partial(MLP, hidden=[6]), (5,), classes, 0)
    inputs, labels = drawn(10, (5,), classes)
    losses, right = [], 0
    with torch.no_grad():
        for x, label in zip(inputs, labels, strict=True):
            output = model(x[None])
            losses.append(float(classification_loss(output, label[None])))
            guess = int(output > 0) if classes == 2 else int(output.argmax())
            right += guess == int(label)
        squares = sum(float((p**2).sum()) for p in model.parameters())
    found = evaluate_model(model, (inputs, labels))
    assert found["loss"] == pytest.approx(sum(losses) / 10)
    assert found["accuracy"] == pytest.approx(right / 10)
    # The paper's L_H: each node counts the same, whatever it holds.
    nodes = sum(losses[:2]) / 2, sum(losses[2:9]) / 7, losses[9]
    expected = sum(nodes) / 3 + 0.3 / 2 * squares
    loss = training_loss(model, (inputs, labels), (2, 7, 1), weight_decay=0.3)
    assert loss == pytest.approx(expected)


def test_training_loss_has_the_gradient_that_clients_send() -> None:
    # Its L2 term is (lambda/2)||theta||^2, bias included: clients add lambda theta.
    model = LogisticRegression(3)
    nn.init.constant_(model.get_parameter("1.bias"), 2.0)
    examples = torch.zeros(4, 3), torch.ones(4, dtype=torch.int64)
    plain = training_loss(model, examples, (4,), 0.0)
    assert training_loss(model, examples, (4,), 0.1) == pytest.approx(plain + 0.2)


def test_evaluation_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(5, 1))
    examples = drawn(50, (5,), 2)
    assert evaluate_model(model, examples) == evaluate_model(model, examples)
    assert model.training
    model.eval()
    evaluate_model(model, examples)
    assert not model.training
