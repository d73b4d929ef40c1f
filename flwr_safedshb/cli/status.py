r"""Show a run: its nodes by name, who is silent or excluded, its round, the time left.

Run it on the server. The run is named by its checkpoint, beside which it keeps its
status. Names and connections are the SuperLink's, by its name in Flower's config. What
a node has spent of its budget for life, and what is left, only the node knows: it says
so in its log and under `safedshb node FILE --listen`.

  safedshb status model.npz --superlink federation
  safedshb status model.npz --superlink federation --listen 127.0.0.1:9101

With --listen it serves a page at / and metrics for Prometheus at /metrics.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("checkpoint", type=Path, help="of the run")
    parser.add_argument(
        "--superlink", metavar="NAME", help="in Flower's config, for names of nodes"
    )
    parser.add_argument(
        "--listen", metavar="127.0.0.1:PORT", help="serve a page and metrics until ^C"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the status; 1 if the run has trained nothing."""
    import threading
    from dataclasses import asdict

    from flwr_safedshb.algorithm.run_status import find_status_file
    from flwr_safedshb.cli._listing import print_table
    from flwr_safedshb.node.metrics import (
        METRICS_PATH,
        LoopbackServer,
        make_metrics_page,
    )
    from flwr_safedshb.node.status_page import NODE_HEADS, RunView, guard_page

    view = RunView(find_status_file(arguments.checkpoint), arguments.superlink)
    if arguments.listen is not None:
        pages = {"/": guard_page(view.page)}
        pages[METRICS_PATH] = guard_page(make_metrics_page(view.collect))
        with LoopbackServer(arguments.listen, pages) as server:
            print(f"http://127.0.0.1:{server.port}/", flush=True)
            threading.Event().wait()
    status, names = view.read()
    if arguments.json:
        about = {str(n): asdict(node) for n, node in names.items()}
        print(json.dumps({**asdict(status), "registered": about}, indent=2))
    else:
        lines, rows = view.describe()
        print_table("\n".join(lines), NODE_HEADS, rows)
    return int(status.state == "nothing trained")
