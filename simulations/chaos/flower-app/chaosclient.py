"""What Flower loads on a node."""

from simulations.chaos.app import client

__all__ = ["client"]
