"""Cost of one private step: ``python -m simulations.benchmarks.client_step``.

A step of ours (draw a batch, clip every example's gradient, add noise) beside a plain
step of SGD on the same model as the floor, and beside Opacus' two ways, which get their
batch. Every model has a process of its own with one thread, and what is compared takes
turns in it. Memory: the peak of the process's resident set while it steps, beyond what
was resident with model and data.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np
from matplotlib.figure import Figure

from simulations.benchmarks import deployed, outcome
from simulations.benchmarks.measure import figures_alone
from simulations.benchmarks.outcome import Check, Outcome, Table, at_least, at_most
from simulations.benchmarks.steps import OPACUS, OURS, PLAIN, SECURE, TASKS, Memory

# Steps of SGD that one private step may cost.
BOUNDS = {"logistic": 2.4, "CNN": 2.2, "MLP": 2.4}
SECONDS = {
    **{"logistic": 8.0, "CNN": 12.0, "MLP": 15.0},
    **{"transformer": 15.0, "ResNet-18": 45.0},
}
LARGE = "MLP"
STEPS = (PLAIN, OURS, SECURE, *OPACUS)

ask = partial(figures_alone, "simulations.benchmarks.steps")

Times = Mapping[str, Mapping[str, float]]


def run(quick: bool) -> Outcome:
    """Measure every model, and the memory of the largest."""
    seconds = {name: 0.5 if quick else SECONDS[name] for name in TASKS}
    times = {name: ask("time", name, str(enough)) for name, enough in seconds.items()}
    steps = (PLAIN, OURS) if quick else STEPS
    memories = {step: _memory(step) for step in steps}
    durable = deployed.measure(quick)
    return Outcome(
        name="client_step",
        title="Client step",
        tables=[_time_table(times), _memory_table(memories), deployed.table(durable)],
        checks=[
            *_time_checks(times),
            *_memory_checks(memories),
            *deployed.checks(durable),
        ],
        costs={f"{name} / plain SGD": _ratio(times[name], OURS) for name in times},
        settings={"seconds": seconds, "threads": 1},
        results={"seconds": times, "megabytes": memories, "deployed": durable},
        plot=lambda figure: _plot(figure, times),
    )


def _memory(step: str) -> Memory:
    figures = ask("memory", LARGE, step)
    return Memory(peak=figures["peak"], model=figures["model"])


def _ratio(times: Mapping[str, float], step: str) -> float:
    return times[step] / times[PLAIN]


def _drawn(times: Mapping[str, float]) -> float:
    """Return the share of a secure step that is spent on drawing batch and noise."""
    return (times["batch"] + times["noise"]) / times[SECURE]


def _time_table(times: Times) -> Table:
    rows = [
        (
            f"{name}, b = {TASKS[name].batch_size}",
            f"{1e3 * mine[PLAIN]:.2f}",
            *(f"{_ratio(mine, step):.2f}" for step in STEPS[1:]),
            f"{mine['batch'] / mine[SECURE]:.1%}",
            f"{mine['noise'] / mine[SECURE]:.1%}",
        )
        for name, mine in times.items()
    ]
    return Table(
        "One step, in steps of plain SGD",
        ("model", "SGD ms", "ours", "secure", "Opacus", "ghost", "batch", "noise"),
        rows,
        "ours: with the simulation's noise; secure: ours with a deployment's; Opacus: "
        "per example; ghost: Opacus' ghost clipping. batch, noise: their shares of a "
        "secure step. One thread, the processor's time.",
    )


def _memory_table(memories: Mapping[str, Memory]) -> Table:
    rows = [
        (step, f"{mine['peak']:.0f}", f"{mine['peak'] / mine['model']:.1f}")
        for step, mine in memories.items()
    ]
    return Table(f"Memory of one step of the {LARGE}", ("step", "MB", "models"), rows)


def _time_checks(times: Times) -> list[Check]:
    checks = [
        at_most(f"{name}, b = {TASKS[name].batch_size}", ratio, BOUNDS[name], "SGD")
        for name, mine in times.items()
        if name in BOUNDS and (ratio := _ratio(mine, OURS))
    ]
    for name, mine in times.items():
        who = min(OPACUS, key=lambda step: mine[step])
        ratio = mine[who] / mine[OURS]
        checks.append(at_least(f"{name}: Opacus / ours", ratio, 1.0, f"best: {who}"))
    for name, mine in times.items():
        what = f"{name}: drawing, of a secure step"
        checks.append(at_most(what, _drawn(mine), 0.5, "steps"))
    return checks


def _memory_checks(memories: Mapping[str, Memory]) -> list[Check]:
    ours, plain = memories[OURS], memories[PLAIN]
    bound = 1.5 * plain["peak"] + plain["model"]
    return [
        Check(
            f"memory of the {LARGE} step",
            f"{ours['peak']:.0f} MB",
            f"<= {bound:.0f} MB",
            ours["peak"] <= bound,
            "1.5 times plain SGD's and one model",
        )
    ]


def _plot(figure: Figure, times: Times) -> None:
    figure.set_size_inches(8, 3.6)
    axes = figure.subplots()
    width = 0.8 / (len(STEPS) - 1)
    places = np.arange(len(times))
    for i, step in enumerate(STEPS[1:]):
        heights = [_ratio(mine, step) for mine in times.values()]
        bars = axes.bar(places + i * width, heights, width, label=step)
        axes.bar_label(bars, [f"{height:.1f}" for height in heights], fontsize=8)
    for place, name in zip(places, times, strict=True):
        if name in BOUNDS:
            edges = (place - width / 2, place + 0.8 - width / 2)
            axes.plot(edges, [BOUNDS[name]] * 2, "k--", linewidth=1)
    axes.plot([], [], "k--", linewidth=1, label="target of ours")
    axes.axhline(1.0, color="0.5", linewidth=1)
    axes.set_yscale("log")
    axes.set_ylabel("steps of plain SGD")
    axes.set_xticks(
        places + 0.4 - width / 2,
        [f"{name}, b = {TASKS[name].batch_size}" for name in times],
    )
    figure.legend(loc="outside right upper", fontsize=8)


if __name__ == "__main__":
    raise SystemExit(outcome.main(run, __doc__))
