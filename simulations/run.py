"""Run one experiment: ``python -m simulations.run engine=ray aggregation=filter``.

An experiment with a ``study`` of its own, such as ``experiment=trilemma``, runs that
instead of a federation: a callable that leaves what it finds in a folder.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig
from rich.console import Console

from simulations.engines import run
from simulations.results import record
from simulations.results.report import run_page


@hydra.main(config_path="../conf", config_name="config", version_base=None)
def main(cfg: DictConfig) -> None:
    """Run on the engine of the config; leave model, results and report together."""
    settings = HydraConfig.get()
    logging.getLogger("flwr").setLevel(cfg.log_level)
    # The engines compose the config themselves, and Hydra has one at a time.
    GlobalHydra.instance().clear()
    if "study" in cfg:
        instantiate(cfg.study)(Path(settings.runtime.output_dir))
        return
    path = Path(cfg.checkpoint or Path(settings.runtime.output_dir) / "model.npz")
    overrides = list(settings.overrides.task)
    start = time.perf_counter()
    with Console(stderr=True).status(f"{cfg.steps} steps, engine={cfg.engine.name}"):
        progress = run(overrides, path)
    found = record.record(overrides, progress, time.perf_counter() - start)
    record.write(path.with_suffix(".json"), found)
    path.with_suffix(".html").write_text(run_page(found))
    if "_target_" in cfg.logger:
        print(f"log: {instantiate(cfg.logger)(found, path)}")
    last = max(progress.evaluate_serverapp)
    metrics = progress.evaluate_serverapp[last]
    print(
        f"round {last}: loss {metrics['loss']:.4f}, accuracy {metrics['accuracy']:.4f}"
    )
    print(found["privacy"]["statement"])
    print(found["privacy"]["note"])
    print(f"model: {path}; results and report beside it: .json, .html")


if __name__ == "__main__":
    main()
