"""Write files whole or not at all, and make folders that only their owner can use.

Neither depends on the umask: who starts a program does not decide who may read or
change what it keeps.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO


def replace_file(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Replace `path` by what `write` writes; on disk when this returns.

    Parameters
    ----------
    path : Path
        Only its owner can read it. A missing folder is made, and only its owner can
        write to it.
    write : callable of a binary file
        If it raises, `path` is left as it was.
    """
    _make_folder(path.parent, 0o755)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(name)
        raise
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on disk."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def make_private_folder(path: Path) -> Path:
    """Make a folder that only this user can change, or check an existing one.

    Raises
    ------
    PermissionError
        If it belongs to somebody else, or somebody else can write to it or put another
        in its place.
    """
    path = path.absolute()
    _make_folder(path, 0o700)
    for place in (path, *path.parents):
        if place.is_symlink() and place.lstat().st_uid not in (0, os.geteuid()):
            raise PermissionError(f"{place} is a link that somebody else has made")
    real = Path(os.path.realpath(path))
    about = real.stat()
    if about.st_uid != os.geteuid():
        raise PermissionError(
            f"{real} belongs to user {about.st_uid} and not to the one that this "
            f"program runs as, {os.geteuid()}; give it to that one, or use another"
        )
    if about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"others can write to {real}: chmod go-w {real}")
    for place in real.parents:
        about = place.stat()
        # In a sticky folder, such as /tmp, nobody renames what is another's.
        if about.st_mode & stat.S_ISVTX:
            continue
        if about.st_mode & stat.S_IWOTH:
            raise PermissionError(f"everybody can write to {place}: chmod o-w {place}")
        if about.st_mode & stat.S_IWGRP and _is_shared(about.st_gid):
            others = f"others of group {about.st_gid}"
            raise PermissionError(f"{others} can write to {place}: chmod g-w {place}")
    return path


def _is_shared(group: int) -> bool:
    """Return True unless a group has no members but this user and root."""
    try:
        names = {*grp.getgrgid(group).gr_mem}
    except KeyError:
        return True
    users = [u for u in pwd.getpwall() if u.pw_name in names or u.pw_gid == group]
    known = {user.pw_name for user in users}
    return bool(names - known) or not {u.pw_uid for u in users} <= {0, os.geteuid()}


def _make_folder(path: Path, mode: int) -> None:
    """Make a folder and its missing parents with a mode, whatever the umask."""
    if path.is_dir():
        return
    if path.parent != path:
        _make_folder(path.parent, mode)
    path.mkdir(mode, exist_ok=True)
