"""Examples as a simulated federation holds them: a part per node, and a test set."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import blake2b, sha256
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from flwr_safedshb.attacks import LabelFlip
from simulations.data.splits import Rows, Split
from simulations.data.table import Source, Table

Examples = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Overlap:
    """Test examples whose inputs are also among the training examples.

    Attributes
    ----------
    tested : int
        Test examples.
    seen : int
        Of these, with inputs that some node trains on.
    contradicted : int
        Of those, with inputs that have another label in training, too.
    """

    tested: int
    seen: int
    contradicted: int


@dataclass(frozen=True, eq=False)
class Federation:
    """The data of one experiment.

    Attributes
    ----------
    shards : tuple of (inputs, labels)
        What each node holds: float32 of shape (m_i, ...) and int64 of shape (m_i,).
    training : (inputs, labels)
        All shards in a row; they are views of it.
    test : (inputs, labels)
    held_out : bool
        Whether no node trains on the test examples. Otherwise these are all examples.
    left_over : int
        Training examples that no node holds.
    num_classes : int
    """

    shards: tuple[Examples, ...]
    training: Examples
    test: Examples
    held_out: bool
    left_over: int
    num_classes: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of examples of each node, m: what its accountant must be told."""
        return tuple(len(labels) for _, labels in self.shards)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input."""
        return tuple(self.training[0].shape[1:])

    @cached_property
    def overlap(self) -> Overlap:
        """How far the test set repeats the training examples."""
        seen: dict[bytes, set[int]] = {}
        for row, label in _rows(self.training):
            seen.setdefault(row, set()).add(label)
        found = [(seen[row], label) for row, label in _rows(self.test) if row in seen]
        contradicted = sum(labels != {label} for labels, label in found)
        return Overlap(len(self.test[1]), len(found), contradicted)

    def check_batch_size(self, batch_size: int) -> None:
        """Refuse a batch that some node cannot draw."""
        for node, size in enumerate(self.sizes):
            if size < batch_size:
                raise ValueError(
                    f"node {node} holds num_examples={size}, fewer than batch_size="
                    f"{batch_size}; lower privacy.plan.batch_size, or share the data "
                    "out otherwise (split, split.alpha, split.min_examples, num_nodes)"
                )

    def summary(self) -> dict[str, object]:
        """Return what a report must say of the data."""
        return {
            "examples_per_node": list(self.sizes),
            "left_over": self.left_over,
            "test_set": "held-out examples" if self.held_out else "training examples",
            "test_examples": self.overlap.tested,
            "test_examples_also_in_training": self.overlap.seen,
            "test_examples_with_another_label_in_training": self.overlap.contradicted,
            "num_classes": self.num_classes,
            "input_shape": list(self.input_shape),
        }


def split_data(source: Source, split: Split, count: int, seed: int) -> Federation:
    """Load a dataset and share it out, once for equal arguments and unchanged files.

    Parameters
    ----------
    source : Source
    split : Split
    count : int
        Nodes that hold examples.
    seed : int
        Of the choice of the test set, which depends on nothing else, and of the split.
    """
    if count < 1:
        raise ValueError(f"count={count} must be at least 1; somebody must hold data")
    return _federated(_stamp(source), source, split, count, seed)


@lru_cache(maxsize=2)
def _federated(
    stamp: Hashable, source: Source, split: Split, count: int, seed: int
) -> Federation:
    table = _loaded(stamp, source)
    rng = np.random.default_rng(seed)
    training, tested = _test_rows(table, rng)
    if len(training) < count:
        raise ValueError(
            f"{len(training)} training examples are too few for {count} nodes; lower "
            "the number of nodes or test_fraction"
        )
    parts = [training[p] for p in split(table.labels[training], count, rng)]
    sizes = [len(part) for part in parts]
    inputs, labels = joined = _examples(table, np.concatenate(parts))
    shards = zip(torch.split(inputs, sizes), torch.split(labels, sizes), strict=True)
    return Federation(
        shards=tuple(shards),
        training=joined,
        test=_examples(table, tested),
        held_out=table.test != 0,
        left_over=len(training) - sum(sizes),
        num_classes=table.num_classes,
    )


def flip_labels(examples: Examples, num_classes: int) -> Examples:
    """Return examples as label flippers hold them: label l becomes k - 1 - l."""
    inputs, labels = examples
    return inputs, torch.from_numpy(LabelFlip().flip(labels.numpy(), num_classes))


def hash_data(source: Source) -> str:
    """Return a digest of all examples: files may change under the same path."""
    return _fingerprint(_stamp(source), source)


@lru_cache(maxsize=8)
def _fingerprint(stamp: Hashable, source: Source) -> str:
    table = _loaded(stamp, source)
    digest = sha256(f"{table.inputs.shape} {table.num_classes} {table.test}".encode())
    digest.update(np.ascontiguousarray(table.inputs).data)
    digest.update(np.ascontiguousarray(table.labels).data)
    return digest.hexdigest()


@lru_cache(maxsize=1)
def _loaded(stamp: Hashable, source: Source) -> Table:
    return source.load()


def _stamp(source: Source) -> Hashable:
    """Return what changes when a file of a source does: what was read is then old."""
    path = getattr(source, "path", None)
    if path is None:
        return None
    given = Path(path)
    files = sorted(given.iterdir()) if given.is_dir() else [given]
    states = [(file.name, file.stat()) for file in files if file.is_file()]
    return tuple((name, s.st_ino, s.st_size, s.st_mtime_ns) for name, s in states)


def _test_rows(table: Table, rng: np.random.Generator) -> tuple[Rows, Rows]:
    """Return the rows that train and those that test, each in a random order."""
    order = rng.permutation(len(table))
    if isinstance(table.test, range):
        published = np.isin(order, table.test)
        return order[~published], order[published]
    if table.test == 0:
        return order, order
    tested = int(len(order) * table.test)
    if tested == 0:
        raise ValueError(
            f"test_fraction={table.test} of {len(order)} examples is less than one; "
            "raise it, or use 0 to test on the training examples"
        )
    return order[tested:], order[:tested]


def _examples(table: Table, rows: Rows) -> Examples:
    return torch.from_numpy(table.inputs[rows]), torch.from_numpy(table.labels[rows])


def _rows(examples: Examples) -> list[tuple[bytes, int]]:
    inputs, labels = examples
    # Minus zero equals zero, and their bytes differ.
    rows: NDArray[np.float32] = inputs.flatten(1).numpy() + np.float32(0)
    return [
        (blake2b(row, digest_size=16).digest(), label)
        for row, label in zip(rows, labels.tolist(), strict=True)
    ]
