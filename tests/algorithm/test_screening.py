"""Malformed replies are excluded for their reason; what passes is what was sent."""

import sys

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Error, Message, RecordDict

from flwr_safedshb.algorithm import screening
from flwr_safedshb.algorithm.screening import Accepted, Excluded
from flwr_safedshb.algorithm.wire import Template
from flwr_safedshb.flower.compat import set_message_id, set_process_run
from tests.replies import KINDS, Layers, record, with_arrays

SHAPES = ((2, 17), (3,), ())


def honest_layers(seed: int = 0) -> Layers:
    rng = np.random.default_rng(seed)
    return [np.asarray(rng.normal(size=shape), np.float32) for shape in SHAPES]


def model(names: tuple[str, ...] = ("weight", "bias", "scale")) -> ArrayRecord:
    layers = zip(names, honest_layers(), strict=True)
    return ArrayRecord({name: Array(layer) for name, layer in layers})


def instruction() -> Message:
    set_process_run(1)
    return Message(RecordDict(), dst_node_id=2, message_type="train")


def screen_reply(content: RecordDict) -> Accepted | Excluded:
    reply = Message(content, reply_to=instruction())
    return screening.screen_reply(Template.of(model()), reply)


def test_a_reply_counts_from_the_node_that_was_asked_and_once() -> None:
    asked = instruction()
    set_message_id(asked, "asked")
    replies = [Message(RecordDict(), reply_to=asked) for _ in range(3)]
    replies[0].metadata.__dict__["_src_node_id"] = 3
    answered, silent, ignored = screening.match_replies([asked], replies)
    assert answered == [(2, replies[1])]
    assert (silent, ignored) == ([], 2)
    assert screening.match_replies([asked], replies[:1]) == ([], [2], 1)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_reply(kind: str) -> None:
    hostile = KINDS[kind]
    layers = honest_layers()
    result = screen_reply(hostile.make(layers))
    if hostile.reason is None:
        assert isinstance(result, Accepted)
        assert [layer.shape for layer in result.layers] == list(SHAPES)
        assert all(layer.dtype == np.float32 for layer in result.layers)
        assert np.array_equal(result.layers[1], layers[1])
    else:
        assert result == Excluded(hostile.reason)
        assert result.proves_adversary
    assert "this" not in sys.modules  # a pickle that was loaded imports it


def test_an_honest_reply_passes_under_both_kinds_of_names() -> None:
    layers = honest_layers(1)
    named = dict(zip(("scale", "weight", "bias"), np.roll(range(3), 1), strict=True))
    shuffled = ArrayRecord({name: Array(layers[i]) for name, i in named.items()})
    for content in (record(list(layers)), with_arrays(shuffled)):
        result = screen_reply(content)
        assert isinstance(result, Accepted)
        for found, sent in zip(result.layers, layers, strict=True):
            assert np.array_equal(found, sent)


def test_fortran_order_is_read_as_such() -> None:
    layers = honest_layers()
    result = screen_reply(record([np.asfortranarray(layers[0]), *layers[1:]]))
    assert isinstance(result, Accepted)
    assert np.array_equal(result.layers[0], layers[0])


def test_errors_and_silence_prove_nothing() -> None:
    failed = Message(Error(2, "reason"), reply_to=instruction())
    result = screening.screen_reply(Template.of(model()), failed)
    assert result == Excluded("error")
    assert not Excluded("error").proves_adversary
    assert not Excluded("missing").proves_adversary


def test_objects_that_are_no_records_are_malformed() -> None:
    """In process a client can put any object where bytes belong."""
    arrays = ArrayRecord(list(honest_layers()))
    arrays["1"].data = 5  # type: ignore[assignment]
    assert screen_reply(with_arrays(arrays)) == Excluded("malformed")
    nothing = Message(RecordDict(), reply_to=instruction())
    nothing.__dict__["_content"] = None
    assert screening.screen_reply(Template.of(model()), nothing) == Excluded(
        "malformed"
    )


def test_equal_layers_are_encoded_equally() -> None:
    first, again, other = (
        screen_reply(record(list(honest_layers(seed)))) for seed in (0, 0, 1)
    )
    assert isinstance(first, Accepted)
    assert isinstance(again, Accepted)
    assert isinstance(other, Accepted)
    assert first.encoded == again.encoded != other.encoded
