"""A SuperLink and SuperNodes on this machine's loopback, from start to stop."""

from simulations.deployment.credentials import Credentials
from simulations.deployment.federation import Deployment
from simulations.deployment.processes import OFFLINE, ROOT, free_port, toml

__all__ = ["OFFLINE", "ROOT", "Credentials", "Deployment", "free_port", "toml"]
