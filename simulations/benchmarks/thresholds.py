"""All benchmarks: what each measures, and the thresholds that its figures must keep.

A figure is a ratio to a peer or to a lower bound that was measured in the same run, so
that a slow machine slows both. Nothing is asserted: a busy machine may miss a threshold
that a quiet one meets.
"""

from __future__ import annotations

from dataclasses import dataclass

from simulations.benchmarks.families import FAMILIES

STEP_MODELS = ("logistic", "CNN", "MLP", "transformer", "ResNet-18")


@dataclass(frozen=True)
class Threshold:
    """A bound on one figure of a benchmark; `sign` is ``<=`` or ``>=``."""

    figure: str
    sign: str
    bound: float
    unit: str = ""

    def __str__(self) -> str:
        return f"{self.sign} {self.bound:,g} {self.unit}".strip()

    def holds(self, value: float) -> bool:
        """Return whether a value keeps the bound; NaN does not."""
        return value <= self.bound if self.sign == "<=" else value >= self.bound


@dataclass(frozen=True)
class Benchmark:
    """A module of this package: its title, and its thresholds."""

    title: str
    thresholds: tuple[Threshold, ...]


BENCHMARKS = {
    "aggregation": Benchmark(
        "Aggregation",
        (
            Threshold("(20, 6), d = 69: ByzFL / SMEA", ">=", 300),
            Threshold("(20, 6), d = 100,000: ByzFL / SMEA", ">=", 10_000),
            Threshold("(20, 6), d = 4,096: ByzPy / SMEA", ">=", 50),
            Threshold("n <= 30, d = 100,000: SMEA / Gram", "<=", 3),
            *(
                Threshold(f"(50, 10), d = {d}, {family}: SMEA / eigvalsh", "<=", 5000)
                for d in ("69", "100,000")
                for family in FAMILIES
            ),
            Threshold("(50, 10): answers that are exact", ">=", 1, "of them"),
            Threshold("(100, 10) in 10 s: certified answers", ">=", 1, "of them"),
            Threshold("same subset as brute force", ">=", 1, "of the answers"),
            Threshold("Filter, n = 1,000, d = 100,000: / Gram", "<=", 3),
            Threshold("extra memory, n = 50, d = 10,000,000", "<=", 1.5, "models"),
            Threshold("hostile inputs: certified answers", ">=", 1, "of them"),
            # Theory's exponents, and 0.35 more: points are few, and caches have sizes.
            Threshold("Gram matrix: exponent of n", "<=", 2.35),
            Threshold("Gram matrix: exponent of d", "<=", 1.35),
            Threshold("Filter after it: exponent of n", "<=", 3.35),
            Threshold("SMEA's nodes", "<=", 1, "of the subsets"),
            Threshold("n up to 1,000: longest call", "<=", 2, "calls at (100, 10)"),
            Threshold("n up to 1,000: true certificates", ">=", 1, "of them"),
            # A certificate must not get looser with n, as if the search were left out.
            Threshold("n up to 1,000: answer over its bound", "<=", 1.2, "of before"),
        ),
    ),
    "client_step": Benchmark(
        "Client step",
        (
            Threshold("logistic: ours / plain SGD", "<=", 2.4),
            Threshold("CNN: ours / plain SGD", "<=", 2.2),
            Threshold("MLP: ours / plain SGD", "<=", 2.4),
            *(Threshold(f"{model}: Opacus / ours", ">=", 1) for model in STEP_MODELS),
            *(
                Threshold(f"{model}: drawing", "<=", 0.5, "of a secure step")
                for model in STEP_MODELS
            ),
            Threshold("MLP: memory", "<=", 1, "of 1.5 plain steps and a model"),
            Threshold("deployed step / bare step", "<=", 1.5),
            Threshold("deployed step: memory", "<=", 5, "models"),
            Threshold("momentum found after kill -9", ">=", 1, "of them"),
        ),
    ),
    "owners": Benchmark(
        "Persons as the unit",
        tuple(
            Threshold(f"{model}: by person / by example", "<=", 1.3)
            for model in STEP_MODELS
        ),
    ),
    "startup": Benchmark(
        "Start-up", (Threshold("client ready", "<=", 1.5, "imports of torch"),)
    ),
    "engine": Benchmark(
        "Engines",
        (
            Threshold("overhead of the grid", "<=", 0.2, "ms a client"),
            Threshold("Ray, 1 CPU a client / in process", ">=", 20),
            Threshold("Ray, 1 CPU a client / batched", ">=", 50),
            Threshold("Ray, 2 CPUs a client / in process", ">=", 20),
            Threshold("Ray, 2 CPUs a client / batched", ">=", 50),
        ),
    ),
    "end_to_end": Benchmark(
        "End to end",
        (
            Threshold("ByzFL / batched, with privacy", ">=", 3),
            Threshold("growth of a round: exponent of n", "<=", 1),
            Threshold("growth of memory", "<=", 8, "kB a round"),
        ),
    ),
    "deployment": Benchmark(
        "Deployment",
        (
            Threshold("Flower's round / ours, 4 nodes, d = 69", ">=", 8),
            Threshold("processor time of a message", "<=", 0.3, "s"),
        ),
    ),
}
