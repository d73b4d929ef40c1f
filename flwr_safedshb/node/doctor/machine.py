"""The machine: versions, entropy, clock, and the directory of the ledger."""

from __future__ import annotations

import os
import re
import shutil
import stat
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from flwr_safedshb.atomic_io import make_private_folder
from flwr_safedshb.node.doctor.check import Check

_PACKAGE = "flwr-safedshb"
_COMPARED = ("flwr", "torch", "opacus", "dp-accounting", "numpy", "scipy")
# No clock that is right says less: this was written later.
_EARLIEST = datetime(2026, 1, 1, tzinfo=UTC)
_MIN_FREE_BYTES = 64 * 1024 * 1024


def check_versions() -> Iterator[Check]:
    """Compare what is installed with what the package was made for."""
    wanted: dict[str, Requirement] = {}
    for text in metadata.requires(_PACKAGE) or ():
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            wanted[re.sub(r"[-_.]+", "-", requirement.name).lower()] = requirement
    for name in _COMPARED:
        specifier = wanted[name].specifier
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield Check(f"version of {name}", "failed", f"not installed: {specifier}")
            continue
        fits = specifier.contains(found, prereleases=True)
        yield Check(
            f"version of {name}",
            "ok" if fits else "failed",
            f"{found}, supported is {specifier}",
        )


def check_entropy() -> Check:
    """Ask the operating system for entropy, without waiting for it."""
    try:
        if hasattr(os, "getrandom"):
            os.getrandom(16, os.GRND_NONBLOCK)
        first, second = os.urandom(32), os.urandom(32)
    except (BlockingIOError, NotImplementedError) as error:
        return Check("entropy", "failed", f"the system has none to give yet: {error}")
    if first == second:
        return Check("entropy", "failed", "the system gave the same bytes twice")
    return Check("entropy", "ok", "from the operating system, and ready")


def check_clock(newest_charge: str | None, now: float | None = None) -> Check:
    """Look for signs of a wrong clock on this machine alone.

    Parameters
    ----------
    newest_charge : str, optional
        The time of the ledger's last entry, ISO 8601.
    now : float, optional
        Seconds since 1970; by default the clock's.
    """
    present = datetime.fromtimestamp(time.time() if now is None else now, UTC)
    told = f"{present:%Y-%m-%d %H:%M:%S} UTC"
    if present < _EARLIEST:
        return Check("clock", "failed", f"{told}, which is long past: set it")
    if newest_charge is not None and datetime.fromisoformat(newest_charge) > present:
        return Check(
            "clock",
            "failed",
            f"{told}, and the ledger was charged at {newest_charge}: it went back",
        )
    return Check("clock", "ok", told)


def check_state_dir(path: Path, ledger_name: str) -> Iterator[Check]:
    """Check that the ledger's directory can be written to, by its owner alone."""
    name = "state-dir"
    if not path.is_absolute():
        yield Check(name, "warning", f"{path} depends on where the node is started")
    place = path
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        yield Check(name, "failed", f"{place} is no directory that can be written to")
        return
    free = shutil.disk_usage(place).free
    if free < _MIN_FREE_BYTES:
        yield Check(name, "failed", f"{free // 1024**2} MiB are free at {place}")
        return
    if place != path:
        yield Check(name, "ok", f"{path} will be made")
        return
    try:
        make_private_folder(path)
    except PermissionError as error:
        yield Check(name, "failed", str(error))
        return
    ledger = path / ledger_name
    mode = stat.S_IMODE(ledger.stat().st_mode) if ledger.exists() else 0
    if mode & 0o077:
        yield Check(name, "warning", f"others have access to {ledger} ({mode:04o})")
    else:
        yield Check(name, "ok", f"{path}, {free // 1024**2} MiB free")
