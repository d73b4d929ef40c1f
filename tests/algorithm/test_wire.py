"""Arrays by name, and the same bytes and values as numpy's own functions."""

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from flwr_safedshb.algorithm.wire import (
    Template,
    TemplateMismatchError,
    decode_arrays,
    encode_array,
    encode_record,
)

MODEL = ArrayRecord(
    {"weight": Array(np.ones((2, 3), np.float32)), "count": Array(np.array(5))}
)


def test_what_is_written_is_read_again_under_the_same_names() -> None:
    values = [np.arange(6.0).reshape(2, 3), np.array(7, np.int64)]
    record = encode_record(MODEL, values)
    assert isinstance(record, ArrayRecord)
    assert list(record) == ["weight", "count"]
    for found, sent, flowers in zip(
        decode_arrays(record), values, record.to_numpy_ndarrays(), strict=True
    ):
        assert found.dtype == sent.dtype
        assert np.array_equal(found, sent)
        assert np.array_equal(found, flowers)
    assert decode_arrays(MODEL)[1] == 5  # the record is not changed


def test_the_number_of_arrays_must_be_that_of_the_names() -> None:
    with pytest.raises(ValueError, match="zip"):
        encode_record(MODEL, [np.zeros(1)])


def test_what_is_read_cannot_be_written_to() -> None:
    with pytest.raises(ValueError, match="read-only"):
        decode_arrays(MODEL)[0][0, 0] = 2


def test_a_template_orders_by_name_or_by_number_and_takes_no_others() -> None:
    dtype = np.dtype("<f4")
    arrays = {name: Array(np.full(2, i, "f4")) for i, name in enumerate("ab")}
    template = Template.of(ArrayRecord(arrays))
    assert template == Template(("a", "b"), ((2,), (2,)))
    for names in ("ba", "10"):
        values = (arrays["b"], arrays["a"])
        record = ArrayRecord(dict(zip(names, values, strict=True)))
        layers, data = template.decode_untrusted(record, dtype)
        assert [layer[0] for layer in layers] == [0, 1]
        assert data == (arrays["a"].data, arrays["b"].data)
    for names in ("a", "0b", "", "abc"):
        record = ArrayRecord(dict.fromkeys(names, arrays["a"]))
        with pytest.raises(TemplateMismatchError) as caught:
            template.decode_untrusted(record, dtype)
        assert caught.value.reason == "wrong-keys"


DTYPES = st.sampled_from(["<f4", "<f8", "<f2", "<i8", "|b1", ">f4", "<c8"])


@given(hnp.arrays(DTYPES, hnp.array_shapes(min_dims=0, min_side=0)), st.booleans())
def test_same_as_flower(values: NDArray[np.generic], transposed: bool) -> None:
    values = values.T if transposed else values
    ours, flowers = encode_array(values), Array(np.ascontiguousarray(values))
    if values.ndim:  # numpy makes one axis of none there
        assert ours == flowers
    assert np.array_equal(ours.numpy(), values, equal_nan=values.dtype.kind in "fc")
    decoded = decode_arrays(ArrayRecord({"x": Array(values)}))[0]
    assert decoded.shape == values.shape
    assert decoded.dtype == values.dtype
    assert decoded.tobytes() == values.tobytes()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no .npy data"),
        (b"PK\x03\x04", "no .npy data"),
        (b"\x93NUMPY\x01\x00\xff\xff", "a header of 65545 bytes in 10 bytes"),
        (encode_array(np.zeros(3)).data[:-1], "buffer size must be a multiple"),
        (encode_array(np.zeros(3)).data[:-8], "cannot reshape"),
        (encode_array(np.zeros(3)).data.replace(b"<f8'", b"|O' "), "objects"),
    ],
)
def test_other_bytes_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode_arrays(ArrayRecord({"x": Array("float64", (3,), "numpy.ndarray", data)}))
