"""The status of a run or of a node, for people and for Prometheus."""

from __future__ import annotations

import html
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flwr_safedshb.algorithm.run_status import NodeStatus, RunStatus, read_status
from flwr_safedshb.node.flower_patches.registered_nodes import (
    RegisteredNode,
    list_registered_nodes,
)
from flwr_safedshb.node.metrics import Page, Sample
from flwr_safedshb.sanitize import escape

# Seconds for which names and connections are not asked for again.
_NAMES_SECONDS = 15.0
_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8">
<meta http-equiv="refresh" content="5"><title>{title}</title>
<style>body {{ font-family: sans-serif; margin: 2em }} td, th {{ text-align: left;
padding: 0.2em 1em 0.2em 0; border-bottom: 1px solid #ddd }}</style>
<h1>{title}</h1><p>{lines}</p><table><tr>{heads}</tr>{rows}</table></html>
"""

NODE_HEADS = ("node", "SuperLink", "round", "outcome", "epsilon (stated)")


@dataclass
class RunView:
    """A run's status with the names of its nodes, read again whenever it is shown.

    Parameters
    ----------
    path : Path
        The status file.
    superlink : str, optional
        In Flower's configuration; None to show ids in place of names.
    """

    path: Path
    superlink: str | None
    _names: dict[int, RegisteredNode] = field(default_factory=dict)
    _asked_at: float = -_NAMES_SECONDS
    _problem: str = ""

    def read(self) -> tuple[RunStatus, dict[int, RegisteredNode]]:
        """Return the run's status, and its nodes' names and connections."""
        now = time.monotonic()
        if self.superlink is not None and now - self._asked_at >= _NAMES_SECONDS:
            self._asked_at, self._problem = now, ""
            try:
                self._names = list_registered_nodes(self.superlink)
            except ValueError as error:  # the names of before are as good
                self._problem = str(error)
        return read_status(self.path), self._names

    def describe(self) -> tuple[list[str], list[tuple[str, ...]]]:
        """Return lines about the run, and a row for each node."""
        status, names = self.read()
        now = time.time()
        lines = [
            f"{status.state}: round {status.round} of {status.num_rounds}, since "
            f"{_format_seconds(now - status.since)}",
            _format_left(status.seconds_left(now)),
            f"rounds skipped: {_format_rounds(status.skipped_rounds)}",
        ]
        if self._problem:
            lines.append(self._problem)
        known = sorted({*names, *status.nodes}, key=lambda n: _name_node(n, names))
        return lines, [_make_row(node, names, status.nodes.get(node)) for node in known]

    def page(self) -> tuple[str, bytes]:
        """Return the page in HTML."""
        lines, rows = self.describe()
        return "text/html; charset=utf-8", render_page("Run", lines, NODE_HEADS, rows)

    def collect(self) -> Iterator[Sample]:
        """Yield the metrics."""
        status, names = self.read()
        yield Sample("safedshb_run_round", "Round under way.", status.round)
        yield Sample("safedshb_run_rounds", "Rounds of the run.", status.num_rounds)
        yield Sample(
            "safedshb_run_skipped_rounds",
            "Rounds that took no step.",
            len(status.skipped_rounds),
        )
        yield Sample(
            "safedshb_run_running", "1 while it runs.", float(status.state == "running")
        )
        yield Sample(
            "safedshb_run_round_age_seconds",
            "Seconds since the round began.",
            time.time() - status.since,
        )
        if status.round_seconds:
            yield Sample(
                "safedshb_run_last_round_seconds",
                "Length of the last round.",
                status.round_seconds[-1],
            )
        left = status.seconds_left(time.time())
        if left is not None:
            yield Sample("safedshb_run_seconds_left", "Expected time left.", left)
        for node, about in sorted(status.nodes.items()):
            labels = {"node": _name_node(node, names)}
            for outcome in ("used", "left out", "silent", "excluded"):
                yield Sample(
                    "safedshb_run_node_outcome",
                    "1 for what came of the last round that the node was asked in.",
                    float(about.outcome.startswith(outcome)),
                    {**labels, "outcome": outcome},
                )
        for node, about in sorted(status.nodes.items()):
            if about.epsilon is not None:
                yield Sample(
                    "safedshb_run_node_epsilon",
                    "Epsilon of the run, as the node states it.",
                    about.epsilon,
                    {"node": _name_node(node, names)},
                )
        for node, known in sorted(names.items()):
            yield Sample(
                "safedshb_run_node_online",
                "1 if the SuperLink takes the node for connected.",
                float(known.status == "online"),
                {"node": _name_node(node, names)},
            )


def render_page(
    title: str,
    lines: Sequence[str],
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
) -> bytes:
    """Return an HTML page with lines of text and a table; everything is escaped."""

    def cells(tag: str, texts: Sequence[str]) -> str:
        return "".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in texts)

    return _PAGE.format(
        title=html.escape(title),
        lines="<br>".join(html.escape(line) for line in lines),
        heads=cells("th", heads),
        rows="".join(f"<tr>{cells('td', row)}</tr>" for row in rows),
    ).encode()


def make_text_page(title: str, lines: Sequence[str]) -> tuple[str, bytes]:
    """Return a page with lines of text only."""
    return "text/html; charset=utf-8", render_page(title, lines, (), ())


def guard_page(page: Page) -> Page:
    """Return a page that says what is wrong where another raises."""

    def guarded() -> tuple[str, bytes]:
        try:
            return page()
        except (ValueError, OSError) as error:
            return make_text_page("Nothing to show", [str(error)])

    return guarded


def _make_row(
    node: int, names: Mapping[int, RegisteredNode], about: NodeStatus | None
) -> tuple[str, ...]:
    name = _name_node(node, names)
    online = names[node].status if node in names else "unknown"
    if about is None:
        return name, online, "-", "never asked", "-"
    stated = "-" if about.epsilon is None else f"{about.epsilon:.4g} at {about.delta:g}"
    return name, online, str(about.round), about.outcome, stated


def _name_node(node: int, names: Mapping[int, RegisteredNode]) -> str:
    """Return the name of a node, which whoever registered it has chosen, or its id."""
    known = names.get(node)
    return escape(known.name)[:60] if known is not None and known.name else str(node)


def _format_rounds(rounds: Sequence[int]) -> str:
    listed = ", ".join(map(str, rounds[-10:]))
    return f"{len(rounds)} ({listed})" if rounds else "none"


def _format_left(seconds: float | None) -> str:
    if seconds is None:
        return "time left: not known before the first round has ended"
    return f"time left: about {_format_seconds(seconds)}"


def _format_seconds(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
