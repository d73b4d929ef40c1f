"""Replies that no honest client sends, by name, and why each must be excluded."""

import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from numpy.typing import NDArray

from flwr_safedshb.algorithm.screening import Reason
from flwr_safedshb.algorithm.wire import MOMENTUM_TAG

Layers = list[NDArray[np.float32]]


@dataclass(frozen=True)
class Hostile:
    """How to spoil the honest layers, and the reason expected; None: it must pass."""

    make: Callable[[Layers], RecordDict]
    reason: Reason | None


def record(layers: list[NDArray[np.generic]], num_examples: int = 1) -> RecordDict:
    arrays = ArrayRecord({str(i): Array(layer) for i, layer in enumerate(layers)})
    return with_arrays(arrays, num_examples)


def with_arrays(arrays: ArrayRecord, num_examples: int = 1) -> RecordDict:
    metrics = MetricRecord({"num-examples": num_examples, MOMENTUM_TAG: 1})
    return RecordDict({"arrays": arrays, "metrics": metrics})


def raw(data: bytes, layers: Layers, stype: str = "numpy.ndarray") -> RecordDict:
    """Put bytes in place of the first layer, with an honest declaration."""
    arrays = ArrayRecord(list(layers))
    first = layers[0]
    arrays["0"] = Array(str(first.dtype), first.shape, stype, data)
    return with_arrays(arrays)


def npy(layer: NDArray[np.generic], version: tuple[int, int] | None = None) -> bytes:
    with io.BytesIO() as buffer:
        np.lib.format.write_array(buffer, layer, version, allow_pickle=True)
        return buffer.getvalue()


def claims(shape: str, descr: str = "'<f4'", body: bytes = b"") -> bytes:
    """Write a file whose header claims what its body does not hold."""
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    text += b" " * (-(len(text) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + body


def _with_first(layers: Layers, layer: NDArray[np.generic]) -> RecordDict:
    return record([layer, *layers[1:]])


def _filled(value: float) -> Callable[[Layers], RecordDict]:
    return lambda layers: _with_first(layers, np.full_like(layers[0], value))


def _one(value: float) -> Callable[[Layers], RecordDict]:
    def make(layers: Layers) -> RecordDict:
        layer = layers[0].copy()
        layer.flat[-1] = value
        return _with_first(layers, layer)

    return make


def _cast(dtype: str) -> Callable[[Layers], RecordDict]:
    return lambda layers: _with_first(layers, layers[0].astype(dtype))


def _bytes(
    make: Callable[[NDArray[np.float32]], bytes],
) -> Callable[[Layers], RecordDict]:
    return lambda layers: raw(make(layers[0]), layers)


def _examples(count: int) -> Callable[[Layers], RecordDict]:
    return lambda layers: record(list(layers), count)


def _added(
    key: str, extra: ArrayRecord | MetricRecord | ConfigRecord
) -> Callable[[Layers], RecordDict]:
    def make(layers: Layers) -> RecordDict:
        content = record(list(layers))
        content[key] = extra
        return content

    return make


def _renamed(layers: Layers) -> RecordDict:
    arrays = {f"x{i}": Array(layer) for i, layer in enumerate(layers)}
    return with_arrays(ArrayRecord(arrays))


def _lies(layers: Layers) -> RecordDict:
    arrays = ArrayRecord(list(layers))
    arrays["0"] = Array("int8", (3, 5), "numpy.ndarray", arrays["0"].data)
    return with_arrays(arrays)


class _Bomb:
    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return __import__, ("this",)


KINDS: dict[str, Hostile] = {
    "nan": Hostile(_filled(np.nan), "not-finite"),
    "one nan": Hostile(_one(np.nan), "not-finite"),
    "inf": Hostile(_filled(np.inf), "not-finite"),
    "one -inf": Hostile(_one(-np.inf), "not-finite"),
    "inf and -inf": Hostile(
        lambda layers: _with_first(
            layers, np.resize(np.array([np.inf, -np.inf], "f4"), layers[0].shape)
        ),
        "not-finite",
    ),
    "huge": Hostile(_filled(1e38), None),
    "largest": Hostile(_filled(-float(np.finfo(np.float32).max)), None),
    "subnormal": Hostile(_filled(1e-45), None),
    "zero": Hostile(_filled(0.0), None),
    "shape (1,)": Hostile(
        lambda layers: _with_first(layers, layers[0].reshape(-1)[:1].copy()),
        "wrong-shape",
    ),
    "scalar": Hostile(
        lambda layers: _with_first(layers, np.array(1.0, "f4")), "wrong-shape"
    ),
    "one axis more": Hostile(
        lambda layers: _with_first(layers, layers[0][None]), "wrong-shape"
    ),
    "empty": Hostile(
        lambda layers: _with_first(layers, np.empty(0, "f4")), "wrong-shape"
    ),
    "longer by one": Hostile(
        lambda layers: _with_first(layers, np.zeros(layers[0].size + 1, "f4")),
        "wrong-shape",
    ),
    "a million more": Hostile(
        lambda layers: _with_first(layers, np.zeros(layers[0].size + 10**6, "f4")),
        "too-large",
    ),
    "float16": Hostile(_cast("<f2"), "wrong-dtype"),
    "float64": Hostile(_cast("<f8"), "wrong-dtype"),
    "big endian": Hostile(_cast(">f4"), "wrong-dtype"),
    "int32": Hostile(_cast("<i4"), "wrong-dtype"),
    "bool": Hostile(_cast("?"), "wrong-dtype"),
    "complex": Hostile(_cast("<c8"), "wrong-dtype"),
    "text": Hostile(_cast("<U1"), "wrong-dtype"),
    "structured": Hostile(
        lambda layers: _with_first(layers, np.zeros(layers[0].shape, "f4,f4")),
        "wrong-dtype",
    ),
    "pickle": Hostile(
        _bytes(lambda layer: npy(np.array([_Bomb()], dtype=object))), "wrong-dtype"
    ),
    "bare pickle": Hostile(_bytes(lambda layer: pickle.dumps(_Bomb())), "malformed"),
    "no bytes": Hostile(_bytes(lambda layer: b""), "malformed"),
    "cut off": Hostile(_bytes(lambda layer: npy(layer)[:-1]), "malformed"),
    "header cut off": Hostile(_bytes(lambda layer: npy(layer)[:20]), "malformed"),
    "one byte more": Hostile(_bytes(lambda layer: npy(layer) + b"\0"), "malformed"),
    "version 2": Hostile(_bytes(lambda layer: npy(layer, (2, 0))), "malformed"),
    "a zip": Hostile(_bytes(lambda layer: b"PK\x03\x04" + npy(layer)), "malformed"),
    "claims terabytes": Hostile(_bytes(lambda layer: claims("(10**12,)")), "malformed"),
    "claims terabytes plainly": Hostile(
        _bytes(lambda layer: claims("(1000000000000,)")), "wrong-shape"
    ),
    "claims the right shape": Hostile(
        _bytes(lambda layer: claims(str(layer.shape))), "malformed"
    ),
    "negative shape": Hostile(_bytes(lambda layer: claims("(-1,)")), "wrong-shape"),
    "header of calls": Hostile(
        _bytes(lambda layer: claims("__import__('this')")), "malformed"
    ),
    "nested header": Hostile(
        _bytes(lambda layer: claims("(" * 300 + "1" + ",)" * 300)), "malformed"
    ),
    "object descr": Hostile(
        _bytes(lambda layer: claims("(1,)", "'|O'")), "wrong-dtype"
    ),
    "other serialisation": Hostile(
        lambda layers: raw(npy(layers[0]), layers, "pickle"), "malformed"
    ),
    "lies about shape and dtype": Hostile(_lies, None),
    "missing layer": Hostile(lambda layers: record(list(layers[1:])), "wrong-keys"),
    "extra layer": Hostile(lambda layers: record([*layers, layers[0]]), "wrong-keys"),
    "other keys": Hostile(_renamed, "wrong-keys"),
    "empty record": Hostile(lambda layers: with_arrays(ArrayRecord()), "wrong-keys"),
    "no records": Hostile(lambda layers: RecordDict(), "no-arrays"),
    "metrics only": Hostile(
        lambda layers: RecordDict({"metrics": MetricRecord({"num-examples": 1})}),
        "no-arrays",
    ),
    "second array record": Hostile(
        _added("more", ArrayRecord([np.zeros(1)])), "extra-record"
    ),
    "second metric record": Hostile(
        _added("more", MetricRecord({"loss": 0.5})), "extra-record"
    ),
    "extra metric": Hostile(
        _added(
            "metrics", MetricRecord({"num-examples": 1, "loss": 0.5, MOMENTUM_TAG: 1})
        ),
        None,
    ),
    "num-examples = 1e9": Hostile(_examples(10**9), None),
    "num-examples = 0": Hostile(_examples(0), None),
    "num-examples = -1": Hostile(_examples(-1), None),
}
