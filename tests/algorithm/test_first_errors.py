"""A new user's first errors: each names the cause and the cure, in three lines."""

import re
import textwrap
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flwr_safedshb import (
    InProcessGrid,
    PrivacyPlan,
    SafeDSHB,
    SafeDSHBClient,
    SeededRandomness,
    client_app,
    trained_arrays,
)
from tests.clients import node, send

INPUTS = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
LABELS = (INPUTS.sum(dim=1) > 0).long()
ITEMS = list(zip(INPUTS, LABELS, strict=True))
PLAN = PrivacyPlan(1.0, 1.0, 4, 20)
NORMED = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


class Two(nn.Linear):
    """Returns its logits twice."""

    def __init__(self) -> None:
        super().__init__(3, 2)

    def forward(self, inputs: torch.Tensor) -> Any:
        logits = super().forward(inputs)
        return logits, logits


class Bare(nn.Linear):
    """Drops the axis of the examples where there is one."""

    def __init__(self) -> None:
        super().__init__(3, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs).squeeze()


class Ordered(nn.GRU):
    """Takes the examples for steps of one sequence."""

    def __init__(self) -> None:
        super().__init__(1, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(inputs)[0][:, -1]


def first_step(dataset: object, **settings: Any) -> None:
    """Make a client as a new user does, and ask it for a step."""
    model, plan = settings.pop("model", nn.Linear(3, 2)), settings.pop("plan", PLAN)
    arguments: dict[str, Any] = {
        "loss": nn.CrossEntropyLoss(),
        "context": node(),
        "randomness": SeededRandomness(0),
        **settings,
    }
    client = SafeDSHBClient(model, dataset=dataset, plan=plan, **arguments)
    weights = [array.numpy() for array in trained_arrays(model).values()]
    client.fit(weights, {"step": 0, "momentum": 0.9})


ERRORS: dict[str, tuple[object, dict[str, Any], str, str]] = {
    "dict items": (
        [{"img": x, "label": y} for x, y in ITEMS],
        {},
        "dicts with keys img, label",
        "target='label'",
    ),
    "float64 inputs": (
        (INPUTS.double(), LABELS),
        {},
        "inputs float64",
        "make the inputs float32",
    ),
    "int32 labels": (
        (INPUTS, LABELS.int()),
        {},
        "targets int32",
        "make the targets int64",
    ),
    "classes of another shape": (
        (INPUTS, LABELS.unsqueeze(1)),
        {},
        r"targets int64 \(k, 1\)",
        r"squeeze\(1\)",
    ),
    "images of bytes": (
        (INPUTS.mul(50).byte(), LABELS),
        {},
        "inputs uint8",
        "make the inputs float32",
    ),
    "classes as floats": (
        (INPUTS, LABELS.float()),
        {},
        "targets float32",
        "make the targets int64",
    ),
    "classes as floats, of another shape": (
        (INPUTS, LABELS.float().unsqueeze(1)),
        {},
        r"targets float32 \(k, 1\)",
        r"int64 \(k\), by squeeze\(1\)",
    ),
    "labels as whole numbers": (
        (INPUTS, torch.stack([LABELS, 1 - LABELS], 1)),
        {"loss": nn.BCEWithLogitsLoss()},
        "targets int64",
        "make the targets float32",
    ),
    "both of other types": (
        (INPUTS.double(), LABELS.int()),
        {},
        "inputs float64",
        "make the inputs float32, .*; make the targets int64",
    ),
    "columns too many": (
        [{"img": x, "label": y, "id": 1} for x, y in ITEMS],
        {"target": "label"},
        "inputs {id: int64 .*, img: float32",
        "leave out by unpack=",
    ),
    "a model that returns two": (
        (INPUTS, LABELS),
        {"model": Two()},
        "the model returns a tuple",
        r"select the tensor .*o\[0\]",
    ),
    "an axis too few": (
        (INPUTS, LABELS.float()),
        {"model": Bare(), "loss": nn.MSELoss()},
        "a row for each example",
        r"squeeze\(1\)",
    ),
    "a recurrent model of another order": (
        (INPUTS.unsqueeze(2), LABELS),
        {"model": Ordered()},
        "mixes the examples",
        "batch_first=True",
    ),
    "targets of another shape": (
        (INPUTS, LABELS.float()),
        {"model": nn.Linear(3, 1), "loss": nn.MSELoss()},
        r"got \(k, 1\) and \(k\)",
        r"unsqueeze\(1\)",
    ),
    "a DataLoader": (
        DataLoader(TensorDataset(INPUTS, LABELS)),
        {},
        "is a DataLoader",
        r"loader\.dataset",
    ),
    "triples": (
        [(x, y, 0) for x, y in ITEMS],
        {},
        "items are tuples of 3",
        "unpack=lambda item",
    ),
    "BatchNorm": (
        (INPUTS, LABELS),
        {"model": NORMED},
        "BatchNorm1d mixes",
        "GroupNorm",
    ),
    "no state-dir": (
        (INPUTS, LABELS),
        {"randomness": None},
        "no state-dir",
        "set it in the node's config",
    ),
    "an unknown node key": (
        (INPUTS, LABELS),
        {"context": node(data_path="x")},
        "unknown key 'data-path'",
        "must be named in node_keys",
    ),
}


@pytest.mark.parametrize("error", ERRORS)
def test_an_error_names_its_cause_and_its_cure(error: str) -> None:
    dataset, settings, cause, cure = ERRORS[error]
    with pytest.raises((ValueError, RuntimeError), match=cause) as raised:
        first_step(dataset, **settings)
    assert raised.match(cure)
    lines = textwrap.wrap(str(raised.value), 120)
    assert len(lines) <= 3, lines


UNMADE: dict[str, tuple[object, str]] = {
    "model": (nn.Linear, r"model=<class .*Linear'> must be a module, such as Net\(\)"),
    "loss": (nn.CrossEntropyLoss, r"loss=<class .* must be an instance"),
    "randomness": (0, r"randomness=0 must be SeededRandomness\(0\)"),
}


@pytest.mark.parametrize("name", UNMADE)
def test_a_class_or_a_number_is_no_object(name: str) -> None:
    given, words = UNMADE[name]
    arguments: dict[str, Any] = {
        "model": nn.Linear(3, 2),
        "loss": nn.CrossEntropyLoss(),
        "randomness": SeededRandomness(0),
        name: given,
    }
    with pytest.raises(ValueError, match=words):
        SafeDSHBClient(dataset=(INPUTS, LABELS), plan=PLAN, context=node(), **arguments)


MISSING = INPUTS.clone()
MISSING[3:6, 1] = torch.nan
UNEVEN = [(x, y) for x, y in zip([*INPUTS[:17], *INPUTS[17:, :2]], LABELS, strict=True)]
UNUSABLE: dict[str, tuple[object, str]] = {
    "rows": ((MISSING, LABELS), "3 examples .* not finite; fill them in"),
    "targets": ((INPUTS, MISSING[:, 1]), "3 examples .* not finite; fill them in"),
    "items": (
        list(zip(MISSING, LABELS, strict=True)),
        "1 examples .* not finite; fill",
    ),
    "shapes": (
        UNEVEN,
        r"give all items the same parts, types and shapes, for example by padding",
    ),
}


@pytest.mark.parametrize("kind", UNUSABLE)
def test_examples_that_count_as_zero_are_named(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Values that are missing, and sequences of many lengths, are the usual causes."""
    dataset, words = UNUSABLE[kind]
    regression = {"loss": lambda x, y: (x.sum(1) - y) ** 2} if kind == "targets" else {}
    plan = PrivacyPlan(1.0, 1.0, 20, 20)
    first_step(dataset, plan=plan, **regression)
    assert re.search(words, caplog.text)


ALL_MISSING = torch.full((20, 3), torch.nan)
HOPELESS: dict[str, tuple[object, str]] = {
    "all missing": (
        (ALL_MISSING, LABELS),
        "20 of 20 examples cannot be used; column 0, 1, 2 of the inputs has values "
        "that are not finite (NaN is a missing value): fill them in",
    ),
    "labels 1 to k": (
        (INPUTS, LABELS + 1),
        "labels go from 1 to 2, and the loss cannot take 2",
    ),
    "texts": (
        (INPUTS, ["cat", "dog"] * 10),
        "labels to integers 0..k-1, for example with sklearn's LabelEncoder",
    ),
    "texts in numpy": (
        (INPUTS, np.array(["cat", "dog"] * 10)),
        "labels to integers 0..k-1, for example with sklearn's LabelEncoder",
    ),
}


@pytest.mark.parametrize("kind", HOPELESS)
def test_a_simulation_refuses_data_that_train_nothing_but_noise(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    dataset, words = HOPELESS[kind]
    with pytest.raises(RuntimeError, match="no node could take the first step"):
        train_together(dataset)
    lines = [m for m in caplog.messages if words in m and "excluded" not in m]
    assert lines
    assert all(len(textwrap.wrap(line, 100)) <= 4 for line in lines)


def test_columns_that_decide_every_gradient_are_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    train_together((INPUTS * torch.tensor([1.0, 1.0, 1e4]), LABELS))
    (line,) = {m for m in caplog.messages if "decide every gradient" in m}
    assert "column 2 goes up to" in line
    assert "scale all columns by public bounds" in line


def test_a_delta_that_protects_nobody_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    train_together((INPUTS, LABELS), delta=0.05)
    (line,) = {m for m in caplog.messages if "THIS DELTA PROTECTS NOBODY" in m}
    assert "must be below 1/num_examples=0.05" in line
    assert "use 0.005 or less" in line


def train_together(dataset: object, **settings: Any) -> None:
    """Take one round of a simulation with three nodes."""

    def client_fn(context: Context) -> SafeDSHBClient:
        noise = SeededRandomness(0)
        more = {"randomness": noise, **settings}
        loss = nn.CrossEntropyLoss()
        return SafeDSHBClient(nn.Linear(3, 2), loss, dataset, PLAN, context, **more)

    grid = InProcessGrid(client_app(client_fn), 3)
    SafeDSHB().start(grid, trained_arrays(nn.Linear(3, 2)), 1)


class Sees(nn.Linear):
    """Takes images, while its library makes up words for every model."""

    main_input_name = "pixel_values"

    @property
    def dummy_inputs(self) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.ones(3, 5, dtype=torch.int64)}


def test_a_model_is_tried_on_what_it_takes() -> None:
    first_step((INPUTS, LABELS), model=Sees(3, 2))


def test_a_numpy_pair_is_no_error() -> None:
    first_step((INPUTS.double().numpy(), LABELS.int().numpy()))


def test_the_log_of_a_simulation_has_the_cause_in_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And the reply has nothing of it, nor does a traceback hide it."""

    def client_fn(context: Context) -> SafeDSHBClient:
        items = [{"img": x, "label": y} for x, y in ITEMS]
        noise = SeededRandomness(0)
        model, loss = nn.Linear(3, 2), nn.CrossEntropyLoss()
        return SafeDSHBClient(model, loss, items, PLAN, context, randomness=noise)

    (reply,) = send(client_app(client_fn))
    assert "img" not in str(reply.error.reason)
    told = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "name the target, as in target='label'" in told[0].getMessage()
    assert all(record.exc_info is None for record in told)
