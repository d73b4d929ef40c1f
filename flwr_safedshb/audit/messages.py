"""Send a node every odd message that a server could send, and give it odd examples.

The promise under test:

- a node answers with finite values in the shapes of its model, or refuses;
- no answer goes out that was not charged, unless the same bytes went out before;
- neither whether it answers nor how depends on its examples, since a server sees that:
  an example that cannot be used contributes nothing, and the node answers as ever.

What is compared is all that can be seen without looking at the noisy values: that there
is an answer, its shapes, its types, its metrics, the words of a refusal, and what was
charged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from flwr_safedshb.audit.outcomes import Outcome, Outcomes
from flwr_safedshb.audit.target_node import (
    CLASSES,
    FEATURES,
    GOOD_CONFIG,
    AuditDataset,
    MakeClient,
    Pair,
    TargetNode,
    temporary_ledgers,
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
ODD_VALUES: tuple[object, ...] = (*_NUMBERS, *_EDGES, *_NO_NUMBERS, *_TEXTS)


def odd_configs() -> Iterator[tuple[str, object]]:
    """Return configs of a round that are odd in one value."""
    for key in (*GOOD_CONFIG, "anchor", "run-steps", "run-evaluations"):
        for value in ODD_VALUES:
            what = f"{type(value).__name__} {value!r}"
            yield f"config {key}: {what}", {**GOOD_CONFIG, key: value}
        rest = {k: v for k, v in GOOD_CONFIG.items() if k != key}
        yield f"config without {key}", rest
    more = {**GOOD_CONFIG, "clip_norm": 1e9, "noise_multiplier": 0.0}
    yield "config with more", more
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
    good = [np.ones((CLASSES, FEATURES), np.float32), np.zeros(CLASSES, np.float32)]
    arrays = ArrayRecord(good)
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
        record = ArrayRecord(good)
        record["0"] = Array("float32", (CLASSES, FEATURES), "numpy.ndarray", data)
        yield f"{name} for an array", RecordDict({"arrays": record, "config": config})


def send_odd_messages(make_client: MakeClient = SafeDSHBClient) -> Outcomes:
    """Send all of them to two nodes with different examples, and compare."""
    cases = []
    with temporary_ledgers() as folder:
        nodes = [
            TargetNode(AuditDataset(seed), folder / str(seed), make_client)
            for seed in (1, 2)
        ]
        good = nodes[0].arrays
        for name, config in odd_configs():
            cases.append(_judge(name, nodes, TargetNode.fit, good, config))
        for name, arrays in odd_arrays():
            cases.append(_judge(name, nodes, TargetNode.fit, arrays, {**GOOD_CONFIG}))
        for name, content in odd_messages():
            cases.append(_judge(name, nodes, TargetNode.train, content))
    return Outcomes(cases)


def _judge(
    name: str, nodes: list[TargetNode], ask: Callable[..., str], *request: object
) -> Outcome:
    uncharged = ""
    answers = []
    for node in nodes:
        before = node.count_charges()
        answers.append(ask(node, *request))
        paid = node.count_charges() > before or node.is_repeated
        if answers[-1].startswith("answered") and not paid:
            uncharged = "an answer that was not charged"
    one, other = answers
    result = one.partition(":")[0]
    broken = uncharged
    if one != other:
        broken = f"{one!r} and {other!r} for other examples"
    elif "NOT FINITE" in one:
        broken = "the answer is not finite"
    elif result not in ("answered", "refused"):
        broken = f"no refusal, but {one}"
    return Outcome(name, result, broken)


def _raise(error: Exception) -> object:
    raise error


BAD_EXAMPLES: dict[str, Callable[[Pair], object]] = {
    "a label out of range": lambda pair: (pair[0], torch.tensor(7)),
    "a label far out of range": lambda pair: (pair[0], torch.tensor(2**40)),
    "a negative label": lambda pair: (pair[0], torch.tensor(-1)),
    "the label that torch ignores": lambda pair: (pair[0], torch.tensor(-100)),
    "a label that is no whole number": lambda pair: (pair[0], torch.tensor(0.5)),
    "a label of another shape": lambda pair: (pair[0], torch.tensor([0, 1])),
    "a label that is a word": lambda pair: (pair[0], "cat"),
    "no label": lambda pair: (pair[0], None),
    "not a number": lambda pair: (torch.full_like(pair[0], math.nan), pair[1]),
    "infinity": lambda pair: (torch.full_like(pair[0], math.inf), pair[1]),
    "the largest number": lambda pair: (torch.full_like(pair[0], 3.4e38), pair[1]),
    "the least number": lambda pair: (torch.full_like(pair[0], 1e-45), pair[1]),
    "an input of another shape": lambda pair: (torch.zeros(5), pair[1]),
    "an input without values": lambda pair: (torch.zeros(0), pair[1]),
    "an input of another type": lambda pair: (pair[0].long(), pair[1]),
    "an input of float64": lambda pair: (pair[0].double(), pair[1]),
    "a complex input": lambda pair: (pair[0].to(torch.complex64), pair[1]),
    "an input that wants a gradient": lambda pair: (
        pair[0].clone().requires_grad_(),
        pair[1],
    ),
    "a sparse input": lambda pair: (pair[0].to_sparse(), pair[1]),
    "a list for an input": lambda pair: ([1.0, 2.0, 3.0], pair[1]),
    "three things for two": lambda pair: (*pair, pair[1]),
    "one thing for two": lambda pair: pair[0],
    "nothing at all": lambda pair: None,
    "an example that cannot be read": lambda pair: _raise(OSError("disk")),
    "an example that is not there": lambda pair: _raise(IndexError("0")),
    "an example that ends the reading": lambda pair: _raise(StopIteration()),
    "an example without memory": lambda pair: _raise(MemoryError()),
}


def send_to_bad_examples(
    rounds: int = 12, make_client: MakeClient = SafeDSHBClient
) -> Outcomes:
    """Ask nodes the same, one without a bad example and one with each kind of them.

    The bad example is in about half of the batches, so a node whose answers depend on
    it answers `rounds` times as the other one does with probability 2^-rounds.
    """

    def transcribe(node: TargetNode) -> list[str]:
        answers = [node.step(number) for number in range(rounds)]
        return [*answers, f"{node.count_charges()} steps charged"]

    cases = []
    with temporary_ledgers() as folder:
        good = TargetNode(AuditDataset(), folder / "good", make_client)
        expected = transcribe(good)
        for number, (name, spoil) in enumerate(BAD_EXAMPLES.items()):
            dataset = AuditDataset(spoil=spoil)
            found = transcribe(TargetNode(dataset, folder / str(number), make_client))
            pairs = zip(found, expected, strict=True)
            others = [line for line, wanted in pairs if line != wanted]
            answered = sum(line.startswith("answered") for line in found)
            broken = f"{len(others)} other answers, as {others[0]!r}" if others else ""
            cases.append(Outcome(name, f"{answered} of {rounds} answered", broken))
    return Outcomes(cases)
