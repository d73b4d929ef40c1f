"""Know what a federation guarantees: before it starts, while it runs, afterwards.

For example:
  safedshb new my-app             write a Flower app that runs
  safedshb rules --n 7 --f 3      what each rule of the server proves
  safedshb attacks --json         what adversaries may send, for a program
  safedshb plan -n 7 -f 3 -m 2763 -d 69 -b 25 -T 400 --delta 1e-4 -s 1
  safedshb doctor node.toml       may this node join?
  safedshb ledger show node.toml  what has it spent?
  safedshb tune --clip 0.1 1      which settings withstand most, on made-up data?
  safedshb audit --only CNN       can one example do more than it may?
  safedshb plan --help            more about one command

Exit codes: 0 yes or done; 1 no (a check failed, a request was refused); 2 the command
was not understood or a value is out of bounds; 130 stopped by Ctrl-C.

Colours are for terminals only: a pipe, a file, or NO_COLOR=1 gets plain text.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import pkgutil
import sys
from collections.abc import Sequence
from importlib import metadata
from types import ModuleType
from typing import NoReturn

from flwr_safedshb.sanitize import escape_lines

YES, NO, USAGE, INTERRUPTED = 0, 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    options = _make_parser().parse_args(arguments)
    try:
        code = int(options.run(options))
        sys.stdout.flush()
    except (ValueError, FileNotFoundError) as error:
        print(escape_lines(f"safedshb {options.command}: {error}"), file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        print(f"safedshb {options.command}: stopped", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader, such as `head`, has what it wanted; Python would complain of the
        # closed pipe once more at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NO
    return code


class _Parser(argparse.ArgumentParser):
    """A parser whose complaints are one line; those of its commands are, too."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and where help is, and leave."""
        self.exit(USAGE, f"{self.prog}: {message} (see {self.prog} --help)\n")


def _make_parser() -> argparse.ArgumentParser:
    head, rest = _split_docstring(sys.modules[__name__])
    parser = _Parser(
        "safedshb",
        description=head,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    version = f"safedshb {metadata.version('flwr-safedshb')}"
    parser.add_argument("--version", action="version", version=version)
    choices = parser.add_subparsers(dest="command", metavar="command", required=True)
    # One file a command: its docstring is the help, `add_arguments` adds its own, `run`
    # does the work and returns the exit code. Heavy imports belong inside `run`, so
    # that --help answers at once; a name with an underscore is no command.
    for found in pkgutil.iter_modules(__path__):
        if found.name.startswith("_"):
            continue
        command = importlib.import_module(f"{__name__}.{found.name}")
        head, rest = _split_docstring(command)
        mine = choices.add_parser(
            found.name,
            help=head,
            description=head,
            epilog=rest,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(mine)
        mine.set_defaults(run=command.run)
    return parser


def _split_docstring(module: ModuleType) -> tuple[str, str]:
    """Return the first line of a docstring, and the rest."""
    head, _, rest = inspect.cleandoc(module.__doc__ or "").partition("\n")
    return head, rest.strip()
