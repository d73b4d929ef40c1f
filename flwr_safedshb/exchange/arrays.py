"""The arrays of a message: their names and shapes, and their values.

The server sends the arrays of a model, by name, and every client answers with arrays of
the same names and shapes. A `Template` is what both sides compare with.

>>> template = Template.of(ArrayRecord({"weight": Array(np.zeros((2, 3)))}))
>>> template.names, template.shapes
(('weight',), ((2, 3),))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray

from flwr_safedshb.flower import codec
from flwr_safedshb.flower.compat import refilled

Arrays = list[NDArray[np.generic]]


@dataclass(frozen=True)
class Template:
    """Names and shapes of a model's arrays, as every reply must have them."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, record: ArrayRecord) -> Template:
        """Return the template of a model that this side holds itself."""
        return cls(tuple(record), tuple(array.shape for array in read(record)))

    def ordered(self, record: ArrayRecord) -> list[Array] | None:
        """Return a record's arrays in the model's order; None for other names.

        A NumPyClient numbers its arrays in place of naming them.
        """
        for names in (self.names, tuple(map(str, range(len(self.names))))):
            if record.keys() == set(names):
                return [record[name] for name in names]
        return None


def read(record: ArrayRecord) -> Arrays:
    """Return the values of a record's arrays, as views that cannot be written to.

    Raises
    ------
    ValueError
        If the bytes are not those of plain arrays.
    """
    return [codec.decode(array) for array in record.values()]


def written(record: ArrayRecord, arrays: Sequence[NDArray[np.generic]]) -> ArrayRecord:
    """Return a record with the names of `record` and these values."""
    values = zip(record, arrays, strict=True)
    return refilled(record, {name: codec.encode(array) for name, array in values})
