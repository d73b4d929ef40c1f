"""Walk one round: which function of which file calls which, and draw the rooms.

A federation of three nodes in this process, one of them taken for an adversary, each
with a ledger, takes four rounds. The third is traced, one that follows others and is
followed by others. A call counts where a function of one file of ``flwr_safedshb``
calls a function of another file of it, and each function that is called so counts once,
however often and by whomever it is called.

  python -m simulations.walk            # print the walk
  python -m simulations.walk --write    # put it and the picture into the documentation
"""

from __future__ import annotations

import ast
import logging
import re
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message
from flwr.serverapp import Grid
from torch import nn

import flwr_safedshb
from flwr_safedshb import (
    SMEA,
    InProcessGrid,
    PrivacyPlan,
    SafeDSHB,
    SafeDSHBClient,
    SeededRandomness,
    client_app,
)
from simulations.command import Parser

PACKAGE = Path(flwr_safedshb.__file__).parent
PAGE = PACKAGE.parent / "docs" / "rooms.md"
PICTURE = PACKAGE.parent / "docs" / "images" / "rooms.png"

_NODES, _ROUNDS, _TRACED = 3, 4, 3
# Where rooms stand from left to right, so that few arrows pass behind others.
_ACROSS = {
    "theory": 1.6,
    "aggregation": 1.6,
    "attacks": 1.0,
    "server": 3.2,
    "flower": 6.6,
    "exchange": 5.6,
    "grids": 6.0,
    "cli": 6.0,
    "client": 7.4,
    "privacy": 8.1,
    "deployment": 8.8,
    "files": 9.7,
}
_MARKED = re.compile(r"(<!-- walk -->\n).*?(<!-- /walk -->)", flags=re.DOTALL)


@dataclass(frozen=True, order=True)
class Function:
    """A function of the package: the path of its file, and its name in it."""

    file: str
    name: str


@dataclass
class Walk:
    """The cross-file calls of a round, in the order of their first time."""

    calls: dict[tuple[Function, Function], None]

    @property
    def called(self) -> set[Function]:
        """The functions that other files call."""
        return {called for _, called in self.calls}

    @property
    def files(self) -> set[str]:
        """The files that take part."""
        return {function.file for call in self.calls for function in call}

    def note(self, frame: FrameType, event: str, _: object) -> None:
        """Note a call; a profile function of `sys.setprofile`."""
        if event != "call" or frame.f_back is None:
            return
        by, called = _function(frame.f_back), _function(frame)
        if by is not None and called is not None and by.file != called.file:
            self.calls.setdefault((by, called))

    def lines(self) -> Iterable[str]:
        """Yield the walk, a line for each call."""
        for by, called in self.calls:
            yield f"{by.file} {by.name} -> {called.file} {called.name}"


class _Traced(SafeDSHB):
    """A strategy whose round is traced from its messages to its step."""

    def __init__(self, walk: Walk) -> None:
        super().__init__(SMEA(), 1, momentum=0.9, seed=0)
        self.walk = walk

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        if server_round == _TRACED:
            sys.setprofile(self.walk.note)
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round, replies):  # type: ignore[no-untyped-def]
        result = super().aggregate_train(server_round, replies)
        sys.setprofile(None)
        return result


def walk_a_round() -> Walk:
    """Trace a round in process, with ledgers in a folder that is removed after it."""
    model, plan = nn.Linear(3, 1), PrivacyPlan(1.0, 1.0, 4, 20)

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs.squeeze(1) - targets).square()

    def client_fn(context: Context) -> SafeDSHBClient:
        node = int(context.node_config["partition-id"])
        inputs = torch.randn(20, 3, generator=torch.Generator().manual_seed(node))
        data = inputs, inputs.sum(dim=1)
        source = SeededRandomness(0)
        return SafeDSHBClient(model, loss, data, plan, context, randomness=source)

    walk = Walk({})
    logger = logging.getLogger("flwr")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with tempfile.TemporaryDirectory() as folder:
            grid = InProcessGrid(
                client_app(client_fn),
                _NODES,
                node_config=lambda i: {
                    "state-dir": f"{folder}/{i}",
                    "max-epsilon": 50.0,
                    "delta": 1e-5,
                    # The same walk every time, and so the same noise.
                    "require-secure-noise": False,
                },
            )
            initial = ArrayRecord(model.state_dict())
            _Traced(walk).start(grid, initial, num_rounds=_ROUNDS)
    finally:
        sys.setprofile(None)
        logger.setLevel(level)
    return walk


def room_edges() -> dict[str, set[str]]:
    """Return the rooms, and from which others the files of each import."""
    edges: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if room == "__init__":
            continue
        found = edges.setdefault(room, set())
        for node in ast.walk(ast.parse(path.read_text())):
            module = node.module if isinstance(node, ast.ImportFrom) else None
            parts = (module or "").split(".")
            if parts[0] == PACKAGE.name and len(parts) > 1 and parts[1] != room:
                found.add(parts[1])
    return edges


def draw(path: Path) -> None:
    """Draw the rooms in rows, each above all the rooms that it imports from."""
    from matplotlib.figure import Figure

    edges = room_edges()
    rows: dict[str, int] = {}

    def row(room: str) -> int:
        if room not in rows:
            rows[room] = 1 + max((row(other) for other in edges[room]), default=-1)
        return rows[room]

    places = {room: (_ACROSS.get(room, 5.0), 1.3 * row(room)) for room in edges}
    height = 1.3 * max(rows.values())
    figure = Figure(figsize=(8, height + 1), layout="constrained")
    axes = figure.add_subplot()
    boxes = {}
    for room, place in places.items():
        box = {"boxstyle": "round,pad=0.5", "facecolor": "#e6f2f1", "edgecolor": "#076"}
        label = room if room != "cli" else "cli (imports from all)"
        text = axes.text(*place, label, ha="center", va="center", bbox=box, zorder=3)
        boxes[room] = text.get_bbox_patch()
    for room, others in edges.items():
        # The command imports from every room, which would only hide the rest.
        for other in others if room != "cli" else ():
            arrow = {"arrowstyle": "-|>", "color": "#7a9", "shrinkA": 0, "shrinkB": 1}
            arrow |= {"patchA": boxes[room], "patchB": boxes[other]}
            axes.annotate("", places[other], places[room], arrowprops=arrow, zorder=1)
    axes.set_xlim(0, 10.5)
    axes.set_ylim(-0.7, height + 0.7)
    axes.axis("off")
    figure.savefig(path, dpi=120)


def page_with(text: str, walk: Walk) -> str:
    """Return the page with this walk in it."""
    lines = "\n".join(walk.lines())
    told = (
        f"In this round {len(walk.called)} functions are called from another file, in "
        f"{len(walk.files)} files:\n\n```text\n{lines}\n```\n"
    )
    return _MARKED.sub(lambda found: f"{found[1]}{told}{found[2]}", text)


def _function(frame: FrameType) -> Function | None:
    path = Path(frame.f_code.co_filename)
    if not path.is_relative_to(PACKAGE):
        return None
    return Function(str(path.relative_to(PACKAGE)), frame.f_code.co_qualname)


def main(arguments: list[str] | None = None) -> None:
    """Print the walk, or write it into the documentation."""
    parser = Parser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="into docs/rooms.md")
    options = parser.parse_args(arguments)
    walk = walk_a_round()
    for line in walk.lines():
        print(line)
    print(f"{len(walk.called)} functions called across files, {len(walk.files)} files")
    if options.write:
        draw(PICTURE)
        PAGE.write_text(page_with(PAGE.read_text(), walk))


if __name__ == "__main__":
    main()
