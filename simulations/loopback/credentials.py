"""Certificates and keys, made by the script that a real deployment uses."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from simulations.loopback.processes import ROOT

SCRIPT = ROOT / "flwr_safedshb" / "node" / "template" / "credentials.sh"


class Credentials:
    """What a SuperLink on the loopback and its SuperNodes know each other by.

    Parameters
    ----------
    folder : Path
        Is made, with a CA and a server's certificate for 127.0.0.1.
    days : int
        How long the server's certificate holds; below 0 it has expired.
    """

    def __init__(self, folder: Path, days: int = 365) -> None:
        self.folder = folder
        self._make("ca", str(folder))
        self.renew(days)

    @property
    def ca(self) -> Path:
        """The certificate that nodes and users trust."""
        return self.folder / "ca.crt"

    @property
    def certificate(self) -> Path:
        """The certificate of the server."""
        return self.folder / "server.crt"

    @property
    def certificate_key(self) -> Path:
        """The server's private key."""
        return self.folder / "server.key"

    def renew(self, days: int) -> None:
        """Give the server another certificate; it is used from its next start on."""
        self.certificate.unlink(missing_ok=True)
        self.certificate_key.unlink(missing_ok=True)
        settings = {"DAYS": str(days)}
        self._make("server", str(self.folder), "127.0.0.1", settings=settings)

    def node_key(self, name: str) -> Path:
        """Return the private key of a node, made at the first call."""
        key = self.folder / f"{name}.key"
        if not key.exists():
            self._make("node", str(self.folder), name)
        return key

    def _make(self, *arguments: str, settings: Mapping[str, str] | None = None) -> None:
        subprocess.run(
            [str(SCRIPT), *arguments],
            env={**os.environ, **(settings or {})},
            check=True,
            capture_output=True,
            timeout=60,
        )
