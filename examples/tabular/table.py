"""How a site reads its table, by public knowledge alone.

Nothing here is estimated from the rows: not a mean, not a share of missing values. What
is estimated from private rows leaks, before any noise is added. Bounds, categories and
the weight of the rare class are the study protocol's, and the same at every site.
"""

import csv
from functools import cache
from pathlib import Path

import numpy as np
import torch

# What a value can be, by medical knowledge. Values outside are moved to the bound.
BOUNDS = {
    "age": (18.0, 100.0),
    "blood_pressure": (70.0, 220.0),
    "glucose": (40.0, 400.0),
    "creatinine": (0.2, 8.0),
}
CATEGORIES = {"sex": ("f", "m"), "ward": ("medical", "surgical", "icu")}
LABEL = "readmitted"
# A number and whether it is missing; one column for each category.
FEATURES = 2 * len(BOUNDS) + sum(map(len, CATEGORIES.values()))


@cache
def read_table(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs, (m, FEATURES) in [-1, 1], and labels, (m,) of 0 and 1.

    A row without a label is left out. A missing number becomes the middle of its
    bounds and is marked; an unknown category is none of them.
    """
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row[LABEL] in ("0", "1")]
    inputs = np.array([_encode(row) for row in rows], dtype=np.float32)
    labels = np.array([int(row[LABEL]) for row in rows])
    return torch.from_numpy(inputs), torch.from_numpy(labels)


def _encode(row: dict[str, str]) -> list[float]:
    encoded: list[float] = []
    for name, (low, high) in BOUNDS.items():
        try:
            value = float(row[name].replace(",", "."))
        except ValueError:  # empty, or no number
            value = float("nan")
        missing = not np.isfinite(value)
        value = (low + high) / 2 if missing else min(max(value, low), high)
        encoded += [2 * (value - low) / (high - low) - 1, float(missing)]
    for name, known in CATEGORIES.items():
        said = row[name].strip().lower()
        encoded += [float(said == category) for category in known]
    return encoded


def make_table(path: Path, site: int, rows: int) -> None:
    """Make up the table of a site, with gaps, decimal commas and unknown wards."""
    rng = np.random.default_rng([7, site])
    age = rng.normal(60 + 2 * site, 15, rows)
    pressure = rng.normal(130, 22, rows)
    glucose = rng.gamma(6, 22, rows)
    creatinine = rng.gamma(4, 0.35, rows)
    sex = rng.choice(["f", "m", "M"], rows)
    ward = rng.choice(["medical", "surgical", "icu", "day clinic"], rows)
    score = 0.09 * (age - 70) + 0.02 * (glucose - 130) + 1.6 * (creatinine - 1.4)
    score += np.where(ward == "icu", 1.5, 0.0) + rng.logistic(0, 0.6, rows)
    columns = [age, pressure, glucose, creatinine]
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*BOUNDS, *CATEGORIES, LABEL])
        for i in range(rows):
            numbers = [f"{column[i]:.1f}" for column in columns]
            for j in np.flatnonzero(rng.random(4) < 0.08):
                numbers[j] = ("", "NA", numbers[j].replace(".", ","))[rng.integers(3)]
            writer.writerow([*numbers, sex[i], ward[i], int(score[i] > 2.2)])
