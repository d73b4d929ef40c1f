"""A SuperLink and SuperNodes on this machine's loopback, from start to stop."""

from simulations.loopback.credentials import Credentials
from simulations.loopback.federation import Deployment
from simulations.loopback.processes import OFFLINE, ROOT, free_port, toml

__all__ = ["OFFLINE", "ROOT", "Credentials", "Deployment", "free_port", "toml"]
