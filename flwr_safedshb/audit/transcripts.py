"""Whether a node answers otherwise because of one bad example.

Whether a node answers is something that the server sees. So it must not depend on the
examples: one that cannot be used contributes nothing, and the node answers as ever.
Two nodes that differ in one example are asked the same; all that is compared is what
could be told apart without looking at the noisy values: that there is an answer, its
shapes, its types, its metrics, the words of a refusal, and what was charged.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils.data import Dataset

from flwr_safedshb.audit.outcomes import Case, Cases
from flwr_safedshb.audit.target_node import (
    MakeClient,
    Node,
    good_examples,
    quiet_folder,
)
from flwr_safedshb.client import SafeDSHBClient

Pair = tuple[torch.Tensor, torch.Tensor]


class Examples(Dataset[object]):
    """Examples, one of which may be bad in any way.

    Parameters
    ----------
    bad : callable (example) -> anything, optional
        Makes the bad one of a good one, whenever it is read; it may raise.
    """

    def __init__(self, bad: Callable[[Pair], object] | None = None) -> None:
        self._good = good_examples()
        self._bad = bad

    def __len__(self) -> int:
        return len(self._good)

    def __getitem__(self, index: int) -> object:
        if index == 0 and self._bad is not None:
            return self._bad(self._good[0])
        return self._good[index]


def _raising(error: Exception) -> Callable[[Pair], object]:
    def read(pair: Pair) -> object:
        raise error

    return read


def _valued(value: float) -> Callable[[Pair], object]:
    return lambda pair: (torch.full_like(pair[0], value), pair[1])


BAD: dict[str, Callable[[Pair], object]] = {
    "a label out of range": lambda pair: (pair[0], torch.tensor(7)),
    "a label far out of range": lambda pair: (pair[0], torch.tensor(2**40)),
    "a negative label": lambda pair: (pair[0], torch.tensor(-1)),
    "the label that torch ignores": lambda pair: (pair[0], torch.tensor(-100)),
    "a label that is no whole number": lambda pair: (pair[0], torch.tensor(0.5)),
    "a label of another shape": lambda pair: (pair[0], torch.tensor([0, 1])),
    "a label that is a word": lambda pair: (pair[0], "cat"),
    "no label": lambda pair: (pair[0], None),
    "not a number": _valued(float("nan")),
    "infinity": _valued(float("inf")),
    "the largest number": _valued(3.4e38),
    "the least number": _valued(1e-45),
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
    "an example that cannot be read": _raising(OSError("disk")),
    "an example that is not there": _raising(IndexError("0")),
    "an example that ends the reading": _raising(StopIteration()),
    "an example without memory": _raising(MemoryError()),
}


def compare_transcripts(
    rounds: int = 12, make_client: MakeClient = SafeDSHBClient
) -> Cases:
    """Ask a node with each kind of bad example, and one without any, the same.

    Each is in about half of the batches, so a node whose answers depend on it answers
    `rounds` times as the other one does with probability 2^-rounds.
    """
    cases = []
    with quiet_folder() as folder:
        expected = _transcript(Node(Examples(), folder / "good", make_client), rounds)
        for number, (name, bad) in enumerate(BAD.items()):
            node = Node(Examples(bad), folder / str(number), make_client)
            cases.append(_compared(name, expected, _transcript(node, rounds)))
    return Cases("answers with one bad example", cases)


def _transcript(node: Node, rounds: int) -> list[str]:
    said = [node.step(number) for number in range(rounds)]
    return [*said, f"{node.charged()} steps charged"]


def _compared(name: str, expected: list[str], found: list[str]) -> Case:
    others = [line for line, good in zip(found, expected, strict=True) if line != good]
    answered = sum(line.startswith("answered") for line in found)
    outcome = f"{answered} of {len(found) - 1} answered"
    broken = f"{len(others)} other answers, as {others[0]!r}" if others else ""
    return Case(name, outcome, broken)
