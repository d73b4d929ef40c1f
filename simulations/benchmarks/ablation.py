"""What the shortcuts around Flower's constructors save, one after the other.

Each function of `flwr_safedshb.flower.compat` that goes past a constructor is replaced
by what Flower documents, and a round is timed with and without. One that saves nothing
has no reason to be there.

  python -m simulations.benchmarks.ablation
"""

from __future__ import annotations

import copy
import importlib
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

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

_COMPAT = "flwr_safedshb.flower.compat"


def _copy_for_delivery(
    message: Message, message_id: str, context: Context
) -> tuple[Message, Context]:
    compat.set_message_id(message, message_id)
    return copy.deepcopy(message), copy.deepcopy(context)


# What each shortcut stands for: "module:function", and what Flower documents.
SHORTCUTS: Mapping[str, Mapping[str, Callable[..., object]]] = {
    "replace_entries_unchecked": {
        f"{_COMPAT}:replace_entries_unchecked": lambda record, entries: type(record)(
            dict(entries)
        )
    },
    "make_array_unchecked": {
        f"{_COMPAT}:make_array_unchecked": lambda dtype, shape, data: Array(
            dtype, shape, "numpy.ndarray", data
        )
    },
    "copy_content, copy_for_delivery": {
        f"{_COMPAT}:copy_content": copy.deepcopy,
        f"{_COMPAT}:copy_for_delivery": _copy_for_delivery,
    },
}


@contextmanager
def replace_functions(
    replacements: Mapping[str, Callable[..., object]],
) -> Iterator[None]:
    """Replace functions in every module of the package that has them, for a while.

    Parameters
    ----------
    replacements : mapping of "module:function" to a function

    Raises
    ------
    AttributeError
        If a module has no such function: it was renamed, so rename it here.
    """
    replaced = []
    for path, replacement in replacements.items():
        module, _, name = path.partition(":")
        original = getattr(importlib.import_module(module), name)
        for user in list(sys.modules.values()):
            if getattr(user, "__name__", "").startswith("flwr_safedshb."):
                for alias, value in list(vars(user).items()):
                    if value is original:
                        setattr(user, alias, replacement)
                        replaced.append((user, alias, original))
    try:
        yield
    finally:
        for user, alias, original in replaced:
            setattr(user, alias, original)


def time_round(kind: type[InProcessGrid], nodes: int, rounds: int) -> float:
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
    for kind, nodes, rounds in ((InProcessGrid, 7, 50), (BatchedGrid, 1000, 4)):
        best: dict[str, float] = {}
        for _ in range(repeats):
            for name, replacements in {"": {}, **SHORTCUTS}.items():
                with replace_functions(replacements):
                    seconds = time_round(kind, nodes, rounds)
                best[name] = min(seconds, best.get(name, seconds))
        print(f"{kind.__name__} of {nodes} nodes: {1e3 * best['']:.2f} ms a round")
        for name in SHORTCUTS:
            print(f"  without {name}: {100 * (best[name] / best[''] - 1):+.0f} %")


if __name__ == "__main__":
    Parser(description=__doc__.splitlines()[0]).parse_args()
    main()
