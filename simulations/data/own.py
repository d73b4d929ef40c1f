"""A node's own examples, in a file that only its owner has.

``python -m simulations.data.own FOLDER num_nodes=3 data=phishing`` writes the shares of
an experiment as such files, to try a deployment with.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from simulations.command import Parser, prepare_folder, print_settings_errors
from simulations.config import SettingsError, check_types, explain_errors
from simulations.data.federation import Examples

_NAMES = {"inputs", "labels", "num_classes"}


@dataclass(frozen=True, eq=False)
class Own:
    """Examples, and the number of classes that all nodes together have."""

    examples: Examples
    num_classes: int


def save_own(path: Path, own: Own) -> None:
    """Write a node's examples; the file is readable by its owner only."""
    inputs, labels = (tensor.numpy() for tensor in own.examples)
    path.touch(mode=0o600, exist_ok=False)
    with path.open("wb") as file:
        np.savez(file, inputs=inputs, labels=labels, num_classes=own.num_classes)


def load_own(path: Path) -> Own:
    """Return what `save_own` wrote.

    The file is an .npz archive of ``inputs``, float32 of shape (m, ...), ``labels``,
    int64 of shape (m,) from 0 to k - 1, and ``num_classes``, k.

    Raises
    ------
    ValueError
        If the file holds something else; it never says what.
    """
    with np.load(path, allow_pickle=False) as archive:
        if set(archive) != _NAMES:
            raise ValueError(f"{path} must hold {', '.join(sorted(_NAMES))}")
        inputs, labels = archive["inputs"], archive["labels"]
        num_classes = int(archive["num_classes"])
    if inputs.dtype != np.float32 or not np.isfinite(inputs).all():
        raise ValueError(f"inputs in {path} must be finite numbers of type float32")
    if labels.dtype != np.int64 or labels.shape != inputs.shape[:1]:
        raise ValueError(f"labels in {path} must be int64, one for each input")
    if labels.size and not (labels.min() >= 0 and labels.max() < num_classes):
        raise ValueError(f"labels in {path} must lie in 0 .. num_classes - 1")
    return Own((torch.from_numpy(inputs), torch.from_numpy(labels)), num_classes)


@print_settings_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Write the shares of an experiment, one file a node."""
    from simulations.experiment import load_federation

    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("overrides", nargs="*", help="such as num_nodes=3")
    options = parser.parse_args(arguments)
    overrides = shlex.join(options.overrides)
    check_types(overrides)
    with explain_errors("data"):
        data = load_federation(overrides)
    prepare_folder(options.folder)
    paths = [options.folder / f"share-{i}.npz" for i in range(len(data.shards))]
    if there := [path for path in paths if path.exists()]:
        raise SettingsError(f"{there[0]} is there already; name another folder")
    for path, shard in zip(paths, data.shards, strict=True):
        save_own(path, Own(shard, data.num_classes))
        print(f"{path}: {len(shard[1])} examples")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
