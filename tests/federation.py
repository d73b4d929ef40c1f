"""Small federations for tests: clients whose replies are known."""

from collections.abc import Callable, Iterable
from typing import cast

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from numpy.typing import NDArray

from flwr_safedshb.flower.grid import WrappedGrid
from flwr_safedshb.simulation.in_process import InProcessGrid
from tests.replies import Layers, record

NAMES = ("weight", "bias")
SHAPES = ((2, 5), (3,))

Vectors = Callable[[int, int], Layers]
Spoil = Callable[[int, int, Layers], RecordDict]


def model() -> ArrayRecord:
    arrays = (np.zeros(shape, np.float32) for shape in SHAPES)
    return ArrayRecord(dict(zip(NAMES, map(Array, arrays), strict=True)))


def layers(partition: int, step: int) -> Layers:
    """Return what an honest client of these tests sends."""
    rng = np.random.default_rng([partition, step])
    return [rng.normal(size=shape).astype(np.float32) for shape in SHAPES]


def vectors(partitions: Iterable[int], step: int) -> NDArray[np.float64]:
    return np.array(
        [np.concatenate([x.ravel() for x in layers(p, step)]) for p in partitions],
        np.float64,
    )


def flat(arrays: ArrayRecord) -> NDArray[np.float64]:
    return np.concatenate([a.ravel() for a in arrays.to_numpy_ndarrays()]).astype(
        np.float64
    )


def federation(
    num_nodes: int, spoil: Spoil = lambda partition, step, layers: record(list(layers))
) -> InProcessGrid:
    """Return nodes that send known layers, or what `spoil` makes of them."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        config = next(iter(message.content.config_records.values()))
        partition = int(context.node_config["partition-id"])
        step = cast(int, config["step"])
        content = spoil(partition, step, layers(partition, step))
        return Message(content, reply_to=message)

    return InProcessGrid(app, num_nodes)


class Tampered(WrappedGrid):
    """A network that changes the list of replies on the way."""

    def __init__(
        self, grid: Grid, tamper: Callable[[list[Message]], list[Message]]
    ) -> None:
        super().__init__(grid)
        self.tamper = tamper

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return self.tamper(list(self.grid.pull_messages(message_ids)))
