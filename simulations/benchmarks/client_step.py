"""Cost of one private step: ``python -m simulations.benchmarks.client_step``.

A step of ours (draw a batch, clip every example's gradient, add noise) beside a plain
step of SGD on the same model as the lower bound, and beside Opacus' two ways, which get
their batch. Every model has a process of its own with one thread, and what is compared
takes turns in it. Memory: the peak of the process's resident set while it steps, beyond
what was resident with model and data.
"""

from __future__ import annotations

from collections.abc import Mapping

from simulations.benchmarks import deployed, steps
from simulations.benchmarks.measure import call_alone
from simulations.benchmarks.plots import Panel
from simulations.benchmarks.result import (
    Measurement,
    Result,
    ResultTable,
    TableRow,
    run_benchmark,
)
from simulations.benchmarks.steps import OPACUS, OURS, PLAIN, SECURE, STEPS, TASKS

SECONDS = {
    **{"logistic": 8.0, "CNN": 12.0, "MLP": 15.0},
    **{"transformer": 15.0, "ResNet-18": 45.0},
}
LARGE = "MLP"  # whose memory is measured
# Units in each of two hidden layers: 1.8 and 12.8 million parameters.
DEPLOYED = {"MLP": 1000, "large MLP": 3200}
MOMENTUM_SIZE = 200_000_000

Measured = Mapping[str, Mapping[str, float]]


def measure(quick: bool) -> Result:
    """Measure every model, the memory of one, and the deployed step."""
    times = {
        name: call_alone(steps.time_steps, name, 0.5 if quick else SECONDS[name])
        for name in TASKS
    }
    memory = {
        step: call_alone(steps.measure_memory, LARGE, step)
        for step in ((PLAIN, OURS) if quick else STEPS)
    }
    durable = {
        name: call_alone(deployed.measure_step, hidden, 1.0 if quick else 15.0)
        for name, hidden in list(DEPLOYED.items())[: 1 if quick else None]
    }
    size = 10**6 if quick else MOMENTUM_SIZE
    survived = deployed.momentum_survives_kill(size)
    ratios = {
        name: {step: mine[step] / mine[PLAIN] for step in STEPS[1:]}
        for name, mine in times.items()
    }
    return Result(
        tables=[
            _time_table(times, ratios),
            _memory_table(memory),
            _durable_table(durable),
        ],
        figures={
            **_time_figures(times),
            **_other_figures(memory, durable),
            "momentum found after kill -9": Measurement(
                survived, f"{size:,} parameters"
            ),
        },
        costs={f"{name} / plain SGD": mine[OURS] for name, mine in ratios.items()},
        raw={"seconds": times, "megabytes": memory, "deployed": durable},
        panels=[
            Panel(
                "One step",
                "model",
                "steps of plain SGD",
                {
                    step: {name: mine[step] for name, mine in ratios.items()}
                    for step in STEPS[1:]
                },
                kind="bars",
            )
        ],
    )


def _time_figures(times: Measured) -> dict[str, Measurement]:
    figures = {}
    for name, mine in times.items():
        if name in ("logistic", "CNN", "MLP"):
            figures[f"{name}: ours / plain SGD"] = Measurement(mine[OURS] / mine[PLAIN])
        best = min(OPACUS, key=lambda step: mine[step])
        ratio = mine[best] / mine[OURS]
        figures[f"{name}: Opacus / ours"] = Measurement(ratio, f"best: {best}")
        drawn = (mine["batch"] + mine["noise"]) / mine[SECURE]
        figures[f"{name}: drawing"] = Measurement(drawn)
    return figures


def _other_figures(memory: Measured, durable: Measured) -> dict[str, Measurement]:
    ours, plain = memory[OURS], memory[PLAIN]
    allowed = 1.5 * plain["peak"] + plain["model"]
    # Small models pay for the ledger's disk.
    name, mine = list(durable.items())[-1]
    return {
        f"{LARGE}: memory": Measurement(
            ours["peak"] / allowed, f"{ours['peak']:.0f} MB"
        ),
        "deployed step / bare step": Measurement(mine["deployed"] / mine["bare"], name),
        "deployed step: memory": Measurement(mine["peak"] / mine["model"], name),
    }


def _time_table(times: Measured, ratios: Measured) -> ResultTable:
    rows: list[TableRow] = [
        (
            *(f"{name}, b = {TASKS[name].batch_size}", 1e3 * mine[PLAIN]),
            *ratios[name].values(),
            *(mine[drawn] / mine[SECURE] for drawn in ("batch", "noise")),
        )
        for name, mine in times.items()
    ]
    return ResultTable(
        "One step, in steps of plain SGD",
        ("model", "SGD ms", "ours", "secure", "Opacus", "ghost", "batch", "noise"),
        rows,
        "ours: with the simulation's noise; secure: ours with a deployment's; Opacus: "
        "per example; ghost: Opacus' ghost clipping. batch, noise: their shares of a "
        "secure step. One thread, the processor's time.",
    )


def _memory_table(memory: Measured) -> ResultTable:
    rows: list[TableRow] = [
        (step, mine["peak"], mine["peak"] / mine["model"])
        for step, mine in memory.items()
    ]
    return ResultTable(
        f"Memory of one step of the {LARGE}", ("step", "MB", "models"), rows
    )


def _durable_table(durable: Measured) -> ResultTable:
    rows: list[TableRow] = [
        (
            *(name, 1e3 * mine["bare"], mine["deployed"] / mine["bare"]),
            mine["peak"] / mine["model"],
        )
        for name, mine in durable.items()
    ]
    return ResultTable(
        "A deployed step, with its ledger and its momentum on disk",
        ("model", "bare ms", "/ bare", "memory, models"),
        rows,
        "bare: the same step with neither. One thread, the processor's time; memory: "
        "the peak beyond model and data.",
    )


if __name__ == "__main__":
    raise SystemExit(run_benchmark("client_step"))
