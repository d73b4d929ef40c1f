"""A stand-in for LIBSVM's phishing file: the same format, another checksum, smaller."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from simulations.data import Phishing

ROWS, FEATURES, PRESENT = 1103, 68, 30


@dataclass(frozen=True)
class StandIn:
    """A file as the published one is: labels 0 and 1, rows of norm 1, some repeated."""

    file: Path
    sha256: str

    @property
    def overrides(self) -> list[str]:
        """What makes Hydra's data=phishing take this file."""
        return [f"data.path={self.file}", f"+data.sha256={self.sha256}"]

    def source(self, test_fraction: float = 0.0) -> Phishing:
        return Phishing(str(self.file), test_fraction, sha256=self.sha256)

    def downloaded(self, url: str) -> Phishing:
        return Phishing(None, 0.0, url, self.sha256)


def write_stand_in(folder: Path) -> StandIn:
    rng = np.random.default_rng(0)
    different = [
        np.sort(rng.choice(FEATURES, PRESENT, replace=False)) + 1
        for _ in range(ROWS // 2)
    ]
    # The last feature is there: a parser that counts them itself finds as many.
    different[0][-1] = FEATURES
    value = f"{PRESENT**-0.5:.5f}"
    rows = [different[k % len(different)] for k in range(ROWS)]
    labels = rng.integers(0, 2, ROWS)
    lines = [
        f"{label} " + " ".join(f"{feature}:{value}" for feature in row)
        for label, row in zip(labels, rows, strict=True)
    ]
    file = folder / "phishing"
    file.write_text("\n".join(lines) + "\n")
    return StandIn(file, hashlib.sha256(file.read_bytes()).hexdigest())


def literally(file: Path) -> tuple[list[list[float]], list[int]]:
    """Read a file of this format line by line."""
    inputs, labels = [], []
    for line in file.read_text().splitlines():
        label, *pairs = line.split()
        row = [0.0] * FEATURES
        for pair in pairs:
            index, value = pair.split(":")
            row[int(index) - 1] = float(value)
        inputs.append(row)
        labels.append(int(label))
    return inputs, labels
