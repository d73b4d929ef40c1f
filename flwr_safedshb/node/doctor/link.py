"""The way to the SuperLink: certificate, clocks, and the node's own key."""

from __future__ import annotations

import http.client
import ssl
import stat
import time
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key

from flwr_safedshb.node.doctor.check import Check

_SECONDS = 10.0
_WARN_DAYS = 30
# What Flower allows between the time that a node signs and its own: a node may be ahead
# by this, and behind by that.
_AHEAD, _BEHIND = 5.0, 305.0
# A server says the time in whole seconds.
_ROUNDING = 1.0


def check_link(address: str, root_certificates: Path) -> Iterator[Check]:
    """Connect as a node does, look at the certificate, and compare the clocks."""
    name = "way to the SuperLink"
    trusted = ssl.create_default_context(cafile=root_certificates)
    connection = http.client.HTTPSConnection(address, timeout=_SECONDS, context=trusted)
    try:
        connection.connect()
        sock = connection.sock
        assert isinstance(sock, ssl.SSLSocket)
        certificate = sock.getpeercert() or {}
        connection.request("GET", "/")
        told = connection.getresponse().getheader("date")
        now = time.time()
    except ssl.SSLCertVerificationError as error:
        hint = "; or this machine's clock is wrong" if "expired" in str(error) else ""
        yield Check(name, "failed", f"{error.verify_message}{hint}")
        return
    except (OSError, http.client.HTTPException) as error:
        yield Check(name, "failed", f"{address} does not answer: {error}")
        return
    finally:
        connection.close()
    yield check_expiry(str(certificate["notAfter"]), now)
    if told is None:
        yield Check("clock against the SuperLink's", "warning", "it tells no time")
    else:
        yield check_skew(now - parsedate_to_datetime(told).timestamp())


def check_expiry(not_after: str, now: float) -> Check:
    """Say how long the SuperLink's certificate holds."""
    days = (ssl.cert_time_to_seconds(not_after) - now) / 86400
    return Check(
        "way to the SuperLink",
        "ok" if days >= _WARN_DAYS else "warning",
        f"TLS with a trusted certificate, which holds {days:.0f} more days",
    )


def check_skew(ahead: float) -> Check:
    """Judge by how many seconds this clock is ahead of the SuperLink's."""
    name = "clock against the SuperLink's"
    way = "ahead" if ahead > 0 else "behind"
    finding = f"{abs(ahead):.0f} s {way}"
    if not -_BEHIND + _ROUNDING < ahead < _AHEAD - _ROUNDING:
        return Check(
            name,
            "failed",
            f"{finding}; Flower refuses nodes more than {_AHEAD:g} s ahead or "
            f"{_BEHIND:g} s behind",
        )
    return Check(name, "ok" if abs(ahead) < 2 * _ROUNDING else "warning", finding)


def check_key(path: Path) -> Check:
    """Check that a node's private key is one that Flower takes, and is secret."""
    name = "key of the node"
    try:
        key = load_ssh_private_key(path.read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:
        return Check(name, "failed", f"{path} cannot be read: {error}")
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        return Check(name, "failed", f"{path} is no key on an elliptic curve of NIST")
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        return Check(name, "failed", f"others may read {path} ({mode:04o}): chmod 600")
    return Check(name, "ok", f"{path}, {key.curve.name}")
