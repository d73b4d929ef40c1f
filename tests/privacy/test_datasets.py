"""Data as people have them: the same step whatever their form; else words."""

import math
import random
import signal
from collections import UserDict
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from flwr_safedshb import (
    PrivacyPlan,
    SafeDSHBClient,
    SecureRandomness,
    SeededRandomness,
    private_gradient,
    trained_arrays,
)
from flwr_safedshb.privacy.bad_examples import log_causes
from flwr_safedshb.privacy.datasets import DatasetError, make_examples
from tests.clients import node

SIZE = 20
PLAN = PrivacyPlan(1.0, 1.0, 4, SIZE)
INPUTS = torch.randn(SIZE, 3, generator=torch.Generator().manual_seed(0))
LABELS = (INPUTS.sum(dim=1) > 0).long()


def step(dataset: object, model: nn.Module | None = None, **settings: Any) -> bytes:
    """Return what a client sends of these examples."""
    torch.manual_seed(1)
    model = nn.Linear(3, 2) if model is None else model
    client = SafeDSHBClient(
        model,
        settings.pop("loss", nn.CrossEntropyLoss()),
        dataset,
        PLAN,
        node(),
        randomness=SeededRandomness(0),
        **settings,
    )
    weights = [np.full_like(a.numpy(), 0.1) for a in trained_arrays(model).values()]
    momentum, _, _ = client.fit(weights, {"step": 0, "momentum": 0.5})
    return b"".join(part.tobytes() for part in momentum)


class Columns(Dataset[object]):
    """Items by number, and nothing else."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> object:
        return self.items[index]


PAIRS = list(zip(INPUTS, LABELS, strict=True))
DICTS = [{"img": x, "label": int(y)} for x, y in PAIRS]
FORMS: dict[str, tuple[object, dict[str, Any]]] = {
    "TensorDataset": (TensorDataset(INPUTS, LABELS), {}),
    "numpy pair": ((INPUTS.numpy().astype(float), LABELS.numpy().astype("i4")), {}),
    "pairs": (Columns(PAIRS), {}),
    "pairs of numbers": ([(x.tolist(), int(y)) for x, y in PAIRS], {}),
    "dicts": (Columns(DICTS), {"target": "label"}),
    "other mappings": ([UserDict(item) for item in DICTS], {"target": "label"}),
    "dicts of lists": (
        [{"img": x.tolist(), "label": int(y)} for x, y in PAIRS],
        {"target": "label"},
    ),
    "triples": (
        [(x, i, y) for i, (x, y) in enumerate(PAIRS)],
        {"unpack": lambda item: (item[0], item[2])},
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_the_same_examples_gives_the_same_step(form: str) -> None:
    dataset, settings = FORMS[form]
    assert step(dataset, **settings) == step((INPUTS, LABELS))


class Keywords(nn.Linear):
    """A model that is called with keywords."""

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(torch.cat([left, right], dim=1))


class OneDict(nn.Linear):
    """A model that takes a dict."""

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
        return super().forward(torch.cat([batch["left"], batch["right"]], dim=1))


NESTED = [{"right": x[1:], "left": x[:1], "y": y} for x, y in PAIRS]
WHOLE = {"left": INPUTS[:, :1], "right": INPUTS[:, 1:]}


@pytest.mark.parametrize("kind", [Keywords, OneDict])
def test_several_inputs_reach_the_model_by_name(kind: type[nn.Linear]) -> None:
    expected = np.frombuffer(step((INPUTS, LABELS)), np.float32)
    items = step(NESTED, kind(3, 2), target="y")
    whole = step((WHOLE, LABELS), kind(3, 2))
    assert items == whole
    np.testing.assert_allclose(np.frombuffer(items, np.float32), expected, atol=1e-6)


def test_a_dict_whose_keys_come_in_another_order_is_the_same_example() -> None:
    turned = [dict(reversed(item.items())) if i % 2 else item for i, item in
              enumerate(NESTED)]  # fmt: skip
    assert step(turned, Keywords(3, 2), target="y") == step(
        NESTED, Keywords(3, 2), target="y"
    )


def test_an_item_that_is_built_otherwise_counts_as_zero(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As many tensors of the same shapes, under other names."""
    other = {"wrong": NESTED[5]["left"], "right": NESTED[5]["right"], "y": LABELS[5]}
    odd = [other if i == 5 else item for i, item in enumerate(NESTED)]
    with log_causes():
        assert make_examples(odd, "y").read_one(5) is None
    assert "wrong: float32 (k, 1)" in caplog.text
    step(odd, Keywords(3, 2), target="y")


LIKE = torch.zeros_like(INPUTS[0]), torch.zeros_like(LABELS[0])


def test_no_item_decides_what_the_others_look_like() -> None:
    """Neither the first, nor the first few."""
    one, all_but_one = ["what is this?", *PAIRS[1:]], [*"abcde", *PAIRS[5:]]
    for odd in (one, all_but_one):
        examples = make_examples(odd, like=LIKE)
        read = [examples.read_one(i) is not None for i in range(SIZE)]
        assert read == [not isinstance(item, str) for item in odd]


def test_private_randomness_wants_items_that_are_declared(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plan = PrivacyPlan(1.0, 1.0, 2, SIZE)
    pair = nn.Linear(3, 2), nn.CrossEntropyLoss()
    with pytest.raises(DatasetError, match="give like=") as refused:
        private_gradient(pair, PAIRS, plan, SecureRandomness())
    assert "zeros(3)" not in str(refused.value)  # which the server may see
    assert "like=(torch.zeros(3), torch.zeros((), dtype=torch.int64))" in caplog.text
    private_gradient(pair, PAIRS, plan, SecureRandomness(), like=LIKE)
    private_gradient(pair, PAIRS, plan, SeededRandomness(0))


def test_a_pair_of_arrays_takes_no_made_up_example() -> None:
    with pytest.raises(DatasetError, match="no like"):
        make_examples((INPUTS, LABELS), like=LIKE)


@pytest.mark.parametrize(
    "raised",
    [SystemExit, GeneratorExit, KeyboardInterrupt, BaseException],
)
def test_an_item_that_raises_anything_is_an_empty_place(
    raised: type[BaseException],
) -> None:
    class Raises(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            if index == 3:
                raise raised("private")
            return super().__getitem__(index)

    examples = make_examples(Raises(PAIRS), like=LIKE)
    _, _, usable = examples.read_batch(np.arange(SIZE))
    assert usable is not None
    assert usable.tolist() == [i != 3 for i in range(SIZE)]


def test_the_owner_can_stop_a_node_while_it_reads() -> None:
    class Stops(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            signal.raise_signal(signal.SIGTERM)
            return super().__getitem__(index)

    def stop(*_: object) -> None:
        raise SystemExit(0)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        with pytest.raises(SystemExit):
            make_examples(Stops(PAIRS), like=LIKE).read_one(0)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_ctrl_c_stops_a_node_while_it_reads() -> None:
    class Interrupted(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            signal.raise_signal(signal.SIGINT)
            return super().__getitem__(index)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            make_examples(Interrupted(PAIRS), like=LIKE).read_one(0)
    finally:
        signal.signal(signal.SIGINT, before)


FLOWER = """
import signal

def leave(number, frame):
    signal.signal(number, earlier)
    finish()

def finish():
    raise SystemExit(0)
"""


def flower() -> dict[str, Any]:
    """Return a module of Flower, whose handler puts the earlier one back and exits."""
    module: dict[str, Any] = {"__name__": "flwr.own"}
    exec(compile(FLOWER, "exit_handler.py", "exec"), module)
    return module


def test_flowers_own_exit_stops_a_node_while_it_reads() -> None:
    class Left(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            signal.raise_signal(signal.SIGTERM)

    module = flower()
    module["earlier"] = signal.signal(signal.SIGTERM, module["leave"])
    try:
        with pytest.raises(SystemExit):
            make_examples(Left(PAIRS), like=LIKE).read_one(0)
    finally:
        signal.signal(signal.SIGTERM, module["earlier"])


def test_an_exit_of_flower_that_an_item_causes_stops_nobody() -> None:
    """Functions of Flower exit on bad arguments, and those may come from an item."""

    class Exits(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            flower()["finish"]()

    assert make_examples(Exits(PAIRS), like=LIKE).read_one(0) is None


def test_a_time_limit_of_the_datasets_own_stops_nobody() -> None:
    class Slow(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            signal.raise_signal(signal.SIGALRM)
            return super().__getitem__(index)

    def late(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    try:
        assert make_examples(Slow(PAIRS), like=LIKE).read_one(0) is None
    finally:
        signal.signal(signal.SIGALRM, before)


def test_what_one_item_draws_changes_no_other() -> None:
    class Augmented(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            inputs, label = super().__getitem__(index)
            if index == self.greedy:
                torch.rand(7), np.random.rand(7), random.random()  # noqa: NPY002
            noise = float(torch.rand(())) + np.random.rand()  # noqa: NPY002
            return inputs + noise + random.random(), label

        greedy = -1

    dataset = Augmented(PAIRS)
    found = []
    for dataset.greedy in (-1, 2):
        torch.manual_seed(0)
        inputs, _, _ = make_examples(dataset, like=LIKE).read_batch(np.arange(SIZE))
        found.append(cast(torch.Tensor, inputs))
    changed = (found[0] != found[1]).any(dim=1)
    assert changed.nonzero().flatten().tolist() == [2]


def test_a_dataset_may_use_the_same_memory_for_every_item() -> None:
    class Reused(list[Any]):
        memory = torch.zeros(3)

        def __getitem__(self, index: Any) -> Any:
            inputs, label = super().__getitem__(index)
            return self.memory.copy_(inputs), label

    inputs, _, _ = make_examples(Reused(PAIRS), like=LIKE).read_batch(np.arange(SIZE))
    torch.testing.assert_close(cast(torch.Tensor, inputs), INPUTS)


class Odd(torch.Tensor):
    """A tensor of a kind of its own, which cannot be joined with others."""

    @classmethod
    def __torch_function__(cls, func: Any, *more: Any, **others: Any) -> Any:
        if func is torch.cat:
            raise ValueError("not with me")
        return super().__torch_function__(func, *more, **others)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    "odd",
    [
        INPUTS[0].as_subclass(Odd),
        INPUTS[0].to_sparse(),
        INPUTS[0].to("meta"),
        {"x: float32 [3], y": INPUTS[0]},
    ],
)
def test_an_item_of_any_kind_leaves_the_others_as_they_are(odd: object) -> None:
    items: list[Any] = [*PAIRS]
    items[5] = odd, LABELS[5]
    inputs, _, usable = make_examples(items, like=LIKE).read_batch(np.arange(SIZE))
    others = np.arange(SIZE) != 5
    assert usable is not None
    assert usable[others].all()
    found = cast(torch.Tensor, inputs)[others]
    torch.testing.assert_close(found, INPUTS[others])


def test_rows_that_are_not_finite_are_empty_places_from_the_start() -> None:
    inputs = INPUTS.clone()
    inputs[2, 1], inputs[4, 0] = math.nan, math.inf
    drawn, _, usable = make_examples((inputs, LABELS)).read_batch(np.arange(SIZE))
    assert usable is not None
    assert usable.tolist() == [i not in (2, 4) for i in range(SIZE)]
    assert cast(torch.Tensor, drawn).isfinite().all()


def test_values_within_an_example_are_reduced_as_the_loss_says() -> None:
    """Several labels: the mean or the sum over an example's own."""
    labels = torch.rand(SIZE, 2).round()
    by_hand = {
        "mean": lambda o, t: nn.BCEWithLogitsLoss(reduction="none")(o, t).mean(1),
        "sum": lambda o, t: nn.BCEWithLogitsLoss(reduction="none")(o, t).sum(1),
    }
    for reduction, loss in by_hand.items():
        ours = step((INPUTS, labels), loss=nn.BCEWithLogitsLoss(reduction=reduction))
        theirs = step((INPUTS, labels), loss=loss)
        np.testing.assert_allclose(
            np.frombuffer(ours, np.float32),
            np.frombuffer(theirs, np.float32),
            atol=1e-6,
        )


class Broken(Dataset[object]):
    """Its files are gone; a simulation trained on noise alone, and looked well."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> object:
        raise OSError("no such image")


class Stream(IterableDataset[object]):
    def __iter__(self) -> Iterator[object]:
        return iter(PAIRS)


@pytest.mark.parametrize(
    ("dataset", "settings", "words"),
    [
        (DICTS, {}, "items are dicts with keys img, label; name the target, as in t"),
        (DICTS, {"target": "y"}, "with keys img, label, and none is y; name the ta"),
        ([(x, y, 0) for x, y in PAIRS], {}, "items are tuples of 3, and not pairs"),
        (list(INPUTS), {}, "items are single arrays, and not pairs"),
        (DataLoader(TensorDataset(INPUTS, LABELS)), {}, r"loader\.dataset"),
        (Stream(), {}, "is a Stream, whose items have no numbers"),
        ({"x": INPUTS, "y": LABELS}, {}, "is a dict, whose items have no numbers"),
        ((INPUTS, LABELS[1:]), {}, "as many rows; they have 19, 20"),
        ([("text", y) for _, y in PAIRS], {}, "the input is of type str, and a model"),
        (PAIRS, {"unpack": lambda item: item[0]}, "unpack returns single arrays"),
        (
            DICTS,
            {"unpack": lambda item: (item["image"], item["label"])},
            "unpack fails: KeyError: 'image'; items are dicts with keys img, label",
        ),
        (PAIRS, {"target": "label"}, "tuples of 2, and target='label' is for dicts"),
        ([{"label": y} for _, y in PAIRS], {"target": "label"}, "with nothing beside"),
        (Broken(), {}, "none of the first items can be read: OSError: no such image"),
        (PAIRS, {"target": "y", "unpack": len}, "give target or unpack, not both"),
    ],
)
def test_what_cannot_be_told_is_said_in_words(
    dataset: object, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(DatasetError, match=words):
        step(dataset, **settings)
