"""One experiment on any engine: in this process, on Ray, or as a deployment."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from flwr.app import ConfigRecordValues
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from flwr_safedshb.grids.batched import BatchedGrid
from flwr_safedshb.grids.in_process import InProcessGrid
from flwr_safedshb.server.checkpoint import Progress, load
from simulations.app import OVERRIDES, composed, make_client_app, make_server_app
from simulations.loopback import Deployment

Settings = dict[str, ConfigRecordValues]


def run(overrides: Sequence[str], checkpoint: str | Path | None = None) -> Progress:
    """Run the experiment that Hydra overrides describe, on the engine they name.

    Parameters
    ----------
    overrides : sequence of str
        Such as ``["engine=ray", "steps=10"]``.
    checkpoint : str or Path, optional
        Where the server leaves its model, and resumes from.

    Returns
    -------
    Progress
        The final model, and the metrics of all rounds.
    """
    with tempfile.TemporaryDirectory(prefix="safedshb-") as scratch:
        path = Path(checkpoint or Path(scratch) / "run.npz").absolute()
        text = shlex.join([*overrides, f"checkpoint={path}"])
        engine = composed(text).engine.name
        ENGINES[engine](text)
        progress = load(path)
    if progress is None:
        raise RuntimeError(f"the run on engine={engine} ended without a model")
    return progress


def in_process(overrides: str, grid_type: type[InProcessGrid] = InProcessGrid) -> None:
    """Run in this process."""
    cfg = composed(overrides)
    grid = grid_type(make_client_app(overrides), cfg.num_nodes, seed=cfg.seed)
    make_server_app(overrides)(grid, grid.server_context())


def batched(overrides: str) -> None:
    """Run in this process, all clients of a round as one batch."""
    in_process(overrides, BatchedGrid)


def ray(overrides: str) -> None:
    """Run on Flower's simulation engine."""
    cfg = composed(overrides)
    server, client = make_server_app(overrides), make_client_app(overrides)
    simulate(server, client, cfg.num_nodes, cfg.engine.client_cpus)


def simulate(
    server: ServerApp, client: ClientApp, num_nodes: int, client_cpus: int
) -> None:
    """Run two apps on Flower's simulation engine, on this machine alone."""
    from flwr.simulation import run_simulation

    resources: Settings = {"num_cpus": client_cpus, "num_gpus": 0.0}
    local: Settings = {"include_dashboard": False, "_node_ip_address": "127.0.0.1"}
    run_simulation(
        server,
        client,
        num_nodes,
        backend_config={"client_resources": resources, "init_args": local},
    )


def deployment(overrides: str) -> None:
    """Run on a SuperLink and SuperNodes that are started and stopped here."""
    cfg = composed(overrides)
    with tempfile.TemporaryDirectory(prefix="safedshb-") as scratch:
        folder = Path(cfg.engine.folder or scratch).absolute()
        config: dict[str, bool | float | int | str] = {
            "max-epsilon": cfg.engine.max_epsilon,
            "delta": cfg.privacy.delta,
            "require-secure-noise": True,
        }
        with Deployment(folder, cfg.num_nodes, config) as nodes:
            nodes.run({OVERRIDES: overrides}, cfg.engine.run_timeout)


ENGINES: dict[str, Callable[[str], None]] = {
    "inprocess": in_process,
    "batched": batched,
    "ray": ray,
    "deployment": deployment,
}
