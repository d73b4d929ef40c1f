"""What the shortcuts around Flower's constructors save, one after the other.

Each function of `flwr_safedshb.flower.compat` that goes past a constructor is replaced
by what Flower documents, and a round is timed with and without. One that saves nothing
has no reason to be there.

  python -m simulations.benchmarks.shortcuts
"""

from __future__ import annotations

import copy
import logging
import sys
import time
from collections.abc import Callable, Mapping

import torch
from flwr.app import Array, ArrayRecord, Context, Message
from torch import nn

from flwr_safedshb import (
    Average,
    BatchedGrid,
    InProcessGrid,
    PrivacyPlan,
    SafeDSHB,
    SafeDSHBClient,
    SeededRandomness,
    client_app,
)
from flwr_safedshb.flower import compat
from simulations.command import Parser

Functions = Mapping[str, Callable[..., object]]

# Of each shortcut, what it stands for.
DOCUMENTED: Mapping[str, Functions] = {
    "replace_entries_unchecked": {
        "replace_entries_unchecked": lambda record, entries: type(record)(dict(entries))
    },
    "make_array_unchecked": {
        "make_array_unchecked": lambda dtype, shape, data: Array(
            dtype, shape, "numpy.ndarray", data
        )
    },
    "copy_content, copy_for_delivery": {
        "copy_content": copy.deepcopy,
        "copy_for_delivery": lambda message, message_id, context: (
            _named(message, message_id),
            copy.deepcopy(context),
        ),
    },
}


def _named(message: Message, message_id: str) -> Message:
    compat.set_message_id(message, message_id)
    return copy.deepcopy(message)


def use(functions: Functions) -> None:
    """Put functions in the place of those of the same name, wherever they are used."""
    for name, module in list(sys.modules.items()):
        if name.startswith("flwr_safedshb."):
            for function in functions.keys() & vars(module).keys():
                setattr(module, function, functions[function])


def seconds_of_a_round(kind: type[InProcessGrid], nodes: int, rounds: int) -> float:
    """Return the processor time of a round with a small linear model."""
    model, plan = nn.Linear(5, 2), PrivacyPlan(1.0, 0.5, 8, 60)
    loss = nn.CrossEntropyLoss()
    source = torch.Generator().manual_seed(0)
    data = torch.randn(60, 5, generator=source), torch.randint(2, (60,))

    def client_fn(context: Context) -> SafeDSHBClient:
        noise = SeededRandomness(0)
        return SafeDSHBClient(model, loss, data, plan, context, randomness=noise)

    grid = kind(client_app(client_fn), nodes)
    initial = ArrayRecord(model.state_dict())
    SafeDSHB(Average(), seed=0).start(grid, initial, 2)
    start = time.process_time()
    SafeDSHB(Average(), seed=0).start(grid, initial, rounds)
    return (time.process_time() - start) / rounds


def main(repeats: int = 5) -> None:
    """Print how much longer a round takes without each shortcut."""
    torch.set_num_threads(1)
    logging.getLogger("flwr").setLevel(logging.ERROR)
    names = {name for functions in DOCUMENTED.values() for name in functions}
    shortcuts = {name: getattr(compat, name) for name in names}
    for kind, nodes, rounds in ((InProcessGrid, 7, 50), (BatchedGrid, 1000, 4)):
        best: dict[str, float] = {}
        for _ in range(repeats):
            for name, functions in {"all": {}, **DOCUMENTED}.items():
                use({**shortcuts, **functions})
                took = seconds_of_a_round(kind, nodes, rounds)
                best[name] = min(took, best.get(name, took))
        use(shortcuts)
        print(f"{kind.__name__} of {nodes} nodes: {1e3 * best['all']:.2f} ms a round")
        for name in DOCUMENTED:
            more = best[name] / best["all"] - 1
            print(f"  without {name}: {100 * more:+.0f} %")


if __name__ == "__main__":
    Parser(description=__doc__.splitlines()[0]).parse_args()
    main()
