"""What Flower loads beside the SuperLink."""

from simulations.chaos.app import server

__all__ = ["server"]
