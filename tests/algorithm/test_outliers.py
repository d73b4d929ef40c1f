"""Replies far from the others are counted, and f without room is warned of."""

import logging

import numpy as np
import pytest
from flwr.app import RecordDict

from flwr_safedshb.aggregation import SMEA
from flwr_safedshb.algorithm.outliers import count_outliers
from flwr_safedshb.attacks import ALIE, FarCluster, SignFlip
from flwr_safedshb.attacks.base import Attack
from flwr_safedshb.strategy import SafeDSHB
from tests.federation import Spoil, federation, model
from tests.replies import Layers, record


def split(vectors: np.ndarray) -> list[list[np.ndarray]]:
    return [[row[:3], row[3:]] for row in vectors]


@pytest.mark.parametrize(("n", "d"), [(5, 69), (7, 69), (20, 1000)])
def test_honest_replies_with_equal_noise_are_no_outliers(n: int, d: int) -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        vectors = rng.normal(size=(n, d))
        assert count_outliers(split(vectors), split(vectors[:1] * 0)[0]) == 0


@pytest.mark.parametrize(
    ("attack", "seen"), [(FarCluster(), True), (SignFlip(), False), (ALIE(), False)]
)
def test_adversaries_who_do_not_hide_are_counted(attack: Attack, seen: bool) -> None:
    """A small step away from the honest mean is within their spread."""
    rng = np.random.default_rng(1)
    honest = rng.normal(size=(8, 69)) + 0.1
    sent = attack.craft_vectors(honest, 3, rng, SMEA())
    vectors = np.concatenate([honest, np.broadcast_to(sent, (3, 69))])
    found = count_outliers(split(vectors), split(honest.mean(axis=0)[None])[0])
    assert found == (3 if seen else 0)


def pushing(count: int) -> Spoil:
    """Return nodes of which the first ones send long vectors."""

    def spoil(partition: int, step: int, layers: Layers) -> RecordDict:
        far = partition < count and step > 0
        return record([layer + np.float32(9.0 * far) for layer in layers])

    return spoil


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, None), (1, None), (2, "one more would break"), (3, "more than is assumed")],
)
def test_a_warning_comes_once_if_f_has_no_room(
    count: int, words: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        result = SafeDSHB(num_malicious_nodes=2).start(
            federation(9, pushing(count)), model(), 4
        )
    rounds = result.train_metrics_clientapp
    assert [found["outliers"] for found in rounds.values()] == [0, *[count] * 3]
    said = [r.getMessage() for r in caplog.records if "lie far" in r.getMessage()]
    assert len(said) == (0 if words is None else 1)
    assert words is None or words in said[0]
