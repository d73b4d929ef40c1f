"""What an epsilon for a person costs: ``python -m simulations.study unit``.

Seven clinics train a classifier of made-up visits. Every way but the first keeps to the
same epsilon for a patient with all visits; the first keeps to it for one visit.
``--set epsilon=1 steps=60`` changes the setting.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Context
from torch import nn

from flwr_safedshb import (
    Average,
    BatchedGrid,
    PrivacyPlan,
    SafeDSHB,
    SafeDSHBClient,
    SeededRandomness,
    client_app,
)
from flwr_safedshb.privacy.plan import Unit
from simulations.data.visits import MAX_VISITS, Visits, make_visits, split_by_owner
from simulations.results.tables import Table
from simulations.study import Runs, Section, Study, grid

CLINICS, PATIENTS, FEATURES = 7, 400, 20
DELTA = 1e-5
# Examples in a batch of each clinic, or patients with at most 4 visits each.
BATCH, PER_OWNER = 160, 4
# How many examples of a patient the noise of a way is for, or 0.
WAYS = {
    "by example, for one visit alone": 0,
    "by example, all visits": MAX_VISITS,
    "by example, first 3 visits": 3,
    "by example, first visit": 1,
    "by person": 1,
    "no noise": 0,
}


@lru_cache(maxsize=64)
def calibrate_for_group(
    plan: PrivacyPlan, steps: int, epsilon: float, group: int
) -> PrivacyPlan:
    """Return the plan with the least noise, within 1 %, for a group of examples."""
    low, high = 0.0, 1.0
    while replace(plan, noise_multiplier=high).epsilon(steps, DELTA, group) > epsilon:
        low, high = high, 2.0 * high
    while high - low > 0.01 * high:
        middle = (low + high) / 2
        found = replace(plan, noise_multiplier=middle).epsilon(steps, DELTA, group)
        low, high = (low, middle) if found <= epsilon else (middle, high)
    return replace(plan, noise_multiplier=high)


def make_plans(
    clinics: Sequence[Visits], way: str, steps: int, epsilon: float
) -> list[PrivacyPlan]:
    """Return the plan of each clinic, with the noise that the smallest one needs."""
    by_person = way == "by person"
    sizes = [
        len(np.unique(clinic.owners)) if by_person else len(clinic.owners)
        for clinic in clinics
    ]
    least = min(sizes) // 50 * 50  # few different plans to calibrate
    unit: Unit = "person" if by_person else "example"
    plan = PrivacyPlan(1.0, 0.0, BATCH, least, unit=unit)
    if way != "no noise":
        plan = calibrate_for_group(plan, steps, epsilon, max(WAYS[way], 1))
    return [replace(plan, num_examples=size) for size in sizes]


def train(
    way: str, steps: int = 60, epsilon: float = 2.0, seed: int = 0
) -> Mapping[str, object]:
    """Train a federation in one way, and return its accuracy on other patients' visits.

    Parameters
    ----------
    way : str
        A key of `WAYS`.
    steps : int
    epsilon : float
        Of the run, at delta = 1e-5.
    seed : int
    """
    visits = make_visits(CLINICS * PATIENTS, FEATURES, 2 * seed + 1)
    test = make_visits(2000, FEATURES, 2 * seed + 2)
    if "first" in way:
        visits = visits.keep_first(WAYS[way])
    clinics = split_by_owner(visits, CLINICS)
    plans = make_plans(clinics, way, steps, epsilon)
    torch.manual_seed(seed)
    model, loss = nn.Linear(FEATURES, 1), nn.BCEWithLogitsLoss()

    def client_fn(context: Context) -> SafeDSHBClient:
        node = int(context.node_config["partition-id"])
        mine, plan = clinics[node], plans[node]
        return SafeDSHBClient(
            model,
            loss,
            (mine.inputs, mine.targets),
            plan,
            context,
            owners=mine.owners if plan.unit == "person" else None,
            max_per_owner=PER_OWNER,
            randomness=SeededRandomness(seed),
        )

    strategy = SafeDSHB(Average(), momentum=0.9, server_learning_rate=2.0, seed=seed)
    server = BatchedGrid(client_app(client_fn), CLINICS)
    result = strategy.start(server, ArrayRecord(model.state_dict()), steps)
    trained = nn.Linear(FEATURES, 1)
    trained.load_state_dict(result.arrays.to_torch_state_dict())
    right = ((trained(test.inputs) > 0) == (test.targets > 0.5)).double().mean()
    plan, group = plans[0], WAYS[way] or MAX_VISITS
    return {
        "accuracy": float(right),
        "noise": plan.noise_std,
        "for a patient": plan.epsilon(steps, DELTA, group=group),
    }


def report(runs: Runs[Any]) -> Iterator[Section]:
    """Yield the accuracy of every way."""
    rows = []
    for way, some in runs.groups("way").items():
        metrics = [run["metrics"] for run in some]
        found = np.array([one["accuracy"] for one in metrics])
        noise = np.mean([one["noise"] for one in metrics])
        rows.append(
            [
                way,
                f"{max(one['for a patient'] for one in metrics):.3g}",
                f"{noise:.3f}",
                f"{found.mean():.3f} ± {found.std(ddof=1):.3f}",
            ]
        )
    yield Section(
        "Accuracy by unit of privacy",
        table=Table(["way", "epsilon for a patient", "noise", "accuracy"], rows),
        notes=f"{CLINICS} clinics with {PATIENTS} patients each, who have 1 to "
        f"{MAX_VISITS} visits, 3.3 on average; batches of {BATCH} visits, or of "
        f"{BATCH} patients with at most {PER_OWNER}; logistic regression, no "
        f"adversaries, delta = {DELTA:g}. Epsilon for a patient: a bound for all of "
        "the visits that a way uses, the largest of the seeds. Noise: standard "
        "deviation in a step's mean, where C = 1. Accuracy on the visits of other "
        "patients, mean ± standard "
        f"deviation of {len(runs.seeds)} seeds.",
    )


study = Study(
    "unit",
    "The unit of privacy and its cost",
    "What does the same epsilon cost for a patient with all visits?",
    grid(way=[*WAYS]),
    seeds=range(1, 6),
    report=report,
    measure=train,
    page="docs/persons.md",
)
