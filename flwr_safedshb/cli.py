"""The `safedshb` command: what to know before, during and after a federation.

Exit codes: 0 yes or done; 1 no (a check failed, a request was refused); 2 the command
was not understood or a value is out of bounds; 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Sequence
from types import ModuleType

from flwr_safedshb import commands

YES, NO, USAGE, INTERRUPTED = 0, 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        return int(options.run(options))
    except (ValueError, FileNotFoundError) as error:
        print(f"safedshb {options.command}: {error}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        print(f"safedshb {options.command}: stopped", file=sys.stderr)
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    head, rest = _described(sys.modules[__name__])
    parser = argparse.ArgumentParser(
        "safedshb",
        description=head,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    choices = parser.add_subparsers(dest="command", metavar="command", required=True)
    for found in pkgutil.iter_modules(commands.__path__):
        command = importlib.import_module(f"{commands.__name__}.{found.name}")
        head, rest = _described(command)
        mine = choices.add_parser(
            found.name,
            help=head,
            description=head,
            epilog=rest,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add(mine)
        mine.set_defaults(run=command.run)
    return parser


def _described(module: ModuleType) -> tuple[str, str]:
    """Return the first line of a docstring, and the rest."""
    head, _, rest = inspect.cleandoc(module.__doc__ or "").partition("\n")
    return head, rest.strip()
