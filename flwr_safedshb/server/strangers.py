"""Whether the nodes of a run are those that they are taken for.

That at most f nodes are adversarial says nothing where anybody may join: one machine
can be any number of nodes.
"""

from __future__ import annotations

from logging import WARNING

from flwr.serverapp import Grid
from flwr.supercore import log

from flwr_safedshb.flower.grid import WrappedGrid

_REMEDY = "start it with TLS and --enable-supernode-auth, and register the nodes' keys"


def warn_of_strangers(grid: Grid, f: int, authenticated: bool) -> None:
    """Warn, once and loudly, if strangers may be among the nodes.

    A strategy sees one half of it: authentication needs TLS, so a SuperLink without TLS
    has none. For the other half there is only the user's word. Simulated nodes are no
    strangers.

    Parameters
    ----------
    grid : Grid
        What the run's messages go through.
    f : int
        The bound on the adversaries, above 0.
    authenticated : bool
        The user's word that the SuperLink admits registered nodes only.
    """
    while isinstance(grid, WrappedGrid):
        grid = grid.grid
    # By name: to import Flower's class costs half a second, and where it is in use it
    # has been imported.
    if all(kind.__name__ != "HttpGrid" for kind in type(grid).__mro__):
        return
    if getattr(grid, "_insecure", False):
        log(
            WARNING,
            "ANYONE CAN JOIN: the SuperLink has no TLS and so no authentication, one "
            "machine can be any number of nodes, and num_malicious_nodes=%d means "
            "nothing; %s",
            f,
            _REMEDY,
        )
    elif not authenticated:
        log(
            WARNING,
            "CAN ANYONE JOIN? A strategy cannot see it, and num_malicious_nodes=%d "
            "means nothing if the SuperLink admits nodes without registered keys: %s, "
            "then say so with authenticated_nodes=True",
            f,
            _REMEDY,
        )
