"""Print the lowest version of each range in pyproject.toml, for pip to install.

`make compat` runs tests on them, so that the ranges are what was tried.
"""

import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]

# What the tests need beside the package; tools have no range that matters.
EXTRAS = ("compiled", "simulation", "tensorboard")


def lowest() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = list(project["dependencies"])
    for extra in EXTRAS:
        texts += project["optional-dependencies"][extra]
    pins = []
    for needed in map(Requirement, texts):
        extras = f"[{','.join(sorted(needed.extras))}]" if needed.extras else ""
        bounds = [part.version for part in needed.specifier if part.operator == ">="]
        pins += [f"{needed.name}{extras}=={bound}" for bound in bounds]
    return pins


if __name__ == "__main__":
    print("\n".join(lowest()))
