"""Whose a port of this machine is.

A SuperNode's port is chosen before it listens there, and stands in its arguments. So
another user of the machine could listen first, and hand out work of their own.
"""

from __future__ import annotations

import os
from pathlib import Path

_TABLE = Path("/proc/net/tcp")
_LISTENS = "0A"
_LOOPBACK = "0100007F"


def is_ours(port: int) -> bool:
    """Say whether this user listens on a port of 127.0.0.1.

    Where the system does not tell, as outside Linux, it is taken for ours.
    """
    try:
        lines = _TABLE.read_text().splitlines()[1:]
    except OSError:
        return True
    here = f"{_LOOPBACK}:{port:04X}"
    rows = (line.split() for line in lines)
    owners = {int(row[7]) for row in rows if (row[1], row[3]) == (here, _LISTENS)}
    return owners == {os.geteuid()}
