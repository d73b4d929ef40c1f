"""The same bytes and values as numpy's own functions."""

import numpy as np
import pytest
from flwr.app import Array
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from flwr_safedshb.flower import codec

DTYPES = st.sampled_from(["<f4", "<f8", "<f2", "<i8", "|b1", ">f4", "<c8"])


@given(hnp.arrays(DTYPES, hnp.array_shapes(min_dims=0, min_side=0)), st.booleans())
def test_same_as_flower(values: NDArray[np.generic], transposed: bool) -> None:
    values = values.T if transposed else values
    ours, flowers = codec.encode(values), Array(np.ascontiguousarray(values))
    if values.ndim:  # numpy makes one axis of none there
        assert ours == flowers
    assert np.array_equal(ours.numpy(), values, equal_nan=values.dtype.kind in "fc")
    decoded = codec.decode(Array(values))
    assert decoded.shape == values.shape
    assert decoded.dtype == values.dtype
    assert decoded.tobytes() == values.tobytes()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no .npy data"),
        (b"PK\x03\x04", "no .npy data"),
        (b"\x93NUMPY\x01\x00\xff\xff", "a header of 65545 bytes in 10 bytes"),
        (codec.encode(np.zeros(3)).data[:-1], "buffer size must be a multiple"),
        (codec.encode(np.zeros(3)).data[:-8], "cannot reshape"),
        (codec.encode(np.zeros(3)).data.replace(b"<f8'", b"|O' "), "objects"),
    ],
)
def test_other_bytes_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        codec.decode(Array("float64", (3,), "numpy.ndarray", data))
