"""What Flower loads on a node."""

from simulations.chaos.client import client

__all__ = ["client"]
