"""Trace a first round: which function of which file calls which, and draw the rooms.

Three nodes in this process, one of them taken for an adversary, each with a ledger,
take one round. Everything is traced: constructors, the node's policy, the first look at
the model, the step, the aggregation and the report of its cost. A call counts where a
function of one file of ``flwr_safedshb`` calls a function of another, once for each
pair.

  python -m simulations.call_graph            # print the calls
  python -m simulations.call_graph --write    # put calls and picture into docs/rooms.md
"""

from __future__ import annotations

import ast
import inspect
import logging
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import torch
from flwr.app import Context
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
    trained_arrays,
)
from simulations.command import Parser

PACKAGE = Path(flwr_safedshb.__file__).parent
PAGE = PACKAGE.parent / "docs" / "rooms.md"
PICTURE = PACKAGE.parent / "docs" / "images" / "rooms.png"

_NODES = 3
# Modules that every room may import from, too small to draw.
_HELPERS = {"atomic_io", "sanitize", "stop_signal"}
_MARKED = re.compile(r"(<!-- calls -->\n).*?(<!-- /calls -->)", flags=re.DOTALL)


@dataclass(frozen=True, order=True)
class Function:
    """A function of the package: the path of its file, and its name in it."""

    file: str
    name: str

    @classmethod
    def from_frame(cls, frame: FrameType) -> Function | None:
        """Return the function of a frame, None if it is not one of the package."""
        path, code = Path(frame.f_code.co_filename), frame.f_code
        # Bodies of modules and classes are no functions.
        if not path.is_relative_to(PACKAGE) or not code.co_flags & inspect.CO_OPTIMIZED:
            return None
        return cls(str(path.relative_to(PACKAGE)), code.co_qualname)


@dataclass
class CallGraph:
    """The calls between files, in the order in which they first happened."""

    calls: dict[tuple[Function, Function], None] = field(default_factory=dict)

    @property
    def called(self) -> set[Function]:
        """The functions that other files call."""
        return {called for _, called in self.calls}

    @property
    def files(self) -> set[str]:
        """The files that call or are called."""
        return {function.file for call in self.calls for function in call}

    def trace(self, frame: FrameType, event: str, _: object) -> None:
        """Record a call; a profile function for `sys.setprofile`."""
        if event != "call" or frame.f_back is None:
            return
        caller, called = (Function.from_frame(f) for f in (frame.f_back, frame))
        if caller is not None and called is not None and caller.file != called.file:
            self.calls.setdefault((caller, called))

    def lines(self) -> Iterator[str]:
        """Yield a line for each call."""
        for caller, called in self.calls:
            yield f"{caller.file} {caller.name} -> {called.file} {called.name}"

    def summary(self) -> str:
        """Return the counts in one line."""
        return (
            f"{len(self.called)} functions called from another file, "
            f"{len(self.calls)} calls, {len(self.files)} files"
        )


def trace_first_round() -> CallGraph:
    """Trace a run of one round, in process, with ledgers in a temporary folder.

    Caches hide calls that have been made before, so only the first trace of a process
    is complete.
    """
    model, plan = nn.Linear(3, 1), PrivacyPlan(1.0, 1.0, 4, 20)

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs.squeeze(1) - targets).square()

    def client_fn(context: Context) -> SafeDSHBClient:
        node = int(context.node_config["partition-id"])
        inputs = torch.randn(20, 3, generator=torch.Generator().manual_seed(node))
        data, source = (inputs, inputs.sum(dim=1)), SeededRandomness(0)
        return SafeDSHBClient(model, loss, data, plan, context, randomness=source)

    graph = CallGraph()
    logger = logging.getLogger("flwr")
    level = logger.level
    logger.setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        try:
            sys.setprofile(graph.trace)
            grid = InProcessGrid(
                client_app(client_fn),
                _NODES,
                node_config=lambda i: {
                    "state-dir": f"{folder}/{i}",
                    "max-epsilon": 50.0,
                    "delta": 1e-5,
                    # The same calls every time, and so the same noise.
                    "require-secure-noise": False,
                },
            )
            SafeDSHB(SMEA(), 1, seed=0).start(grid, trained_arrays(model), 1)
        finally:
            sys.setprofile(None)
            logger.setLevel(level)
    return graph


def find_room_edges() -> dict[str, set[str]]:
    """Return the rooms, and from which others the files of each import."""
    edges: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if room == "__init__" or "template" in path.parts:  # an app for users to edit
            continue
        found = edges.setdefault(room, set())
        for node in ast.walk(ast.parse(path.read_text())):
            module = node.module if isinstance(node, ast.ImportFrom) else None
            parts = (module or "").split(".")
            if parts[0] == PACKAGE.name and len(parts) > 1 and parts[1] != room:
                found.add(parts[1])
    return edges


def reduce_edges(edges: dict[str, set[str]]) -> dict[str, set[str]]:
    """Drop the edges that follow from others (transitive reduction)."""

    def find_below(room: str) -> set[str]:
        return edges[room].union(*map(find_below, edges[room]))

    return {
        room: others - set().union(*map(find_below, others))
        for room, others in edges.items()
    }


def draw_rooms(path: Path) -> None:
    """Draw the rooms in rows; a room may import from those that its arrows lead to.

    Single helper modules, and arrows that follow from others, are left out.
    """
    from matplotlib.figure import Figure

    found = find_room_edges()
    edges = reduce_edges(
        {
            room: others - _HELPERS
            for room, others in found.items()
            if room not in _HELPERS
        }
    )
    rows: dict[str, int] = {}

    def find_row(room: str) -> int:
        if room not in rows:
            rows[room] = 1 + max((find_row(other) for other in edges[room]), default=-1)
        return rows[room]

    by_row: dict[int, list[str]] = {}
    for room in sorted(edges):
        by_row.setdefault(find_row(room), []).append(room)
    places = {
        room: ((i + 1) * 10 / (len(rooms) + 1), 1.3 * row)
        for row, rooms in by_row.items()
        for i, room in enumerate(rooms)
    }
    height = 1.3 * max(by_row)
    figure = Figure(figsize=(8, height + 1), layout="constrained")
    axes = figure.add_subplot()
    boxes = {}
    for room, place in places.items():
        box = {"boxstyle": "round,pad=0.5", "facecolor": "#e6f2f1", "edgecolor": "#076"}
        text = axes.text(*place, room, ha="center", va="center", bbox=box, zorder=3)
        boxes[room] = text.get_bbox_patch()
    for room, others in edges.items():
        for other in others:
            arrow = {"arrowstyle": "-|>", "color": "#7a9", "shrinkA": 0, "shrinkB": 1}
            arrow |= {"patchA": boxes[room], "patchB": boxes[other]}
            axes.annotate("", places[other], places[room], arrowprops=arrow, zorder=1)
    axes.set_xlim(0, 10)
    axes.set_ylim(-0.7, height + 0.7)
    axes.axis("off")
    figure.savefig(path, dpi=120)


def insert_calls(text: str, graph: CallGraph) -> str:
    """Return a page's text with these calls in it."""
    lines = "\n".join(graph.lines())
    block = f"{graph.summary()}:\n\n```text\n{lines}\n```\n"
    return _MARKED.sub(lambda found: f"{found[1]}{block}{found[2]}", text)


def main(arguments: list[str] | None = None) -> None:
    """Print the calls, or write them into the documentation."""
    parser = Parser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="into docs/rooms.md")
    options = parser.parse_args(arguments)
    graph = trace_first_round()
    print(*graph.lines(), graph.summary(), sep="\n")
    if options.write:
        draw_rooms(PICTURE)
        PAGE.write_text(insert_calls(PAGE.read_text(), graph))


if __name__ == "__main__":
    main()
