"""Arrays by name: what is written is read again, and other names are told."""

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord

from flwr_safedshb.exchange.arrays import Template, read, written

MODEL = ArrayRecord(
    {"weight": Array(np.ones((2, 3), np.float32)), "count": Array(np.array(5))}
)


def test_what_is_written_is_read_again_under_the_same_names() -> None:
    values = [np.arange(6.0).reshape(2, 3), np.array(7, np.int64)]
    record = written(MODEL, values)
    assert isinstance(record, ArrayRecord)
    assert list(record) == ["weight", "count"]
    for found, given, flowers in zip(
        read(record), values, record.to_numpy_ndarrays(), strict=True
    ):
        assert found.dtype == given.dtype
        assert np.array_equal(found, given)
        assert np.array_equal(found, flowers)
    assert read(MODEL)[1] == 5  # another record, and not this one with other values


def test_the_number_of_arrays_must_be_that_of_the_names() -> None:
    with pytest.raises(ValueError, match="zip"):
        written(MODEL, [np.zeros(1)])


def test_what_is_read_cannot_be_written_to() -> None:
    with pytest.raises(ValueError, match="read-only"):
        read(MODEL)[0][0, 0] = 2


def test_a_template_orders_by_name_or_by_number_and_takes_no_others() -> None:
    template = Template.of(MODEL)
    assert template == Template(("weight", "count"), ((2, 3), ()))
    weight, count = MODEL.values()
    for names in (("count", "weight"), ("1", "0")):
        record = ArrayRecord(dict(zip(names, (count, weight), strict=True)))
        assert template.ordered(record) == [weight, count]
    for wrong in ({"weight": weight}, {"0": weight, "count": count}, {}):
        assert template.ordered(ArrayRecord(wrong)) is None
    more = {"weight": weight, "count": count, "more": count}
    assert template.ordered(ArrayRecord(more)) is None
