"""The machine: versions, entropy, clock, ledger folder, key, way to the SuperLink."""

from __future__ import annotations

import http.client
import os
import re
import shutil
import ssl
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from importlib import metadata
from pathlib import Path
from typing import Literal

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from packaging.requirements import Requirement

from flwr_safedshb.atomic_io import make_private_folder
from flwr_safedshb.flower.patching import TRIED, is_tried

_PACKAGE = "flwr-safedshb"
_COMPARED = ("flwr", "torch", "opacus", "dp-accounting", "numpy", "scipy")
# When this was written; a clock that says less is wrong.
_EARLIEST = datetime(2026, 1, 1, tzinfo=UTC)
_MIN_FREE_BYTES = 64 * 1024 * 1024
_CONNECT_SECONDS = 10.0
_WARN_DAYS = 30
# Flower lets a node's clock be ahead by this, and behind by that.
_AHEAD, _BEHIND = 5.0, 305.0
# A server tells the time in whole seconds.
_ROUNDING = 1.0


@dataclass(frozen=True)
class CheckResult:
    """What was checked, and what was found."""

    name: str
    verdict: Literal["ok", "warning", "failed"]
    finding: str


def is_fit(results: list[CheckResult]) -> bool:
    """Return True if no check failed."""
    return all(result.verdict != "failed" for result in results)


def check_versions() -> Iterator[CheckResult]:
    """Compare what is installed with what the package supports."""
    wanted: dict[str, Requirement] = {}
    for text in metadata.requires(_PACKAGE) or ():
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            wanted[re.sub(r"[-_.]+", "-", requirement.name).lower()] = requirement
    for package in _COMPARED:
        specifier, name = wanted[package].specifier, f"version of {package}"
        try:
            found = metadata.version(package)
        except metadata.PackageNotFoundError:
            yield CheckResult(name, "failed", f"not installed: {specifier}")
            continue
        finding = f"{found}, supported is {specifier}"
        if not specifier.contains(found, prereleases=True):
            yield CheckResult(name, "failed", finding)
        elif package == "flwr" and not is_tried(found):
            finding += (
                f"; its patches, for speed, were tried with {', '.join(TRIED)} only"
            )
            yield CheckResult(name, "warning", finding)
        else:
            yield CheckResult(name, "ok", finding)


def check_entropy() -> CheckResult:
    """Ask the operating system for entropy, without waiting for it."""
    name = "entropy"
    try:
        if hasattr(os, "getrandom"):
            os.getrandom(16, os.GRND_NONBLOCK)
        first, second = os.urandom(32), os.urandom(32)
    except (BlockingIOError, NotImplementedError) as error:
        return CheckResult(name, "failed", f"the system has none to give yet: {error}")
    if first == second:
        return CheckResult(name, "failed", "the system gave the same bytes twice")
    return CheckResult(name, "ok", "from the operating system, and ready")


def check_clock(newest_charge: str | None, now: float | None = None) -> CheckResult:
    """Look for signs of a wrong clock on this machine alone.

    Parameters
    ----------
    newest_charge : str, optional
        The time of the ledger's last entry, ISO 8601.
    now : float, optional
        Seconds since 1970; by default the clock's.
    """
    present = datetime.fromtimestamp(time.time() if now is None else now, UTC)
    finding = f"{present:%Y-%m-%d %H:%M:%S} UTC"
    if present < _EARLIEST:
        return CheckResult("clock", "failed", f"{finding}, which is long past: set it")
    if newest_charge is not None and datetime.fromisoformat(newest_charge) > present:
        finding += f", and the ledger was charged at {newest_charge}: it went back"
        return CheckResult("clock", "failed", finding)
    return CheckResult("clock", "ok", finding)


def check_state_dir(path: Path, ledger_name: str) -> Iterator[CheckResult]:
    """Check that the ledger's directory can be written to, by its owner alone."""
    name = "state-dir"
    if not path.is_absolute():
        finding = f"{path} depends on where the node is started"
        yield CheckResult(name, "warning", finding)
    parent = path
    while not parent.exists() and parent != parent.parent:
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        finding = f"{parent} is no directory that can be written to"
        yield CheckResult(name, "failed", finding)
        return
    free = shutil.disk_usage(parent).free
    if free < _MIN_FREE_BYTES:
        yield CheckResult(name, "failed", f"{free // 1024**2} MiB are free at {parent}")
        return
    if parent != path:
        yield CheckResult(name, "ok", f"{path} will be made")
        return
    try:
        make_private_folder(path)
    except PermissionError as error:
        yield CheckResult(name, "failed", str(error))
        return
    ledger = path / ledger_name
    mode = stat.S_IMODE(ledger.stat().st_mode) if ledger.exists() else 0
    if mode & 0o077:
        finding = f"others have access to {ledger} ({mode:04o})"
        yield CheckResult(name, "warning", finding)
    else:
        yield CheckResult(name, "ok", f"{path}, {free // 1024**2} MiB free")


def check_link(address: str, root_certificates: Path) -> Iterator[CheckResult]:
    """Connect as a node does, look at the certificate, and compare the clocks."""
    name = "way to the SuperLink"
    try:
        trusted = ssl.create_default_context(cafile=root_certificates)
    except OSError as error:  # also what is no certificate
        yield CheckResult(name, "failed", f"{root_certificates}: {error}")
        return
    connection = http.client.HTTPSConnection(
        address, timeout=_CONNECT_SECONDS, context=trusted
    )
    try:
        connection.connect()
        sock = connection.sock
        assert isinstance(sock, ssl.SSLSocket)
        certificate = sock.getpeercert() or {}
        connection.request("GET", "/")
        date = connection.getresponse().getheader("date")
        now = time.time()
    except ssl.SSLCertVerificationError as error:
        hint = "; or this machine's clock is wrong" if "expired" in str(error) else ""
        yield CheckResult(name, "failed", f"{error.verify_message}{hint}")
        return
    except (OSError, http.client.HTTPException) as error:
        yield CheckResult(name, "failed", f"{address} does not answer: {error}")
        return
    finally:
        connection.close()
    yield check_expiry(str(certificate["notAfter"]), now)
    if date is None:
        yield CheckResult(
            "clock against the SuperLink's", "warning", "it tells no time"
        )
    else:
        yield check_skew(now - parsedate_to_datetime(date).timestamp())


def check_expiry(not_after: str, now: float) -> CheckResult:
    """Check how long the SuperLink's certificate holds."""
    days = (ssl.cert_time_to_seconds(not_after) - now) / 86400
    return CheckResult(
        "way to the SuperLink",
        "ok" if days >= _WARN_DAYS else "warning",
        f"TLS with a trusted certificate, which holds {days:.0f} more days",
    )


def check_skew(ahead: float) -> CheckResult:
    """Check by how many seconds this clock is ahead of the SuperLink's."""
    name = "clock against the SuperLink's"
    finding = f"{abs(ahead):.0f} s {'ahead' if ahead > 0 else 'behind'}"
    if not -_BEHIND + _ROUNDING < ahead < _AHEAD - _ROUNDING:
        finding += f"; Flower refuses nodes more than {_AHEAD:g} s ahead or "
        return CheckResult(name, "failed", f"{finding}{_BEHIND:g} s behind")
    return CheckResult(name, "ok" if abs(ahead) < 2 * _ROUNDING else "warning", finding)


def check_key(path: Path) -> CheckResult:
    """Check that a node's private key is of a kind that Flower takes, and is secret."""
    name = "key of the node"
    try:
        key = load_ssh_private_key(path.read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:
        return CheckResult(name, "failed", f"{path} cannot be read: {error}")
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        finding = f"{path} is no key on an elliptic curve of NIST"
        return CheckResult(name, "failed", finding)
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        finding = f"others may read {path} ({mode:04o}): chmod 600"
        return CheckResult(name, "failed", finding)
    return CheckResult(name, "ok", f"{path}, {key.curve.name}")
