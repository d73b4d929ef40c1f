r"""Check a node before it joins: data, model, ledger, policy, versions, entropy, clock.

Run it on the node, as the user that runs the SuperNode. It makes the client of a Flower
app and checks whether the node could train with it. The app is the folder that --app
names, or --client names a client_fn. Federation and key come from the node's file,
unless you name them. Nothing is charged, sent, created or changed.

  safedshb doctor node.toml --run-config 'hydra-overrides="privacy=high"' --steps 400
  safedshb doctor node.toml --client my_app.client:client_fn
  safedshb doctor node.toml --superlink server.example.org:9092 \
      --root-certificates ca.crt --key node.key --json
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flwr_safedshb.node.doctor.machine import CheckResult


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("node_config", type=Path, help="the node's TOML file")
    parser.add_argument(
        "--app", type=Path, default=Path(), help="folder of the Flower app (default: .)"
    )
    parser.add_argument(
        "--client",
        metavar="MODULE:OBJECT",
        help="client_fn, or what client_app made of it, in place of the app's",
    )
    parser.add_argument(
        "--run-config", default="", help="of the run, as `flwr run` takes it"
    )
    parser.add_argument("--steps", type=int, metavar="T", help="that the run will take")
    parser.add_argument(
        "--superlink", metavar="HOST:PORT", help="where the node will connect"
    )
    parser.add_argument(
        "--root-certificates", type=Path, help="that the SuperLink's must be signed by"
    )
    parser.add_argument("--key", type=Path, help="the node's private key")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print what was found; 0 if the node is fit to join."""
    from flwr_safedshb.flower.compat import parse_config
    from flwr_safedshb.node.approvals import KEY
    from flwr_safedshb.node.doctor.app import load_client_fn, read_app
    from flwr_safedshb.node.doctor.machine import check_key, check_link, is_fit
    from flwr_safedshb.node.doctor.node import (
        check_approval,
        check_connection,
        check_node_for_run,
    )
    from flwr_safedshb.node.flower_patches.fab import build_bundle
    from flwr_safedshb.node.node_file import read_node_file

    if arguments.steps is not None and arguments.steps < 1:
        raise ValueError(f"--steps={arguments.steps} must be at least 1")
    if (arguments.superlink is None) != (arguments.root_certificates is None):
        raise ValueError("--superlink and --root-certificates belong together")
    node = read_node_file(arguments.node_config)
    run_config = parse_config([arguments.run_config])
    name = arguments.client
    if name is None:
        name, defaults = read_app(arguments.app)
        run_config = {**defaults, **run_config}
    client_fn = load_client_fn(name, arguments.app.absolute())
    results: list[CheckResult] = []
    if arguments.superlink is None and arguments.key is None:
        results += check_connection(node)
    if arguments.client is None and KEY in node.config:
        app_hash = hashlib.sha256(build_bundle(arguments.app)).hexdigest()
        results.append(check_approval(node.config, app_hash))
    if arguments.superlink is not None:
        results += check_link(arguments.superlink, arguments.root_certificates)
    if arguments.key is not None:
        results.append(check_key(arguments.key))
    results += check_node_for_run(node.config, client_fn, run_config, arguments.steps)
    fit = is_fit(results)
    if arguments.json:
        print(json.dumps({"fit": fit, "checks": [vars(r) for r in results]}, indent=2))
    else:
        _print_results(results, fit)
    return 0 if fit else 1


def _print_results(results: list[CheckResult], fit: bool) -> None:
    from flwr_safedshb.cli._listing import print_table

    rows = [(r.name, r.verdict, r.finding) for r in results]
    print_table("The node", ("check", "verdict", "finding"), rows)
    failed = [r.name for r in results if r.verdict == "failed"]
    print("fit to join" if fit else f"NOT fit to join: {', '.join(failed)}")
