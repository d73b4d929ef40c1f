"""Rounds of a real federation: ``python -m simulations.benchmarks.deployment``.

A SuperLink and nodes on this machine, with TLS and node keys: ours (the gate,
`safedshb node`, SafeDSHB) beside Flower's own programs with FedAvg on the same model,
and beside the floor: one bare HTTPS round trip each way and the steps themselves.
``--quick`` is the first row alone, with fewer rounds.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from simulations.benchmarks import outcome
from simulations.benchmarks.floor import floor
from simulations.benchmarks.nodes import KINDS, LOADING, Taken, taken
from simulations.benchmarks.outcome import Check, Outcome, Table, at_least, at_most

# Nodes, and units in the hidden layers: 69, 1.8 and 12.8 million parameters.
SIZES = {0: "69", 1000: "1.8M", 3200: "12.8M"}
CELLS = ((4, 0), (4, 1000), (4, 3200), (1, 0), (12, 0), (20, 0))
ROUNDS, QUICK_ROUNDS = 10, 5

Cell = tuple[int, int]
Row = Mapping[str, Taken | float]


def run(quick: bool) -> Outcome:
    """Measure every cell: ours, then Flower's own, on the same machine."""
    rounds = QUICK_ROUNDS if quick else ROUNDS
    rows = {cell: _row(cell, rounds) for cell in (CELLS[:1] if quick else CELLS)}
    first = rows[CELLS[0]]
    return Outcome(
        name="deployment",
        title="Deployment",
        tables=[_table(rows)],
        checks=_checks(first),
        costs={
            "round, ours / Flower": _round(first, "ours") / _round(first, "Flower"),
            "processor s a message": _message(first, "ours"),
        },
        settings={"rounds": rounds, "not counted": LOADING},
        results=[
            {
                "nodes": nodes,
                "parameters": SIZES[hidden],
                "floor": row["floor"],
                **{kind: asdict(_taken(row, kind)) for kind in KINDS},
            }
            for (nodes, hidden), row in rows.items()
        ],
    )


def _row(cell: Cell, rounds: int) -> Row:
    nodes, hidden = cell
    with tempfile.TemporaryDirectory(prefix="safedshb-") as scratch:
        folder = Path(scratch)
        return {
            "floor": floor(folder / "floor", nodes, hidden),
            **{
                name: taken(kind, folder / name, nodes, hidden, rounds)
                for name, kind in KINDS.items()
            },
        }


def _taken(row: Row, kind: str) -> Taken:
    found = row[kind]
    assert isinstance(found, Taken)
    return found


def _round(row: Row, kind: str) -> float:
    return _taken(row, kind).round


def _message(row: Row, kind: str) -> float:
    return _taken(row, kind).message


def _table(rows: Mapping[Cell, Row]) -> Table:
    return Table(
        "A round, with TLS and node keys",
        (
            *("nodes", "d", "floor", "ours", "Flower", "times"),
            *("CPU", "Flower's", "MB", "Flower's"),
        ),
        [
            (
                f"{nodes}",
                SIZES[hidden],
                f"{row['floor']:.3f}",
                *(f"{_round(row, kind):.2f}" for kind in KINDS),
                f"{_round(row, 'Flower') / _round(row, 'ours'):.1f}",
                *(f"{_message(row, kind):.2f}" for kind in KINDS),
                *(f"{_taken(row, kind).memory:.0f}" for kind in KINDS),
            )
            for (nodes, hidden), row in rows.items()
        ],
        "Seconds of a round, by the clock on the wall, medians after the first "
        f"{LOADING}; floor: a bare HTTPS round trip each way and the steps. CPU: "
        "processor seconds of a node for a message; MB: memory of a node. Flower looks "
        "for tasks every 0.2 s here, 1 s by default.",
    )


def _checks(row: Row) -> list[Check]:
    ratio = _round(row, "Flower") / _round(row, "ours")
    spent = _message(row, "ours")
    return [
        at_least("Flower's round / ours, 4 nodes, d = 69", ratio, 8.0),
        at_most("processor time a message", spent, 0.3, "s"),
    ]


if __name__ == "__main__":
    raise SystemExit(outcome.main(run, __doc__))
