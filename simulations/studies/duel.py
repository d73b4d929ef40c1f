"""The rules against attacks, as a table: ``python -m simulations.studies.duel``.

No training: honest clients send one noisy vector each, adversaries see them all and
answer, and the table says how far each rule is moved.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table

from flwr_safedshb.aggregation import (
    CAF,
    MDA,
    NNM,
    SMEA,
    Average,
    Filter,
    GeometricMedian,
    Krum,
    Median,
    MultiKrum,
    Rule,
    TrimmedMean,
)
from flwr_safedshb.attacks import (
    ALIE,
    FOE,
    Attack,
    FarCluster,
    MimicShift,
    NonFinite,
    SignFlip,
)
from flwr_safedshb.theory import check_num_malicious
from simulations.command import Parser, at_least, between, complaining, prepare_file
from simulations.config import explained
from simulations.results.machine import record

Floats = NDArray[np.float32]

RULES: dict[str, Rule] = {
    "Average": Average(),
    "Median": Median(),
    "TrimmedMean": TrimmedMean(),
    "Krum": Krum(),
    "MultiKrum": MultiKrum(),
    "GeometricMedian": GeometricMedian(),
    "MDA": MDA(),
    "CAF": CAF(),
    "Filter": Filter(),
    "SMEA": SMEA(),
    "NNM(TrimmedMean)": NNM(TrimmedMean()),
}
ATTACKS: dict[str, Attack | None] = {
    "none": None,
    "sign flip": SignFlip(),
    "ALIE": ALIE(),
    "FOE": FOE(),
    "mimic-shift": MimicShift(directions=("mean", "spectrum"), aim="distance"),
    "far cluster": FarCluster(),
    "NaN": NonFinite(),
}
# In standard errors: where a cell is no longer green, and where it turns red.
FAIR, BAD = 1.5, 3.0


@dataclass(frozen=True)
class Settings:
    """What is tried.

    Attributes
    ----------
    n, f, d : int
        Clients, adversaries among them, dimension.
    signal : float
        Every coordinate of the vector that honest clients send noisily; the noise has
        standard deviation 1.
    seeds : int
        Tries that a cell averages, with seeds 0, 1, ...
    """

    n: int = 10
    f: int = 3
    d: int = 69
    signal: float = 1.0
    seeds: int = 10


def displacement(
    rule: Rule, attack: Attack | None, settings: Settings, seed: int
) -> float:
    """Return how far a rule is from the honest mean, in its standard errors.

    The standard error is sqrt(trace(cov) / h) over the h honest vectors: how far their
    mean itself is, on average, from what they were drawn around.
    """
    rng = np.random.default_rng(seed)
    f = settings.f
    honest_clients = settings.n if attack is None else settings.n - f
    noise = rng.standard_normal((honest_clients, settings.d), dtype=np.float32)
    honest = np.float32(settings.signal) + noise
    sent = honest
    if attack is not None:
        sent = np.concatenate((honest, attack(honest, f, rng, rule)))
    error = math.sqrt(honest.var(axis=0).sum() / honest_clients)
    distance = np.linalg.norm(receive(rule, sent, f) - honest.mean(axis=0))
    return float(distance) / error


def receive(rule: Rule, sent: Floats, f: int) -> NDArray[np.floating]:
    """Aggregate as the server does.

    What is not finite is excluded, and whoever sent it was an adversary.

    Parameters
    ----------
    rule : Rule
    sent : (n, d) array
    f : int

    Returns
    -------
    (d,) array
    """
    finite = np.isfinite(sent).all(axis=1)
    return rule(sent[finite], max(0, f - int((~finite).sum())))


def tried(settings: Settings) -> dict[str, dict[str, float]]:
    """Return the mean displacement of every rule under every attack."""
    return {
        rule_name: {
            attack_name: float(
                np.mean(
                    [
                        displacement(rule, attack, settings, seed)
                        for seed in range(settings.seeds)
                    ]
                )
            )
            for attack_name, attack in ATTACKS.items()
        }
        for rule_name, rule in RULES.items()
    }


def show(
    console: Console, settings: Settings, results: Mapping[str, Mapping[str, float]]
) -> None:
    """Print the table and how to read it."""
    table = Table(
        title=f"How far {settings.f} of {settings.n} clients move each rule",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("rule", no_wrap=True)
    for head in (*ATTACKS, "kappa"):
        table.add_column(head, justify="right")
    for name, row in results.items():
        table.add_row(name, *map(_coloured, row.values()), _kappa(name, settings))
    console.print(table)
    console.print(
        "A cell is the distance of the rule's output from the mean of the honest "
        "vectors, in standard errors of that mean (averages over "
        f"{settings.seeds} tries, d = {settings.d}): 1 costs as much as the chance in "
        f"the honest vectors does anyway. Above {FAIR:g} is yellow, above {BAD:g} red. "
        "Adversaries see every honest vector; ALIE, FOE and mimic-shift choose, for "
        "each rule, the strength that harms it the most. Who sends NaN is excluded by "
        "the server and counts as found, so f falls. kappa is the proven constant, in "
        "which the "
        "squared distance is bounded: s in units of the largest eigenvalue of the "
        "honest covariance, v in units of its trace, up to n - f - 1 times larger; "
        "- where there is none. For f < n/3 Filter's default is CAF. One table is no "
        "proof: an attack that is not in it may do better.",
        highlight=False,
    )


def _coloured(value: float) -> str:
    colour = "green" if value <= FAIR else "yellow" if value <= BAD else "bold red"
    return f"[{colour}]{value:.2f}[/]"


def _kappa(name: str, settings: Settings) -> str:
    rule = RULES[name]
    value = rule.kappa(settings.n, settings.f)
    return "-" if value is None else f"{value:.1f} {rule.kappa_kind[0]}"


@complaining
def main(arguments: Sequence[str] | None = None) -> int:
    """Try every rule against every attack, print a table, write JSON."""
    defaults = Settings()
    number = at_least(1)
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--n", type=number, default=defaults.n, help="clients")
    parser.add_argument("--f", type=number, default=defaults.f, help="adversaries")
    parser.add_argument("--d", type=number, default=defaults.d, help="dimension")
    parser.add_argument("--signal", type=between(-1e6, 1e6), default=defaults.signal)
    parser.add_argument("--seeds", type=number, default=defaults.seeds)
    parser.add_argument("--out", type=Path, default=Path("outputs/duel/duel.json"))
    options = vars(parser.parse_args(arguments))
    out = options.pop("out")
    settings = Settings(**options)
    with explained():
        check_num_malicious(settings.n, settings.f)
    prepare_file(out)
    results = tried(settings)
    console = Console()
    show(console, settings, results)
    record(out, asdict(settings), results)
    console.print(f"Written: {out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
