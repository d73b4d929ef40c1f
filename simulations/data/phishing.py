"""LIBSVM's phishing data: from a path, else from the cache, else downloaded into it."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from simulations.data.files import parse_libsvm
from simulations.data.table import Table

NAME = "phishing"
URL = f"https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/binary/{NAME}"
SHA256 = "0cf66ef36604c393da9359b2e5d894a2df8aee31fd184633cefa138add2ef08a"
NUM_FEATURES = 68


@dataclass(frozen=True)
class Phishing:
    """Web pages, phishing (1) or not (0), by 68 features; every row has norm 1.

    Attributes
    ----------
    path : str or None
        The file, or the folder that holds it as ``phishing``; None for the cache
        (``$SAFEDSHB_CACHE``, or this project's folder in the user's cache), and if it
        is not there for a download into it.
    test_fraction : float
    url : str
    sha256 : str
        Of the published file. Another file is refused, wherever it comes from.
    """

    path: str | None
    test_fraction: float
    url: str = URL
    sha256: str = SHA256

    def load(self) -> Table:
        """Return inputs of shape (11055, 68), in two classes."""
        content = self._given() if self.path is not None else self._cached()
        inputs, labels, _ = parse_libsvm(content, NUM_FEATURES, NAME)
        return Table(inputs, labels, 2, self.test_fraction)

    def _given(self) -> bytes:
        file = Path(self.path or "").absolute()
        file = file / NAME if file.is_dir() else file
        if not file.is_file():
            raise FileNotFoundError(
                f"there is no file {file}; give the path of LIBSVM's {NAME!r} as "
                "data.path, its folder as SAFEDSHB_DATA, or neither to download it"
            )
        content = file.read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        if digest != self.sha256:
            raise ValueError(
                f"{file} has sha256 {digest}, not {self.sha256}, so it is not LIBSVM's "
                f"{NAME!r}; remove it, or use data=libsvm for a file of your own"
            )
        return content

    def _cached(self) -> bytes:
        import pooch

        cache = os.environ.get("SAFEDSHB_CACHE") or pooch.os_cache("flwr-safedshb")
        try:
            return Path(
                pooch.retrieve(self.url, f"sha256:{self.sha256}", NAME, cache)
            ).read_bytes()
        except OSError as error:
            raise OSError(
                f"{self.url} could not be downloaded to {Path(cache) / NAME} ({error})."
                " Put the file there by other means, or give its path as data.path=..."
                " or its folder as SAFEDSHB_DATA, or choose another folder as "
                "SAFEDSHB_CACHE; data=breast-cancer, digits and synthetic need no file"
            ) from error
