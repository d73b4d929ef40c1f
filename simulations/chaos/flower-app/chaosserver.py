"""What Flower loads beside the SuperLink."""

from simulations.chaos.server import server

__all__ = ["server"]
