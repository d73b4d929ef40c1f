"""Made-up visits of patients: unequal numbers of records a person.

Most patients have few visits and some have many, and the visits of one patient are
alike. That is how follow-up data look, such as those of the free light chain study
(FLCHAIN); nothing here is from a real person.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

Integers = NDArray[np.int64]
MAX_VISITS = 12


@dataclass(frozen=True, eq=False)
class Visits:
    """Visits, and whose they are.

    Attributes
    ----------
    inputs : Tensor, shape (n, d)
    targets : Tensor, shape (n, 1), of 0 and 1
    owners : ndarray, shape (n,)
        The number of the patient.
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    owners: Integers

    def select(self, which: NDArray[np.bool_] | Integers) -> Visits:
        """Return some visits."""
        rows = torch.from_numpy(np.arange(len(self.owners))[which])
        return Visits(self.inputs[rows], self.targets[rows], self.owners[which])

    def keep_first(self, most: int) -> Visits:
        """Return the first visits of each patient, at most so many."""
        seen: dict[int, int] = {}
        kept = np.zeros(len(self.owners), bool)
        for row, owner in enumerate(self.owners.tolist()):
            seen[owner] = seen.get(owner, 0) + 1
            kept[row] = seen[owner] <= most
        return self.select(kept)


def make_visits(patients: int, features: int, seed: int) -> Visits:
    """Return the visits of some patients, from 1 to `MAX_VISITS` each."""
    rng = np.random.default_rng(seed)
    # The relation of inputs and targets, which is the same for all seeds.
    direction = np.random.default_rng(0).normal(size=features)
    counts = np.minimum(rng.geometric(0.3, patients), MAX_VISITS)
    owners = np.repeat(np.arange(patients), counts)
    usual = rng.normal(size=(patients, features))[owners]
    inputs = (usual + rng.normal(size=usual.shape)) / np.sqrt(2 * features)
    targets = inputs @ direction + 0.3 * rng.normal(size=len(owners)) > 0
    return Visits(
        torch.from_numpy(inputs.astype(np.float32)),
        torch.from_numpy(targets.astype(np.float32)[:, None]),
        owners,
    )


def split_by_owner(visits: Visits, count: int) -> list[Visits]:
    """Return the visits of each of `count` clinics; no patient is in two."""
    patients = np.unique(visits.owners)
    parts = np.array_split(patients, count)
    return [visits.select(np.isin(visits.owners, part)) for part in parts]
