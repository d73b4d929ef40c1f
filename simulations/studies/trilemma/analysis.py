"""What errors say: the strongest attack, slopes, and how far rules are apart.

Intervals are over seeds: a seed's draws of two settings are independent, and those of
two rules in one setting are the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np
from numpy.typing import NDArray

from flwr_safedshb.theory import kappa_smea, mean_estimation_bound
from simulations.results.intervals import (
    Estimate,
    estimate,
    estimate_means,
    slope,
)
from simulations.studies.trilemma.points import Point

Floats = NDArray[np.float64]

TOLERANCE = 0.25
# What the lower bound says of the exponents, without adversaries.
PREDICTED = {"d, f = 0": 1.0, "m, f = 0": -2.0, "epsilon, f = 0": -2.0}
REFERENCE = "SMEA"


@dataclass
class Cell:
    """Errors of a rule in a setting; filled as they come.

    Attributes
    ----------
    errors : dict of attack to dict of seed to squared error
    """

    sweep: str
    value: float
    rule: str
    point: Point
    errors: dict[str, dict[int, float]] = field(default_factory=dict)

    def add(self, seeds: Sequence[int], found: Mapping[str, Sequence[float]]) -> None:
        """Add the errors of some seeds."""
        for attack, values in found.items():
            self.errors.setdefault(attack, {}).update(zip(seeds, values, strict=True))

    @property
    def strongest(self) -> str:
        """The attack with the largest mean error."""
        return max(self.errors, key=lambda name: self.of(name).mean())

    @property
    def worst(self) -> Floats:
        """Errors under the strongest attack, (seeds,), in the order of the seeds."""
        return self.of(self.strongest)

    def of(self, attack: str) -> Floats:
        """Return the errors under an attack, (seeds,)."""
        return np.array([error for _, error in sorted(self.errors[attack].items())])

    @property
    def bound(self) -> float:
        """What is proved for exact SMEA in this setting."""
        p = self.point
        kappa = kappa_smea(p.n, p.f)
        found = mean_estimation_bound(
            p.n, p.f, p.d, p.noise_std, kappa, p.heterogeneity
        )
        return found.combined

    def as_json(self) -> dict[str, object]:
        """Return everything as plain values."""
        return {
            "sweep": self.sweep,
            "value": self.value,
            "rule": self.rule,
            "setting": asdict(self.point),
            "privacy_only": self.point.privacy_only,
            "smea_bound": self.bound,
            "strongest_attack": self.strongest,
            "errors": self.worst.tolist(),
            "mean_by_attack": {a: float(self.of(a).mean()) for a in self.errors},
        }


Measured = Mapping[tuple[str, float, str], Cell]


def curve(measured: Measured, sweep: str, rule: str) -> list[Cell]:
    """Return the cells of a rule along a sweep, by value."""
    cells = [c for c in measured.values() if c.sweep == sweep and c.rule == rule]
    return sorted(cells, key=lambda cell: cell.value)


def worst_errors(cells: Sequence[Cell]) -> Floats:
    """Return the errors of each cell under its strongest attack, (seeds, cells)."""
    return np.stack([cell.worst for cell in cells], axis=1)


def findings(measured: Measured, fits: Mapping[str, float]) -> dict[str, object]:
    """Return slopes of all curves, and the separation as n grows.

    Parameters
    ----------
    measured : mapping
    fits : mapping of a sweep to where its fit begins
    """
    rules = list(dict.fromkeys(cell.rule for cell in measured.values()))
    sweeps = list(dict.fromkeys(cell.sweep for cell in measured.values()))
    slopes = []
    for sweep in sweeps:
        for rule in rules:
            cells = curve(measured, sweep, rule)
            start = fits[sweep.removesuffix(", f = 0")]
            values = [cell.value for cell in cells]
            found = slope(values, worst_errors(cells), start)
            predicted = PREDICTED.get(sweep)
            slopes.append(
                {
                    "sweep": sweep,
                    "rule": rule,
                    "from": max(start, values[0]),
                    "slope": found,
                    "predicted": predicted,
                    "within": predicted is None
                    or abs(found["value"] - predicted) <= TOLERANCE,
                }
            )
    apart = separation(measured, "n", fits["n"], rules)
    return {"slopes": slopes, "separation": apart}


def separation(
    measured: Measured,
    sweep: str,
    start: float,
    rules: Sequence[str],
) -> list[dict[str, object]]:
    """Return, for each rule, error over privacy-only error along a sweep.

    Its slope, from `start` on, says whether it stays bounded; ``times_smea`` is how
    many times SMEA's error the rule has at the largest value, for the same draws.
    """
    found: list[dict[str, object]] = []
    last = curve(measured, sweep, REFERENCE)[-1].worst
    for rule in rules:
        cells = curve(measured, sweep, rule)
        values = [cell.value for cell in cells]
        units = [cell.point.privacy_only for cell in cells]
        ratios = worst_errors(cells) / np.array(units)
        both = np.stack((cells[-1].worst, last), axis=1)
        found.append(
            {
                "rule": rule,
                "values": values,
                "attacks": [cell.strongest for cell in cells],
                "ratios": estimate_means(ratios),
                "slope": slope(values, ratios, start),
                "times_smea": estimate(both, lambda means: means[0] / means[1]),
            }
        )
    return found


def markdown(found: Mapping[str, object]) -> str:
    """Return slopes and separation as tables."""
    lines = ["# Slopes of the error, fitted on log-log axes", ""]
    lines += ["| against | rule | slope | 95% | predicted |", "|---|---|---|---|---|"]
    for row in found["slopes"]:  # type: ignore[attr-defined]
        predicted, verdict = row["predicted"], "yes" if row["within"] else "**no**"
        words = "" if predicted is None else f"{predicted:g}; within 0.25: {verdict}"
        lines.append(
            f"| {row['sweep']} (from {row['from']:g}) | {row['rule']} | "
            f"{_number(row['slope'])} | {_interval(row['slope'])} | {words} |"
        )
    lines += ["", "# Error over the privacy-only error as n grows, f/n fixed", ""]
    head = found["separation"][0]["values"]  # type: ignore[index]
    names = " | ".join(f"n = {value:g}" for value in head)
    lines += [f"| rule | {names} | slope (95%) | times SMEA's, last n (95%) |"]
    lines += ["|---" * (len(head) + 3) + "|"]
    for row in found["separation"]:  # type: ignore[attr-defined]
        ratios = " | ".join(_number(ratio) for ratio in row["ratios"])
        grows, times = row["slope"], row["times_smea"]
        lines.append(
            f"| {row['rule']} | {ratios} | {_number(grows)} ({_interval(grows)}) | "
            f"{_number(times)} ({_interval(times)}) |"
        )
    return "\n".join(lines) + "\n"


def _number(found: Estimate) -> str:
    return f"{found['value']:.3g}"


def _interval(found: Estimate) -> str:
    return f"{found['low']:.3g} to {found['high']:.3g}"
