"""Measure epsilon from below: ``python -m simulations.audit``.

This is ``safedshb audit --suite epsilon``, with its options. With ``--hostile`` it is
``safedshb audit``: all suites, or those that ``--suite`` names.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from flwr_safedshb.cli import main as safedshb


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the audit; 1 if a promise is broken, else 0."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if "--hostile" in given:
        given.remove("--hostile")
        return safedshb(["audit", *given])
    return safedshb(["audit", "--suite", "epsilon", *given])


if __name__ == "__main__":
    sys.exit(main())
