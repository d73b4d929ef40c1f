"""Be a node: check it, say what it accepts, and serve the federation until stopped.

The node's file says everything: its examples, its ledger, its policy, the apps it runs,
and in [supernode] where the federation is. A SuperLink that is away is waited for.

  safedshb node node.toml          until Ctrl-C or SIGTERM
  safedshb node node.toml --check  only check it, and the way to the federation

The file is read again for every message: rules, budget and approvals that its owner
changes are in force from the next one on.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("file", type=Path, help="the node's TOML file")
    parser.add_argument("--check", action="store_true", help="check, and do not serve")
    parser.add_argument(
        "--listen",
        metavar="127.0.0.1:PORT",
        help="serve a page at / and metrics for Prometheus at /metrics",
    )
    parser.add_argument(
        "--insecure",
        metavar="HOST:PORT",
        help="a SuperLink without TLS, for a trial on one machine",
    )


def run(arguments: argparse.Namespace) -> int:
    """Serve; 1 if the node is not fit to."""
    from flwr_safedshb.cli._listing import print_table
    from flwr_safedshb.node.doctor.machine import is_fit
    from flwr_safedshb.node.doctor.node import check_node
    from flwr_safedshb.node.metrics import LoopbackServer, parse_loopback
    from flwr_safedshb.node.node_file import read_node_file
    from flwr_safedshb.node.service import NodeService, set_private_umask

    set_private_umask()
    if arguments.listen is not None:
        parse_loopback(arguments.listen)
    node = read_node_file(arguments.file)
    service = NodeService(node, arguments.insecure)
    results = list(check_node(node, does_connect=arguments.check))
    rows = [(r.name, r.verdict, r.finding) for r in results]
    print_table(f"Node {arguments.file}", ("check", "verdict", "finding"), rows)
    if service.approvals.hashes is None:
        print(
            "OPERATORS ARE TRUSTED WITH CODE: approved-apps is not set, so this node "
            "runs whatever app a run brings,\nand no policy or ledger holds against "
            "code. `safedshb approve` writes the list.",
            flush=True,
        )
    if not is_fit(results):
        print("not fit to serve", flush=True)
        return 1
    if arguments.check:
        return 0
    if arguments.listen is None:
        service.run()
        return 0
    service.run(lambda: LoopbackServer(arguments.listen, service.status.make_pages()))
    return 0
