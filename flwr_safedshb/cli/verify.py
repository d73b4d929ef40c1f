"""Check a run from its checkpoint and its receipts, with neither data nor trust.

The run was made by SafeDSHB(receipts=..., checkpoint=RUN). Computed again are the
signatures, the chain of each node's charges, epsilon, the rule's answer and kappa of
every round, and every step of the model if the momentums were kept. Without --keys the
records themselves say who signed.

  safedshb verify model.npz
  safedshb verify model.npz --keys hospitals/*.pub --json

Exit code 1: something is not as it was signed or computed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from flwr_safedshb.sanitize import escape

if TYPE_CHECKING:
    from flwr_safedshb.algorithm.verification import Verification


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "checkpoint", type=Path, metavar="RUN", help="the checkpoint of the run"
    )
    parser.add_argument(
        "--keys",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="public keys of all nodes, of OpenSSH or PEM",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print what was found; 1 if anything is not in order."""
    from flwr_safedshb.algorithm.verification import verify_run

    keys = [_read_key(path) for path in arguments.keys]
    found = verify_run(arguments.checkpoint, keys)
    if arguments.json:
        print(json.dumps(_to_dict(found, bool(keys)), indent=2))
    else:
        _print_findings(found, bool(keys))
    return 1 if found.problems else 0


def _read_key(path: Path) -> bytes:
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import (
        load_pem_public_key,
        load_ssh_public_key,
    )

    from flwr_safedshb.algorithm.receipts import encode_key

    content = path.read_bytes()
    try:
        load = load_pem_public_key if b"BEGIN" in content else load_ssh_public_key
        key = load(content)
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise ValueError("it is on no elliptic curve of NIST")
        return encode_key(key)
    except ValueError as error:
        raise ValueError(f"{path} is no public key of a node: {error}") from None


def _to_dict(found: Verification, pinned: bool) -> dict[str, object]:
    return {
        "session": found.session,
        "rule": found.rule,
        "rounds": found.rounds,
        "planned_rounds": found.num_rounds,
        "model_recomputed": found.whole,
        "keys_given": pinned,
        "nodes": [
            {
                "node": node,
                "key": known.key.hex(),
                "steps": sum(steps for _, steps in known.charge.charged),
                "epsilon": known.charge.epsilon,
                "delta": known.charge.delta,
                "unit": known.charge.unit,
                "plan": known.charge.plan.to_dict(),
                "ledger_head": known.charge.head,
            }
            for node, known in sorted(found.nodes.items())
        ],
        "problems": found.problems,
    }


def _print_findings(found: Verification, pinned: bool) -> None:
    from flwr_safedshb.cli._listing import print_table

    rows = [
        (
            str(node),
            known.key.hex()[-16:],
            str(sum(steps for _, steps in known.charge.charged)),
            f"{known.charge.epsilon:.4g}",
            f"{known.charge.delta:g}",
            f"{known.charge.number}, {known.charge.head[:16]}",
        )
        for node, known in sorted(found.nodes.items())
    ]
    heads = ("node", "key ends in", "steps", "epsilon", "delta", "ledger: entry, hash")
    print_table(f"Run {found.session}", heads, rows, number="steps")
    print(f"rounds:  {found.rounds} of {found.num_rounds} that were planned")
    print(f"rule:    {found.rule}")
    model = "every step of it was computed again"
    if not found.whole:
        model = "not checked, nor the Gram matrices: the run kept no momentums"
    print(f"model:   {model}")
    owners = "all are those given" if pinned else "as the records say; give --keys"
    print(f"keys:    {owners}")
    for problem in found.problems:
        print(f"WRONG:   {escape(problem)}")
    verdict = (
        f"{len(found.problems)} problems" if found.problems else "nothing is wrong"
    )
    print(f"verdict: {verdict}")
