"""One experiment on any engine: in this process, on Ray, or as a deployment."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

from flwr.app import ConfigRecordValues
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from flwr_safedshb.algorithm.checkpoint import load
from flwr_safedshb.algorithm.progress import Progress
from flwr_safedshb.algorithm.run_identity import describe_differences, to_json
from flwr_safedshb.simulation.batched import BatchedGrid
from flwr_safedshb.simulation.in_process import InProcessGrid
from simulations.app import OVERRIDES, make_client_app, make_server_app
from simulations.check import check
from simulations.config import (
    SettingsError,
    compose_config,
    explain_errors,
    format_override,
)
from simulations.experiment import describe_identity
from simulations.loopback import Deployment

Settings = dict[str, ConfigRecordValues]


def run(overrides: Sequence[str], checkpoint: str | Path | None = None) -> Progress:
    """Run the experiment that Hydra overrides describe, on the engine they name.

    Parameters
    ----------
    overrides : sequence of str
        Such as ``["engine=ray", "steps=10"]``.
    checkpoint : str or Path, optional
        Where the server leaves its model. If the same experiment was run to its end
        there, that is the answer.

    Returns
    -------
    Progress
        The final model, and the metrics of all rounds.

    Raises
    ------
    SettingsError
        Before anything starts: if the overrides make no run, or if `checkpoint` is of
        another experiment.
    """
    with tempfile.TemporaryDirectory(prefix="safedshb-") as scratch:
        path = Path(checkpoint or Path(scratch) / "run.npz").absolute()
        text = shlex.join([*overrides, format_override("checkpoint", path)])
        progress = check_run(text, path)
        if progress is not None and progress.step == progress.num_rounds:
            return progress
        # The momentums of its nodes are gone: from here it would be another run.
        path.unlink(missing_ok=True)
        engine = compose_config(text).engine.name
        ENGINES[engine](text)
        progress = load(path)
    if progress is None:
        raise RuntimeError(f"the run on engine={engine} ended without a model")
    return progress


def check_run(overrides: str, path: Path) -> Progress | None:
    """Refuse what cannot run; return what the experiment has left at a path before.

    Raises
    ------
    SettingsError
        Also if what is there is of another experiment.
    """
    check(overrides)
    folder = compose_config(overrides).engine.get("folder")
    if folder is not None and (Path(folder) / "flwr").exists():
        raise SettingsError(f"engine.folder={folder} holds another deployment")
    with explain_errors():
        found = load(path)
    if found is None:
        return None
    then = cast(dict[str, object], found.settings.get("run_settings", {}))
    now = cast(dict[str, object], to_json(describe_identity(overrides)))
    if problem := describe_differences(then, now):
        raise SettingsError(
            f"{path} is of another run: {problem}; use another folder, or remove it"
        )
    return found


def run_in_process(
    overrides: str, grid_type: type[InProcessGrid] = InProcessGrid
) -> None:
    """Run in this process."""
    cfg = compose_config(overrides)
    grid = grid_type(make_client_app(overrides), cfg.num_nodes, seed=cfg.seed)
    make_server_app(overrides)(grid, grid.server_context())


def run_batched(overrides: str) -> None:
    """Run in this process, all clients of a round as one batch."""
    run_in_process(overrides, BatchedGrid)


def run_on_ray(overrides: str) -> None:
    """Run on Flower's simulation engine."""
    cfg = compose_config(overrides)
    server, client = make_server_app(overrides), make_client_app(overrides)
    simulate(server, client, cfg.num_nodes, cfg.engine.client_cpus)


def simulate(
    server: ServerApp, client: ClientApp, num_nodes: int, client_cpus: int
) -> None:
    """Run two apps on Flower's simulation engine, on this machine alone."""
    from flwr.simulation import run_simulation

    resources: Settings = {"num_cpus": client_cpus, "num_gpus": 0.0}
    # "local", or Ray joins whatever cluster this machine has, and waits for a dead one.
    local: Settings = {
        "address": "local",
        "include_dashboard": False,
        "_node_ip_address": "127.0.0.1",
    }
    run_simulation(
        server,
        client,
        num_nodes,
        backend_config={"client_resources": resources, "init_args": local},
    )


def run_deployment(overrides: str) -> None:
    """Run on a SuperLink and SuperNodes that are started and stopped here."""
    cfg = compose_config(overrides)
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
    "inprocess": run_in_process,
    "batched": run_batched,
    "ray": run_on_ray,
    "deployment": run_deployment,
}
