"""What Flower loads on a node."""

from simulations.benchmarks.federated import client

__all__ = ["client"]
