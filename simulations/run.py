"""Run one experiment: ``python -m simulations.run engine=ray aggregation=filter``."""

from __future__ import annotations

import logging
from pathlib import Path

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from simulations.engines import run


@hydra.main(config_path="../conf", config_name="config", version_base=None)
def main(cfg: DictConfig) -> None:
    """Run on the engine of the config; the model is left in the run's folder."""
    settings = HydraConfig.get()
    logging.getLogger("flwr").setLevel(cfg.log_level)
    # The engines compose the config themselves, and Hydra has one at a time.
    GlobalHydra.instance().clear()
    path = Path(cfg.checkpoint or Path(settings.runtime.output_dir) / "model.npz")
    progress = run(list(settings.overrides.task), path)
    last = max(progress.evaluate_serverapp)
    metrics = progress.evaluate_serverapp[last]
    print(
        f"round {last}: loss {metrics['loss']:.4f}, accuracy {metrics['accuracy']:.4f}"
    )
    print(f"model: {path}")


if __name__ == "__main__":
    main()
