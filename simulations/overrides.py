"""What a run may change in the configuration that a node composes for it.

The overrides of a run come with a message, and Hydra's can do much: name any Python
callable as a ``_target_``, read the environment of the node, add and remove keys. A run
may choose among the files of the installed groups and set values that are there, to
plain ones; everything else is refused before anything is composed.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException

_PACKAGE = Path(__file__).resolve().parent
# In an installed wheel the configuration is part of the package.
CONF = next(
    folder
    for folder in (_PACKAGE / "conf", _PACKAGE.parent / "conf")
    if folder.exists()
)


@lru_cache(maxsize=8)
def check_plain(overrides: str) -> str:
    """Return overrides that a run asks for, or refuse them.

    Examples
    --------
    >>> plain("aggregation=filter privacy.plan.batch_size=10")
    'aggregation=filter privacy.plan.batch_size=10'
    """
    parser = OverridesParser.create()
    for text in shlex.split(overrides):
        try:
            reason = _wrong(parser.parse_override(text))
        except HydraException:
            reason = "cannot be read"
        if reason:
            raise ValueError(
                f"the override {text!r} of the run {reason}; a run may say group=file "
                "and key=value, for installed files, keys that are there, plain values"
            )
    return overrides


def _wrong(override: Override) -> str | None:
    key, value = override.key_or_group, override.value()
    names = key.replace("/", ".").split(".")
    if override.type is not OverrideType.CHANGE or override.package is not None:
        return "adds, removes or moves a key"
    if names[0] == "hydra" or any(name.startswith("_") for name in names):
        return "names a key that is not a run's to set"
    if override.is_sweep_override():
        return "has several values"
    if not _is_plain(value):
        return "has a value that is not plain"
    if (CONF / key).is_dir():
        files = sorted(path.stem for path in (CONF / key).glob("*.yaml"))
        if value is not None and value not in files:
            return f"names no installed file; there are {', '.join(files)}"
    return None


def _is_plain(value: object) -> bool:
    if isinstance(value, list):
        return all(map(_is_plain, value))
    if isinstance(value, str):
        return "${" not in value
    return value is None or isinstance(value, bool | int | float)


def list_items(config: object, prefix: str) -> Iterator[tuple[str, object]]:
    """Yield every setting of a configuration, also those of its parts, by name."""
    if isinstance(config, dict):
        for key, value in config.items():
            yield f"{prefix}{key}", value
            yield from list_items(value, f"{prefix}{key}.")
    elif isinstance(config, list):
        for index, value in enumerate(config):
            yield f"{prefix}{index}", value
            yield from list_items(value, f"{prefix}{index}.")
