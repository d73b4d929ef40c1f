"""Where figures come from: none stands without its machine and versions."""

from __future__ import annotations

import os
import platform
from functools import lru_cache
from importlib import metadata
from pathlib import Path

# What figures of a run may depend on.
RUN_PACKAGES = (
    *("flwr-safedshb", "flwr", "torch", "numpy", "opacus"),
    *("dp-accounting", "cryptography"),
)
PACKAGES = ("numpy", "scipy", "numba", "torch", "opacus", "byzfl", "byzpy")


@lru_cache(maxsize=1)
def versions() -> dict[str, str]:
    """Return the versions that figures may depend on."""
    return {"python": platform.python_version()} | {
        package: metadata.version(package) for package in RUN_PACKAGES
    }


def machine() -> dict[str, object]:
    """Say where the figures come from: processor, load, versions of what is there."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "versions": versions,
    }


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
