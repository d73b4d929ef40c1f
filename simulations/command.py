"""What every command of the simulations does alike: complain, and keep a folder."""

from __future__ import annotations

import argparse
import fcntl
import functools
import hashlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn, ParamSpec

from simulations.config import SettingsError, explain_errors

P = ParamSpec("P")


class Parser(argparse.ArgumentParser):
    """A parser whose complaints are one line."""

    def error(self, message: str) -> NoReturn:
        """Print what is wrong, and leave with code 2."""
        self.exit(2, f"{self.prog}: error: {message}\n")


def at_least(least: int) -> Callable[[str], int]:
    """Return a type of arguments: whole numbers from `least` on."""

    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} must be at least {least}")
        return value

    number.__name__ = "whole number"  # what the parser calls it
    return number


def between(low: float, high: float) -> Callable[[str], float]:
    """Return a type of arguments: numbers above `low` and below `high`."""

    def number(text: str) -> float:
        value = float(text)
        if not low < value < high:
            raise argparse.ArgumentTypeError(
                f"{text} must be above {low:g} and below {high:g}"
            )
        return value

    number.__name__ = "number"
    return number


def print_settings_errors(main: Callable[P, int]) -> Callable[P, int]:
    """Let a command say in one line what is wrong with its settings, and return 2.

    With ``HYDRA_FULL_ERROR=1`` the error is raised, as Hydra does.
    """

    @functools.wraps(main)
    def careful(*args: P.args, **kwargs: P.kwargs) -> int:
        try:
            return main(*args, **kwargs)
        except SettingsError as error:
            if os.environ.get("HYDRA_FULL_ERROR") == "1":
                raise
            print(f"error: {error}", file=sys.stderr)
            return 2

    return careful


def prepare_folder(path: Path) -> None:
    """Make a folder, and refuse one in which nothing can be written."""
    with explain_errors():
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()


def prepare_file(path: Path) -> None:
    """Make the folder of a file that a command will write at its end, or refuse it."""
    if path.is_dir():
        raise SettingsError(f"{path} is a folder; name a file in it")
    prepare_folder(path.parent)


def prepare_picture(path: Path) -> None:
    """Do so for a picture, whose ending has to name a format."""
    if path.suffix not in (formats := (".pdf", ".png", ".svg")):
        raise SettingsError(f"{path} must end in one of {', '.join(formats)}")
    prepare_file(path)


@contextmanager
def lock_path(path: Path) -> Iterator[None]:
    """Let no other run write to a file or folder meanwhile; a kill ends that, too.

    Its folder is made, and refused if nothing can be written there.
    """
    prepare_folder(path.parent)
    digest = hashlib.sha256(bytes(path.absolute())).hexdigest()[:16]
    lock = Path(tempfile.gettempdir()) / f"safedshb-{os.getuid()}-{digest}.lock"
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SettingsError(
                f"another run is at work in {path}; wait for it, or use another folder"
            ) from None
        yield
