"""Build an app's bundle (FAB) as Flower does."""

from __future__ import annotations

from pathlib import Path

from flwr.cli.build import build_fab_from_disk


def build_bundle(folder: Path) -> bytes:
    """Return the bundle of an app, byte for byte what `flwr run` sends.

    Raises
    ------
    ValueError
        If the folder has no Flower app.
    """
    import click

    try:
        return build_fab_from_disk(folder)
    except (click.ClickException, OSError, ValueError) as error:
        raise ValueError(f"{folder} is no Flower app: {error}") from error
