"""Show what hostile clients do to averaging, and what to robust rules.

The demonstration is part of the repository, with the data, models and plots it needs,
and not of the installed package. Where the repository is not there, this says how to
get it, and the exit code is 1.

For example:
  safedshb demo                       from a checkout, after `make setup`
  python -m simulations.studies.demo --help   the demonstration's own options
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module, util

MISSING = """\
safedshb demo: the demonstration is part of the repository, which is not installed here.
  Get the repository and run `make demo` in it (Python 3.11 and make are all it needs).
  What the package alone can show: `safedshb rules` and `safedshb attacks`."""


def add(parser: argparse.ArgumentParser) -> None:
    """Add no arguments: the demonstration has its own."""


def run(arguments: argparse.Namespace) -> int:
    """Run the demonstration if it is there."""
    if util.find_spec("simulations") is None:
        print(MISSING, file=sys.stderr)
        return 1
    return int(import_module("simulations.studies.demo").main([]))
