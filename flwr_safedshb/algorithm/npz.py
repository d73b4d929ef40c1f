"""Read and write .npz files from sources that are not trusted.

``numpy.load`` trusts a file: a few kilobytes can make it allocate gigabytes, by
compression or by a shape. Here compressed and overlapping parts are refused, so that
reading takes no more memory than the file has bytes, and an array must have the shape
that its bytes fill. Nothing is unpickled.
"""

from __future__ import annotations

import io
import math
import os
import stat
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

Arrays = dict[str, NDArray[np.generic]]

# The only zip flag that a part may have: its name is in UTF-8.
_PLAIN_FLAGS = 0x0800
_KINDS = "biufc"
_SUFFIX = ".npy"


def write_archive(file: BinaryIO, arrays: Mapping[str, NDArray[np.generic]]) -> None:
    """Write arrays by name, as ``numpy.savez`` does.

    Not by that function: its versions differ in which names of arrays they accept.
    """
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            with archive.open(name + _SUFFIX, "w", force_zip64=True) as part:
                npy.write_array(part, array, allow_pickle=False)


def read_archive(path: Path, max_bytes: int) -> Arrays:
    """Return the arrays that `write_archive` wrote, by name.

    Raises
    ------
    FileNotFoundError
    ValueError
        If the file is not such an archive.
    """
    # O_NONBLOCK: a pipe must not make this wait for a writer.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(handle, "rb") as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode):
            raise ValueError("it is not a file")
        if about.st_size > max_bytes:
            raise ValueError(f"it has {about.st_size} bytes, more than {max_bytes}")
        try:
            with zipfile.ZipFile(file) as archive:
                return _read_parts(archive, about.st_size)
        except Exception as error:  # a broken file raises many kinds of errors
            raise ValueError(f"{type(error).__name__}: {error}") from error


def _read_parts(archive: zipfile.ZipFile, size: int) -> Arrays:
    parts = archive.infolist()
    names = [part.filename for part in parts]
    if len({*names}) != len(names) or not all(n.endswith(_SUFFIX) for n in names):
        raise ValueError("its parts are not arrays with a name each")
    for part in parts:
        stored = part.compress_type == zipfile.ZIP_STORED
        if not stored or part.file_size != part.compress_size:
            raise ValueError(f"{part.filename!r} is compressed")
        if part.flag_bits & ~_PLAIN_FLAGS:
            raise ValueError(f"{part.filename!r} has unexpected zip flags")
    if sum(part.file_size for part in parts) > size:
        raise ValueError("its parts overlap")
    return {
        part.filename.removesuffix(_SUFFIX): _parse_npy(archive.read(part))
        for part in parts
    }


def _parse_npy(content: bytes) -> NDArray[np.generic]:
    """Return the array of an .npy file."""
    file = io.BytesIO(content)
    version = npy.read_magic(file)
    readers = {
        (1, 0): npy.read_array_header_1_0,
        (2, 0): npy.read_array_header_2_0,
    }
    if version not in readers:
        raise ValueError(f"an array in format {version}")
    shape, by_columns, dtype = readers[version](file)
    if dtype.kind not in _KINDS or dtype.hasobject:
        raise ValueError(f"an array of {dtype}")
    body = len(content) - file.tell()
    if any(extent < 0 for extent in shape) or body != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"an array of shape {shape} in {body} bytes")
    values = np.frombuffer(content, dtype, offset=file.tell())
    array = values.reshape(shape, order="F" if by_columns else "C")
    if not np.isfinite(array).all():
        raise ValueError("an array with values that are not finite")
    return array
