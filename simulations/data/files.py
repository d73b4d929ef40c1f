"""Data in files: any in the LIBSVM format, and Fashion-MNIST's IDX files."""

from __future__ import annotations

import gzip
import os
import struct
import zlib
from dataclasses import dataclass
from io import BytesIO
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from simulations.data.table import Table

# Where Debian's package dataset-fashion-mnist puts them.
DEBIAN_FASHION_MNIST = "/usr/share/datasets/fashion-mnist"
MISSING_FASHION_MNIST = (
    "Fashion-MNIST is not here: install Debian's package dataset-fashion-mnist "
    "(apt-get install dataset-fashion-mnist), or put its four IDX files into the "
    "folder fashion-mnist under $SAFEDSHB_DATA"
)
_UNSIGNED_BYTES = 8


def fashion_mnist() -> Path | None:
    """Return the folder of Fashion-MNIST's files, if there is one."""
    folders = [Path(DEBIAN_FASHION_MNIST)]
    if "SAFEDSHB_DATA" in os.environ:
        folders.insert(0, Path(os.environ["SAFEDSHB_DATA"]) / "fashion-mnist")
    for folder in folders:
        if any(folder.glob("train-images-idx3-ubyte*")):
            return folder.absolute()
    return None


def parse_libsvm(
    content: bytes, num_features: int | None, name: str
) -> tuple[NDArray[np.float32], NDArray[np.int64], int]:
    """Return features, (m, d), labels, (m,), and the number of classes.

    The values that stand for classes become 0, 1, ... in their order.
    """
    from sklearn.datasets import load_svmlight_file

    try:
        features, values = load_svmlight_file(
            BytesIO(content), n_features=num_features, zero_based=False
        )
    except ValueError as error:
        raise ValueError(
            f"{name} is not a LIBSVM file of num_features={num_features or 'any'} "
            f"features, counted from 1: {error}"
        ) from error
    classes, labels = np.unique(values, return_inverse=True)
    return features.toarray().astype(np.float32), labels.astype(np.int64), len(classes)


@dataclass(frozen=True)
class Libsvm:
    """A file in the LIBSVM format; the features stay as they are.

    Scale them by constants that are no statistics of private examples.
    """

    path: str
    num_features: int | None
    test_fraction: float

    def load(self) -> Table:
        """Return inputs of shape (m, d), in as many classes as there are labels."""
        path = Path(self.path).absolute()
        if not path.is_file():
            raise FileNotFoundError(
                f"data.path={self.path!r}: there is no file {path}; give the path of a "
                "file in the LIBSVM format"
            )
        content = path.read_bytes()
        inputs, labels, classes = parse_libsvm(content, self.num_features, str(path))
        return Table(inputs, labels, classes, self.test_fraction)


@dataclass(frozen=True)
class FashionMNIST:
    """Fashion-MNIST with its published test set; pixels are moved to [0, 1].

    Attributes
    ----------
    path : str or None
        The folder of its four IDX files, compressed or not; None for Debian's.
    """

    path: str | None

    def load(self) -> Table:
        """Return inputs of shape (70000, 1, 28, 28), in ten classes."""
        folder = Path(self.path or DEBIAN_FASHION_MNIST).absolute()
        images = [read_idx(folder, f"{part}-images-idx3-ubyte") for part in _PARTS]
        labels = [read_idx(folder, f"{part}-labels-idx1-ubyte") for part in _PARTS]
        pixels = np.concatenate(images)[:, np.newaxis].astype(np.float32)
        pixels /= 255
        tested = range(len(images[0]), len(pixels))
        return Table(pixels, np.concatenate(labels).astype(np.int64), 10, tested)


_PARTS = ("train", "t10k")


def read_idx(folder: Path, name: str) -> NDArray[np.uint8]:
    """Return the bytes of an IDX file, in the shape that it states."""
    plain, compressed = folder / name, folder / f"{name}.gz"
    try:
        if plain.is_file():
            content = plain.read_bytes()
        else:
            content = gzip.decompress(compressed.read_bytes())
    except FileNotFoundError:
        raise FileNotFoundError(
            f"there is no {name} and no {name}.gz in {folder}; install Debian's "
            "package dataset-fashion-mnist, or give the files' folder as data.path"
        ) from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{compressed} is damaged ({error}); fetch it anew") from error
    # Two zeros, the type of the values, the number of axes; then each axis' length.
    axes = content[3] if len(content) > 3 else 0
    start = 4 + 4 * axes
    shape = struct.unpack_from(f">{axes}I", content.ljust(start), 4)
    known = content[:3] == bytes([0, 0, _UNSIGNED_BYTES])
    if not known or len(content) != start + prod(shape):
        raise ValueError(f"{folder / name} is no IDX file of bytes, or not a whole one")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)
