"""The study: runs with adversaries and without, against the theorem's bound."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib import style
from matplotlib.figure import Figure
from rich.console import Console
from rich.markdown import Markdown

from flwr_safedshb import theory
from flwr_safedshb.aggregation import SMEA
from flwr_safedshb.atomic_io import replace_file
from flwr_safedshb.attacks import ALIE, FOE, Attack, MinMax
from flwr_safedshb.privacy.plan import PrivacyPlan
from simulations.config import check_numbers
from simulations.results.intervals import Estimate, estimate_means, slope
from simulations.results.parallel import run_in_processes
from simulations.results.plots import LOOKS, PANEL, STYLE, save
from simulations.studies.convergence.problem import Floats, Problem

ATTACKS: dict[str, Attack | None] = {
    "no adversaries": None,
    "ALIE": ALIE(),
    "FOE": FOE(),
    "min-max": MinMax(),
}
# ALIE against clients whose data differ: the term that no T removes.
HETEROGENEOUS = "ALIE, clients differ"
CASES = (*ATTACKS, HETEROGENEOUS)


@dataclass(frozen=True)
class ConvergenceCheck:
    """E[L(theta_T) - L*] against T, with adversaries and without, and its bound.

    Attributes
    ----------
    num_nodes, num_malicious_nodes : int
        n and f; without adversaries there are n - f nodes.
    num_examples, num_features, weight_decay : of a client's data
    batch_size, noise_multiplier, delta : of every client's privacy plan
    steps : int
        The largest T, a power of two.
    fit_from : int
        The smallest T of the fitted slope.
    seed, num_seeds : int
    workers : int, optional
    """

    num_nodes: int
    num_malicious_nodes: int
    num_examples: int
    num_features: int
    weight_decay: float
    batch_size: int
    noise_multiplier: float
    delta: float
    steps: int
    fit_from: int
    seed: int
    num_seeds: int
    workers: int | None = None

    def __post_init__(self) -> None:
        check_numbers(
            self,
            dict.fromkeys(("num_nodes", "num_examples", "num_features"), 1)
            | {"num_malicious_nodes": 0, "seed": 0, "num_seeds": 2, "fit_from": 1}
            | {"steps": 16}
            | ({} if self.workers is None else {"workers": 1}),
        )
        theory.StronglyConvex(1.0 + self.weight_decay, self.weight_decay)
        theory.check_num_malicious(self.num_nodes, self.num_malicious_nodes)
        if not 0 < self.delta < 1:
            raise ValueError(f"delta={self.delta} must lie in (0, 1)")
        if sum(time >= self.fit_from for time in self.times) < 2:
            raise ValueError(
                f"fit_from={self.fit_from} leaves fewer than two of T = {self.times} "
                "to fit a slope to; lower it, or raise steps"
            )
        _ = self.plan

    @property
    def times(self) -> list[int]:
        """The values of T: powers of two."""
        return [2**k for k in range(4, self.steps.bit_length())]

    @property
    def plan(self) -> PrivacyPlan:
        """What an honest client does to its gradient."""
        noise, b = self.noise_multiplier, self.batch_size
        return PrivacyPlan(1.0, noise, b, self.num_examples)

    def problem(self, case: str) -> Problem:
        """Draw the data: of one hyperplane, the same for all clients or not."""
        rng = np.random.default_rng(self.seed)
        h = self.num_nodes - self.num_malicious_nodes
        m, d = self.num_examples, self.num_features
        features = rng.normal(size=(h, m, d))
        if case == HETEROGENEOUS:
            features += rng.normal(size=(h, 1, d))
        else:
            features[:] = features[0]
        features /= np.linalg.norm(features, axis=-1, keepdims=True)
        labels = (features @ rng.normal(size=d) > 0).astype(np.float64)
        return Problem(features, labels, self.weight_decay)

    def gaps(self, case: str, seed: int) -> list[float]:
        """Run Algorithm 1 once; return L(theta_T) - L* at each of `times`."""
        problem = self.problem(case)
        attack = ATTACKS[case.split(",")[0]]
        f = 0 if attack is None else self.num_malicious_nodes
        h, m, d = problem.features.shape
        schedule = theory.StronglyConvex(problem.smoothness, self.weight_decay)
        rng = np.random.default_rng([self.seed, seed])
        rule, best = SMEA(), problem.loss(problem.minimiser)
        theta, momentums, found = np.zeros(d), np.zeros((h, d)), []
        for step in range(self.steps):
            rows = rng.random((h, m)).argpartition(self.batch_size - 1)[
                :, : self.batch_size
            ]
            noise = self.plan.noise_std * rng.normal(size=(h, d))
            gradients = problem.gradients(theta, rows) + noise
            # Alg. 1 uses beta_{t-1} in step t; the strategy takes beta_0 in step 0.
            beta = schedule.momentum(max(step - 1, 0))
            momentums = beta * momentums + (1.0 - beta) * gradients
            sent = momentums
            if attack is not None:
                sent = np.concatenate((momentums, attack(momentums, f, rng, rule)))
            theta = theta - schedule.learning_rate(step) * rule(sent, f)
            if step + 1 in self.times:
                found.append(problem.loss(theta) - best)
        return found

    def bounds(self, case: str) -> dict[str, list[theory.Bound]]:
        """Return our bound and the paper's at each of `times`; sigma is at most C."""
        problem, plan = self.problem(case), self.plan
        attacked = ATTACKS[case.split(",")[0]] is not None
        f = self.num_malicious_nodes if attacked else 0
        n = len(problem.features) + f
        b, m, d = self.batch_size, self.num_examples, self.num_features
        gap = problem.loss(np.zeros(d)) - problem.loss(problem.minimiser)
        found = {}
        for whose, sampled, effective, kappa, bound in (
            (
                "ours",
                theory.batch_variance,
                theory.effective_variance,
                theory.kappa_smea(n, f),
                theory.strongly_convex_bound,
            ),
            (
                "the paper's",
                theory.batch_variance_paper,
                theory.effective_variance_paper,
                theory.kappa_smea_paper(n, f),
                theory.strongly_convex_bound_paper,
            ),
        ):
            variance = effective(n, f, d, sampled(1.0, b, m), plan.noise_std, kappa)
            found[whose] = [
                bound(
                    problem.smoothness,
                    self.weight_decay,
                    kappa,
                    problem.heterogeneity,
                    variance,
                    gap,
                    steps,
                )
                for steps in self.times
            ]
        return found

    def __call__(self, folder: Path) -> None:
        """Measure, compare with the bound and draw; leave everything in a folder."""
        # Here, so that the processes that measure do not wait for torch and Flower.
        from simulations.results.machine import versions

        console = Console()
        start = time.perf_counter()
        gaps, spent = self.measure(console)
        found = {case: self.compare(case, gaps[case]) for case in CASES}
        record = {
            "config": asdict(self),
            "versions": versions(),
            "seconds": time.perf_counter() - start,
            "processor_seconds": spent,
            "privacy": str(self.plan.statement(self.steps, self.delta)),
            "times": self.times,
            "cases": found,
        }
        text = json.dumps(record, allow_nan=False, indent=1) + "\n"
        replace_file(
            folder / "convergence.json", lambda file: file.write(text.encode())
        )
        save(self.figure(gaps), folder / "convergence")
        summary = self.markdown(found)
        (folder / "convergence.md").write_text(summary)
        console.print(Markdown(summary))
        console.print(f"T = {self.steps}: {record['privacy']}")
        console.print(
            f"{record['seconds']:.0f} s, {spent:.0f} s of processors; everything is in "
            f"{folder}"
        )

    def measure(self, console: Console) -> tuple[dict[str, Floats], float]:
        """Return the gaps of all cases, (seeds, times), and processors' seconds."""
        seeds = range(self.seed, self.seed + self.num_seeds)
        tasks = [(case, seed) for case in reversed(CASES) for seed in seeds]
        gaps = {case: np.empty((len(seeds), len(self.times))) for case in CASES}
        spent = 0.0
        for (case, seed, row), seconds in run_in_processes(
            partial(_task, self), tasks, self.workers, "training", console
        ):
            gaps[case][seed - self.seed] = row
            spent += seconds
        return gaps, spent

    def compare(self, case: str, gaps: Floats) -> dict[str, object]:
        """Return the measured gaps, their bound, and the slope of their mean."""
        bounds = self.bounds(case)
        fitted = slope(self.times, gaps, self.fit_from)
        totals = np.array([bound.total for bound in bounds["ours"]])
        return {
            "gaps": gaps.tolist(),
            "bounds": {
                whose: list(map(asdict, some)) for whose, some in bounds.items()
            },
            "below_bound": bool((gaps.mean(axis=0) <= totals).all()),
            "slope": fitted,
            "last": float(gaps[:, -1].mean()),
            "last_bound": float(totals[-1]),
            "last_bound_paper": bounds["the paper's"][-1].total,
        }

    def markdown(self, found: Mapping[str, Mapping[str, object]]) -> str:
        """Return a table."""
        lines = [
            f"| adversaries | E[L - L*] at T = {self.steps} | our bound | "
            f"the paper's | always below ours | slope from T = {self.fit_from} (95%) |",
            "|---|---|---|---|---|---|",
        ]
        for case, row in found.items():
            fitted: Estimate = row["slope"]  # type: ignore[assignment]
            lines.append(
                f"| {case} | {row['last']:.3g} | {row['last_bound']:.3g} | "
                f"{row['last_bound_paper']:.3g} | "
                f"{'yes' if row['below_bound'] else '**no**'} | {fitted['value']:.2f} "
                f"({fitted['low']:.2f} to {fitted['high']:.2f}) |"
            )
        return "\n".join(lines) + "\n"

    def figure(self, gaps: Mapping[str, Floats]) -> Figure:
        """Draw the gaps against T, and the bounds far above."""
        with style.context(STYLE):
            figure = Figure(figsize=(PANEL[0] * 1.4, PANEL[1] * 1.3))
            figure.set_layout_engine("constrained")
            axes = figure.subplots()
            for look, (case, values) in zip(LOOKS, gaps.items(), strict=False):
                mean = values.mean(axis=0)
                found = estimate_means(values)
                low, high = ([each[end] for each in found] for end in ("low", "high"))
                axes.plot(
                    self.times,
                    mean,
                    look.line,
                    color=look.colour,
                    marker=look.marker,
                    markersize=4,
                    label=case,
                )
                axes.fill_between(self.times, low, high, color=look.colour, alpha=0.18)
                totals = [bound.total for bound in self.bounds(case)["ours"]]
                axes.plot(self.times, totals, look.line, color=look.colour, lw=0.8)
            late = np.array([t for t in self.times if t >= self.fit_from])
            level = 3.0 * max(v.mean(axis=0)[-len(late)] for v in gaps.values())
            axes.plot(late, level * late[0] / late, color="0.7", lw=3, label="slope -1")
            axes.set(xscale="log", yscale="log", xlabel="steps T")
            axes.set_ylabel("L(θ) - L*, and our bounds (thin)")
            axes.set_xticks(self.times[::2], [str(t) for t in self.times[::2]])
            axes.minorticks_off()
            figure.legend(loc="outside lower center", ncols=3)
        return figure


def _task(
    check: ConvergenceCheck, case: str, seed: int
) -> tuple[str, int, list[float]]:
    return case, seed, check.gaps(case, seed)
