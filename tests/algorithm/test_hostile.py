"""Nothing that f clients send ends a run or moves the model beyond the proven bound."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from numpy.typing import NDArray

from flwr_safedshb.aggregation import SMEA
from flwr_safedshb.algorithm.progress import NothingTrainedError
from flwr_safedshb.simulation.in_process import InProcessGrid
from flwr_safedshb.strategy import SafeDSHB
from flwr_safedshb.theory import kappa_smea
from tests.federation import SHAPES, federation, flat, layers, model, vectors
from tests.replies import KINDS, Layers, npy, raw, record

N, F = 7, 3
HONEST = range(N - F)
RATE = 0.5


def check_bound(
    step: int, before: ArrayRecord, after: ArrayRecord, metrics: MetricRecord
) -> None:
    """||R - mean_S||^2 <= kappa lambda_max(cov_S) for every honest S of n' - f'."""
    replies, f = metrics["replies"], metrics["num-malicious-nodes"]
    assert isinstance(replies, int)
    assert isinstance(f, int)
    unasked = N - replies - metrics["excluded"]  # type: ignore[operator]
    # Honest nodes are left out, too, where no step can come of the round.
    assert 0 <= unasked <= (N if metrics["skipped"] else F)
    if metrics["skipped"]:
        assert replies <= 2 * f
        assert before == after
        return
    assert replies > 2 * f
    direction = (flat(before) - flat(after)) / RATE
    kappa = kappa_smea(replies, f)
    honest = vectors(HONEST, step)
    assert replies - f <= len(honest)
    for subset in itertools.combinations(honest, replies - f):
        centred = np.array(subset) - np.mean(subset, axis=0)
        spread = np.linalg.eigvalsh(centred @ centred.T)[-1] / len(subset)
        distance = float(((direction - np.mean(subset, axis=0)) ** 2).sum())
        assert distance <= kappa * spread * (1 + 1e-4) + 1e-8


def attack(
    spoil: Callable[[int, int, Layers], RecordDict], rounds: int
) -> list[MetricRecord]:
    """Train with f hostile clients and check every round."""

    def mixed(partition: int, step: int, layers: Layers) -> RecordDict:
        if partition in HONEST:
            return record(list(layers))
        return spoil(partition, step, layers)

    iterates: list[ArrayRecord] = []
    strategy = SafeDSHB(SMEA(), F, server_learning_rate=lambda step: RATE)
    result = strategy.start(
        federation(N, mixed),
        model(),
        rounds,
        evaluate_fn=lambda _, arrays: iterates.append(arrays),
    )
    found = [result.train_metrics_clientapp[i + 1] for i in range(rounds)]
    for step, metrics in enumerate(found):
        # The model drifts, and with it what float32 can tell of a difference.
        assert np.abs(flat(iterates[step])).max() < 1e4
        check_bound(step, iterates[step], iterates[step + 1], metrics)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_from_f_clients(kind: str) -> None:
    hostile = KINDS[kind]
    for metrics in attack(lambda partition, step, layers: hostile.make(layers), 2):
        assert metrics["skipped"] == 0
        if hostile.reason is None:
            assert metrics["replies"] == N
            assert metrics["num-malicious-nodes"] == F
        else:
            assert metrics[f"excluded-{hostile.reason}"] == F
            assert metrics["replies"] == N - F
            assert metrics["num-malicious-nodes"] == 0


def test_different_kinds_at_once() -> None:
    kinds = list(KINDS.values())

    def spoil(partition: int, step: int, layers: Layers) -> RecordDict:
        return kinds[(3 * step + partition) % len(kinds)].make(layers)

    found = attack(spoil, len(kinds))
    # Every kind that shows was met, by its own name, and ended no round.
    reasons = {kind.reason for kind in kinds} - {None}
    assert {f"excluded-{reason}" for reason in reasons} <= {k for m in found for k in m}
    assert not any(metrics["skipped"] for metrics in found)


def scribbled(rng: np.random.Generator, layers: Layers) -> RecordDict:
    """Make a random reply, from plain noise to one wrong byte."""
    data = bytearray(npy(layers[0]))
    # To fail is rare: who does that often is seldom asked.
    match int(rng.integers(33)) // 4:
        case 0:
            return raw(rng.bytes(int(rng.integers(200))), layers)
        case 1:
            data[int(rng.integers(len(data)))] = int(rng.integers(256))
            return raw(bytes(data), layers)
        case 2:
            for position in rng.integers(0, 100, size=3):
                data[int(position)] = int(rng.integers(256))
            return raw(bytes(data), layers)
        case 3:
            return raw(bytes(data[: int(rng.integers(len(data)))]), layers)
        case 4:
            return raw(bytes(data) + rng.bytes(int(rng.integers(2000))), layers)
        case 5:
            bits = [
                np.frombuffer(rng.bytes(4 * layer.size), np.float32).reshape(
                    layer.shape
                )
                for layer in layers
            ]
            return record(list(bits))
        case 6:
            dtype = rng.choice(["f2", "f4", "f8", "i4", "u1", "?", "c8", "S3", "M8[s]"])
            shape = tuple(rng.integers(0, 6, size=int(rng.integers(4))).tolist())
            return record([np.zeros(shape, dtype), *layers[1:]])
        case 7:
            return random_records(rng, layers)
        case _:
            raise RuntimeError(rng.bytes(20))


def random_records(rng: np.random.Generator, layers: Layers) -> RecordDict:
    content = RecordDict()
    for _ in range(int(rng.integers(4))):
        key = str(rng.choice(["arrays", "metrics", "config", "fitres.parameters", ""]))
        kind = int(rng.integers(3))
        if kind == 0:
            names = rng.choice(["0", "1", "weight", "bias", "x"], size=2).tolist()
            arrays = map(Array, layers)
            content[key] = ArrayRecord(dict(zip(names, arrays, strict=True)))
        elif kind == 1:
            value = float(np.frombuffer(rng.bytes(8), np.float64)[0])
            content[key] = MetricRecord({"num-examples": value})
        else:
            content[key] = ConfigRecord({"code": rng.bytes(8), "text": "x"})
    return content


def test_thousands_of_random_replies(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL", "flwr")  # to format the log takes most of the time
    rng = np.random.default_rng(20230)
    rounds = 2_000
    found = attack(lambda partition, step, layers: scribbled(rng, layers), rounds)
    reasons = {
        key for metrics in found for key in metrics if key.startswith("excluded-")
    }
    assert reasons == {
        "excluded-error",
        "excluded-malformed",
        "excluded-no-arrays",
        "excluded-extra-record",
        "excluded-wrong-keys",
        "excluded-too-large",
        "excluded-wrong-dtype",
        "excluded-wrong-shape",
        "excluded-not-finite",
        "excluded-unmarked",
    }
    assert any(metrics["replies"] == N for metrics in found)
    assert any(metrics["skipped"] for metrics in found)


def test_wrong_objects_in_process_and_errors_with_any_text() -> None:
    """What a client of this process can return beside a proper Message."""

    def wild(message: Message, context: Context) -> Message:
        partition = int(context.node_config["partition-id"])
        content = record(list(layers(partition, 0)))
        if partition == 4:
            return Message(Error(10**6, "x" * 10**5), reply_to=message)
        if partition == 5:
            content.array_records["arrays"]["0"].data = None  # type: ignore[assignment]
        if partition == 6:
            content.array_records["arrays"].__dict__["_data"] = {"0": 1, "1": None}
        return Message(content, reply_to=message)

    app = ClientApp()
    app.train()(wild)
    with pytest.raises(NothingTrainedError) as raised:
        SafeDSHB(SMEA(), F).start(InProcessGrid(app, N), model(), 1)
    metrics = raised.value.metrics[1]
    assert metrics["replies"] == 4
    assert metrics["excluded-error"] >= 1  # type: ignore[operator]


def test_hostile_bound_can_fail() -> None:
    """The check above is one: the mean of all, attackers included, breaks it."""
    far: NDArray[np.float64] = np.concatenate(
        [vectors(HONEST, 0), np.full((F, sum(map(int, map(np.prod, SHAPES)))), 9.0)]
    )
    moved = flat(model()) - RATE * far.mean(axis=0)
    split = int(np.prod(SHAPES[0]))
    after = ArrayRecord(
        {
            "weight": Array(moved[:split].reshape(SHAPES[0]).astype(np.float32)),
            "bias": Array(moved[split:].astype(np.float32)),
        }
    )
    metrics = {"replies": N, "num-malicious-nodes": F, "excluded": 0, "skipped": 0}
    with pytest.raises(AssertionError):
        check_bound(0, model(), after, MetricRecord({**metrics}))
