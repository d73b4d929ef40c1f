"""What the files under conf/ make."""

from pathlib import Path

from hydra.utils import instantiate
from omegaconf import OmegaConf

CONF = Path(__file__).parents[1] / "conf"


def configured(group: str) -> list[object]:
    """Return what each file of a group makes, if it names a class."""
    configs = [OmegaConf.load(path) for path in sorted((CONF / group).glob("*.yaml"))]
    return [instantiate(config) for config in configs if "_target_" in config]
