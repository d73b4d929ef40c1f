"""Sends a node every odd message that a server could send.

Promised is: a node answers with finite values in the shapes of its model, or refuses;
it says the same whatever its examples are; and no answer goes out that was not charged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch.utils.data import Dataset

from flwr_safedshb.audit.outcomes import Case, Cases
from flwr_safedshb.audit.target_node import (
    ASKED,
    CLASSES,
    FEATURES,
    MakeClient,
    Node,
    good_examples,
    quiet_folder,
)
from flwr_safedshb.client import SafeDSHBClient

_NUMBERS = (0, -1, 1, 2**63, 2**70, 10**400, 0.0, -0.0, 0.5, 1.0, 1.5, -1e-9)
_EDGES = (5e-324, 1e-310, 1 - 2**-53, 1e308, math.inf, -math.inf, math.nan)
_NO_NUMBERS: tuple[object, ...] = (
    True,
    False,
    "0",
    "",
    b"0",
    None,
    [0],
    {},
    1j,
    np.float64(0.5),
)
_TEXTS = ("x" * 64, "x" * 65, "../../up", "\0", "a\nb", "'; drop table charges; --")
ODD: tuple[object, ...] = (*_NUMBERS, *_EDGES, *_NO_NUMBERS, *_TEXTS)


class _Good(Dataset[object]):
    """Examples without a fault; two seeds have two sets of them."""

    def __init__(self, seed: int) -> None:
        self._examples = good_examples(seed)

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> object:
        return self._examples[index]


def odd_configs() -> Iterator[tuple[str, object]]:
    """Return configs of a round that are odd in one value."""
    for key in (*ASKED, "anchor", "run-steps", "run-evaluations"):
        for value in ODD:
            what = f"{type(value).__name__} {value!r}"
            yield f"config {key}: {what}", {**ASKED, key: value}
        yield f"config without {key}", {k: v for k, v in ASKED.items() if k != key}
    yield "config with more", {**ASKED, "clip_norm": 1e9, "noise_multiplier": 0.0}
    yield "config without anything", {}


def odd_arrays() -> Iterator[tuple[str, list[object]]]:
    """Return models that are odd in one array."""
    shape = CLASSES, FEATURES
    bias = np.zeros(CLASSES, np.float32)
    for value in (math.nan, math.inf, -math.inf, 3.4e38, 1e-45, -0.0):
        yield f"weights of {value}", [np.full(shape, value, np.float32), bias]
        yield f"bias of {value}", [np.ones(shape, np.float32), bias + np.float32(value)]
    for kind in ("f8", "f2", "i8", "i1", "u8", "c8", "?", "U3", "S3", "M8[s]", ">f4"):
        yield f"weights of type {kind}", [np.zeros(shape, kind), bias]
    weights = np.ones(shape, np.float32)
    yield "huge weights of float64", [np.full(shape, 1e300), bias]
    yield "weights of objects", [np.full(shape, None), bias]
    yield "weights in columns", [np.asfortranarray(weights), bias]
    yield "weights backwards", [weights[::-1], bias]
    yield "weights turned over", [weights.T, bias]
    yield "one array", [weights]
    yield "three arrays", [weights, bias, bias]
    yield "no arrays", []
    yield "arrays in another order", [bias, weights]
    yield "weights without an axis", [np.float32(1.0), bias]
    yield "weights with an axis of 0", [np.zeros((0, FEATURES), np.float32), bias]
    yield "one more axis", [weights[None], bias]
    yield "a list of lists", [weights.tolist(), bias]


def odd_messages() -> Iterator[tuple[str, RecordDict]]:
    """Return messages of other records than a round's."""
    node_arrays = [
        np.ones((CLASSES, FEATURES), np.float32),
        np.zeros(CLASSES, np.float32),
    ]
    arrays = ArrayRecord(node_arrays)
    config = ConfigRecord({"step": 0, "momentum": 0.5})
    yield "no records", RecordDict({})
    yield "no config", RecordDict({"arrays": arrays})
    yield "no arrays", RecordDict({"config": config})
    yield "two configs", RecordDict({"arrays": arrays, "a": config, "b": config})
    yield "two models", RecordDict({"a": arrays, "b": arrays, "config": config})
    yield "metrics too", RecordDict({"a": arrays, "c": config, "m": MetricRecord({})})
    for name, data in (
        ("no bytes", b""),
        ("a pickle", b"\x80\x04N."),
        ("the start of an array", b"\x93NUMPY\x01\x00v\x00"),
        ("a header that lies", b"\x93NUMPY\x01\x00\xff\xff" + b" " * 50),
    ):
        record = ArrayRecord(node_arrays)
        record["0"] = Array("float32", (CLASSES, FEATURES), "numpy.ndarray", data)
        yield f"{name} for an array", RecordDict({"arrays": record, "config": config})


def send_odd_messages(make_client: MakeClient = SafeDSHBClient) -> Cases:
    """Send all of them to two nodes with different examples, and compare."""
    cases = []
    with quiet_folder() as folder:
        nodes = [Node(_Good(seed), folder / str(seed), make_client) for seed in (1, 2)]
        good = nodes[0].arrays
        for name, config in odd_configs():
            cases.append(_judged(name, nodes, Node.fit, good, config))
        for name, arrays in odd_arrays():
            cases.append(_judged(name, nodes, Node.fit, arrays, {**ASKED}))
        for name, content in odd_messages():
            cases.append(_judged(name, nodes, Node.train, content))
    return Cases("messages of a server", cases)


def _judged(
    name: str, nodes: list[Node], ask: Callable[..., str], *asked: object
) -> Case:
    unpaid = ""
    answers = []
    for node in nodes:
        before = node.charged()
        answers.append(ask(node, *asked))
        if answers[-1].startswith("answered") and node.charged() == before:
            unpaid = "an answer that was not charged"
    one, other = answers
    outcome = one.partition(":")[0]
    broken = unpaid
    if one != other:
        broken = f"{one!r} and {other!r} for other examples"
    elif "NOT FINITE" in one:
        broken = "the answer is not finite"
    elif outcome not in ("answered", "refused"):
        broken = f"no refusal, but {one}"
    return Case(name, outcome, broken)
