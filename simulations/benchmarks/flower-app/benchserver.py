"""What Flower loads beside the SuperLink."""

from simulations.benchmarks.federated import server

__all__ = ["server"]
