"""What is tried on the paper's task, and the runs of each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product

from flwr_safedshb.privacy.plan import PrivacyPlan

FEDERATIONS = ((7, 1), (7, 2), (7, 3), (10, 2))
NOISES = (1.0, 2.0, 3.0)
MOMENTUMS = (0.95, 0.99)
# Of the paper's task: all examples, the numbers of the model, and of a step.
EXAMPLES, DIMENSION, CLIP, BATCH, STEPS, DELTA = 11_055, 69, 1.0, 25, 400, 1e-4

_HERE = "simulations.studies.better"
RULES = {"SMEA": "", "min-max": f"{_HERE}.minmax.MinMaxPoint"}
ATTACKS = {
    "strongest": "",
    "tireless": f"{_HERE}.attacks.Tireless",
    "aimed": f"{_HERE}.attacks.AimedAtMean",
    "screened": f"{_HERE}.attacks.Screened",
}
# Other ways to spend the same epsilon: batch, steps, learning rate.
SCHEDULES = {
    "": (BATCH, STEPS, 1.0),
    "batch 400": (400, STEPS, 1.0),
    "100 steps": (BATCH, 100, 2.0),
    "batch 400, 100 steps": (400, 100, 2.0),
    "rate 0.25": (BATCH, STEPS, 0.25),
}


@dataclass(frozen=True)
class Setting:
    """A federation on the paper's task, its noise and its momentum."""

    n: int
    f: int
    noise: float
    momentum: float

    @property
    def epsilon(self) -> float:
        """What the usual schedule costs a node."""
        return _epsilon(EXAMPLES // (self.n - self.f), self.noise)

    @property
    def bound(self) -> float:
        """The longest gradient that a node may claim: its clip and its noise.

        Noise of deviation s is longer than s (sqrt(d) + 5.4) once in two million times.
        """
        noise_std = 2.0 * CLIP * self.noise / BATCH
        return CLIP + noise_std * (math.sqrt(DIMENSION) + 5.4)


@cache
def _epsilon(examples: int, noise: float) -> float:
    return PrivacyPlan(CLIP, noise, BATCH, examples).epsilon(STEPS, DELTA)


@dataclass(frozen=True)
class Case:
    """A run: a rule and a schedule under an attack, or the honest clients alone."""

    setting: Setting
    rule: str
    attack: str
    schedule: str
    seed: int

    @property
    def name(self) -> str:
        """Name of the run's file, without suffix."""
        it = self.setting
        parts = [f"f{it.f}of{it.n}", f"noise{it.noise:g}", f"beta{it.momentum:g}"]
        parts += [self.rule, self.attack, self.schedule or "usual", f"seed{self.seed}"]
        return "_".join(parts).replace(", ", "-").replace(" ", "-")

    @property
    def overrides(self) -> list[str]:
        """What makes the run of the packaged configuration."""
        it = self.setting
        common = ["experiment=paper", "split=iid", f"momentum={it.momentum:g}"]
        common += [f"seed={self.seed}", *self._schedule]
        if not self.attack:
            alone = [f"num_nodes={it.n - it.f}", "num_malicious_nodes=0"]
            return [*common, *alone, "aggregation=average", "attack=none"]
        who = [f"num_nodes={it.n}", f"num_malicious_nodes={it.f}"]
        how = ["aggregation=smea", "attack=strongest", *self._attack]
        if RULES[self.rule]:
            how.append(f"aggregation._target_={RULES[self.rule]}")
        # The steps are the same, whether their last or their mean is returned.
        return [*common, *who, *how, "output=average"]

    @property
    def _attack(self) -> list[str]:
        it, target = self.setting, ATTACKS[self.attack]
        # Those who search in every step need not look along all rays so often.
        found = ["+attack.every=4"]
        if target:
            found = ["+attack.every=8", f"attack._target_={target}"]
        if self.attack == "screened":
            found.append(f"+attack.momentum={it.momentum:g}")
            found.append(f"+attack.bound={it.bound:.4g}")
        return found

    @property
    def _schedule(self) -> list[str]:
        batch, steps, rate = SCHEDULES[self.schedule]
        if not self.schedule:
            return [f"privacy.plan.noise_multiplier={self.setting.noise:g}"]
        return [
            f"privacy.plan.batch_size={batch}",
            f"privacy.target_epsilon={self.setting.epsilon:.6g}",
            f"steps={steps}",
            f"server_learning_rate={rate:g}",
            f"evaluate_every={steps // 40}",
        ]


def settings() -> list[Setting]:
    """Return all settings."""
    grid = product(FEDERATIONS, NOISES, MOMENTUMS)
    return [Setting(n, f, noise, momentum) for (n, f), noise, momentum in grid]


def cases(chosen: Sequence[Setting], seeds: Sequence[int]) -> Iterator[Case]:
    """Yield all runs, seed by seed; rules are tried in all settings.

    Outputs and screening with seven clients, schedules also with little or much noise
    alone.
    """
    for seed, it in product(seeds, chosen):
        yield Case(it, "", "", "", seed)
        for rule in RULES:
            yield Case(it, rule, "strongest", "", seed)
            yield Case(it, rule, "tireless", "", seed)
        if it.n != FEDERATIONS[0][0]:
            continue
        for attack in ("aimed", "screened"):
            yield Case(it, "SMEA", attack, "", seed)
        if it.noise in (NOISES[0], NOISES[-1]):
            for schedule in filter(None, SCHEDULES):
                yield Case(it, "SMEA", "strongest", schedule, seed)
                yield Case(it, "SMEA", "tireless", schedule, seed)
            yield Case(it, "SMEA", "aimed", "batch 400", seed)
