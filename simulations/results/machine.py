"""Where figures come from: none stands without its machine and versions."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

PACKAGES = ("numpy", "scipy", "numba", "torch", "opacus", "byzfl", "byzpy")


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


def record(path: Path, settings: Mapping[str, object], results: object) -> None:
    """Write figures as JSON, with the settings and the machine that they belong to."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figures = {"settings": settings, "machine": machine(), "results": results}
    path.write_text(json.dumps(figures, indent=2) + "\n")
