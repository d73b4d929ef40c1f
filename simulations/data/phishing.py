"""LIBSVM's phishing data: from a path, else from the cache, else downloaded into it."""

from __future__ import annotations

import hashlib
import os
import sys
import urllib.request
import zipfile
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flwr_safedshb.files import replace_file
from simulations.data.files import parse_libsvm
from simulations.data.table import Table

NAME = "phishing"
URL = f"https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/binary/{NAME}"
SHA256 = "0cf66ef36604c393da9359b2e5d894a2df8aee31fd184633cefa138add2ef08a"
NUM_BYTES = 3_620_168
NUM_FEATURES = 68
CACHE_VARIABLE = "SAFEDSHB_CACHE"
_TIMEOUT = 60.0


@dataclass(frozen=True)
class Phishing:
    """Web pages, phishing (1) or not (0), by 68 features; every row has norm 1.

    Attributes
    ----------
    path : str or None
        The file, or the folder that holds it as ``phishing``; None for the cache, and
        if it is not there for the download.
    test_fraction : float
    url : str
        Whatever comes from there must be the published bytes.
    """

    path: str | None
    test_fraction: float
    url: str = URL

    def load(self) -> Table:
        """Return inputs of shape (11055, 68), in two classes."""
        inputs, labels = _parsed(self._content())
        return Table(inputs, labels, 2, self.test_fraction)

    def _content(self) -> bytes:
        if self.path is not None:
            return _read(Path(self.path).absolute())
        cached = cache_folder() / NAME
        if cached.is_file():
            return _read(cached)
        content = _downloaded(self.url, cached)
        if _digest(content) != SHA256:
            raise ValueError(
                f"what {self.url} sent has sha256 {_digest(content)}, not {SHA256}, "
                "and was thrown away; try again, or give a good file as data.path"
            )
        # Whoever cannot write downloads again next time.
        with suppress(OSError):
            replace_file(cached, lambda file: file.write(content))
        return content


def cache_folder() -> Path:
    """Return $SAFEDSHB_CACHE, or this project's folder in the user's cache."""
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen).absolute()
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "flwr-safedshb"


def _read(path: Path) -> bytes:
    file = path / NAME if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(
            f"there is no file {file}; give the path of LIBSVM's {NAME!r} as "
            "data.path, its folder as SAFEDSHB_DATA, or neither to download it"
        )
    content = file.read_bytes()
    if _digest(content) != SHA256:
        raise ValueError(
            f"{file} has sha256 {_digest(content)}, not {SHA256}, so it is not "
            f"LIBSVM's {NAME!r}; remove it, or use data=libsvm for a file of your own"
        )
    return content


def _downloaded(url: str, cached: Path) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT) as response:
            # One byte more than right is enough to see that it is wrong.
            content: bytes = response.read(NUM_BYTES + 1)
    except (OSError, HTTPException) as error:
        raise ConnectionError(
            f"{url} could not be downloaded ({error}). Without a network, give the "
            f"path of the file as data.path=..., or its folder as SAFEDSHB_DATA, or "
            f"put it at {cached}; data=breast-cancer, digits and synthetic need no file"
        ) from error
    return content


def _parsed(content: bytes) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return features and labels; parsed once per cache, for parsing takes longest."""
    path = cache_folder() / f"{NAME}-{SHA256[:16]}.npz"
    # An archive that cannot be read is made again.
    with (
        suppress(OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile),
        np.load(path, allow_pickle=False) as archive,
    ):
        return archive["inputs"], archive["labels"]
    inputs, labels, _ = parse_libsvm(content, NUM_FEATURES, NAME)
    with suppress(OSError):
        replace_file(path, lambda file: np.savez(file, inputs=inputs, labels=labels))
    return inputs, labels


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
