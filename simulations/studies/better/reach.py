"""How far colluders take a rule in one step, where honest vectors are noise alone."""

from __future__ import annotations

import numpy as np

from flwr_safedshb.aggregation import SMEA, GramRule
from flwr_safedshb.aggregation.rule import FloatArray
from flwr_safedshb.attacks import Strongest
from flwr_safedshb.theory import heterogeneity
from simulations.results.summary import table
from simulations.studies.better.attacks import Tireless
from simulations.studies.better.cases import DIMENSION, FEDERATIONS
from simulations.studies.better.minmax import MinMaxPoint

RULES: dict[str, SMEA | MinMaxPoint] = {"SMEA": SMEA(), "min-max": MinMaxPoint()}
SEEDS = 5
# So often the tireless go on; and how far away is far, in units of an honest vector.
_AGAIN, _FAR = 20, 100.0


def reach(rule: GramRule, n: int, f: int, seed: int) -> tuple[float, float, float]:
    """Return how far the output moves along a given way, in roots of lambda.

    By colluders who stand far away that way, by `Strongest`, and by `Tireless`.
    """
    rng = np.random.default_rng([seed, n, f])
    honest = rng.normal(size=(n - f, DIMENSION))
    way = rng.normal(size=DIMENSION)
    way /= np.linalg.norm(way)
    mean, top = honest.mean(axis=0), heterogeneity(honest)[1]

    def moved(sent: FloatArray) -> float:
        out = rule(np.concatenate((honest, sent)), f)
        return float((out - mean) @ way / top)

    far = np.tile(mean + _FAR * np.sqrt(DIMENSION) * way, (f, 1))
    tireless = Tireless(gradient=-way)
    for _ in range(_AGAIN):
        last = tireless.craft_vectors(honest, f, rng, rule)
    strongest = Strongest(gradient=-way).craft_vectors(honest, f, rng, rule)
    return moved(far), moved(strongest), moved(last)


def markdown() -> str:
    """Return what both rules let through, and what their constants allow."""
    rows = []
    for n, f in FEDERATIONS:
        cells = [f"{n}, {f}", f"{np.sqrt(f / (n - 2 * f)):.2f}"]
        for rule in RULES.values():
            found = np.mean([reach(rule, n, f, seed) for seed in range(SEEDS)], axis=0)
            figures = np.round([*found, np.sqrt(rule.kappa(n, f))], 2)
            cells += [f"{abs(value):.2f}" for value in figures]
        rows.append(cells)
    heads = ["n, f", "√(f/(n-2f))"]
    for words in RULES:
        heads += [f"{words}: far away", "strongest", "tireless", "√κ"]
    return "\n".join(table(heads, rows)) + "\n"
