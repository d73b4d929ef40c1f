"""Flower is patched only where it is known, and it is said loudly where it is not."""

from collections.abc import Iterator
from logging import WARNING
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.superlink.grid import HttpGrid
from flwr.supernode import fleet_http_connection
from flwr.supernode import start_client_internal as main_loop
from flwr.supernode.servicer.runtime import runtime_handlers

from flwr_safedshb.flower import patch_grid, patching
from flwr_safedshb.flower.patching import Expectation, Patch
from flwr_safedshb.node.flower_patches import runtime_client, supernode

PATCHES = [patch_grid.PATCH, supernode.PATCH, runtime_client.PATCH]


@pytest.fixture(autouse=True)
def nothing_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patching, "_warned", set())


def by_target(patch: Patch) -> str:
    return patch.target


@pytest.mark.parametrize("patch", PATCHES, ids=by_target)
def test_the_installed_flower_is_patched_without_a_word(
    patch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    assert patch.fits()
    assert not caplog.records


@pytest.mark.parametrize("patch", PATCHES, ids=by_target)
@pytest.mark.parametrize("version", ["1.40.2", "1.99.0", "2.0.0", "1.4.1"])
def test_another_minor_version_is_not_patched_and_one_warning_says_what_is_lost(
    patch: Patch,
    version: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(patching, "VERSION", version)
    assert not patch.fits()
    assert not patch.fits()
    (record,) = caplog.records
    assert record.levelno == WARNING
    words = record.getMessage()
    for part in (f"flwr {version}", patch.target, patch.lost, *patching.TRIED):
        assert part in words


@pytest.mark.parametrize("minor", patching.TRIED)
def test_every_patch_release_of_a_minor_version_that_was_tried_is_patched(
    minor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patching, "VERSION", f"{minor}.7")
    assert patch_grid.PATCH.fits()


def test_a_check_that_raises_is_a_reason_not_to_patch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def expectations() -> Iterator[Expectation]:
        yield "the moon is round", True
        yield "the moon is cheese", False
        raise AttributeError("no moon")

    assert not Patch("moon", "light", "a lamp", expectations).fits()
    words = caplog.text
    assert "the moon is cheese; AttributeError: no moon" in words
    assert "round" not in words


def other(*_: object) -> None:
    """Stand for a function of Flower that works in another way."""


@pytest.mark.parametrize(
    ("patch", "owner", "name"),
    [
        (patch_grid.PATCH, HttpGrid, "_try_push_messages"),
        (patch_grid.PATCH, HttpGrid, "pull_messages"),
        (patch_grid.PATCH, HttpGrid, "_runtime_client"),
        (supernode.PATCH, main_loop, "_push_messages"),
        (supernode.PATCH, main_loop, "start_client_internal"),
        (supernode.PATCH, fleet_http_connection, "http_request_response"),
        (supernode.PATCH, runtime_handlers, "push_messages"),
        (runtime_client.PATCH, runtime_client, "pull_task_input"),
        (runtime_client.PATCH, runtime_client, "push_message"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_code_that_is_not_as_expected_is_not_patched(
    patch: Patch,
    owner: object,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(owner, name, other)
    assert not patch.fits()
    assert len(caplog.records) == 1


def test_a_supernode_of_another_version_runs_unchanged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(patching, "VERSION", "1.99.0")
    before = [main_loop._push_messages, runtime_handlers.push_messages]
    limits = supernode.default_limits().keepalive_expiry
    supernode.patch_supernode()
    assert [main_loop._push_messages, runtime_handlers.push_messages] == before
    assert supernode.default_limits().keepalive_expiry == limits
    assert "SuperNode" in caplog.text


def test_a_grid_of_another_version_is_used_unchanged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(patching, "VERSION", "1.99.0")
    grid = HttpGrid(token="x")
    patch_grid.patch_grid(grid)
    assert "_try_push_messages" not in vars(grid)
    assert "HttpGrid" in caplog.text


def test_a_grid_is_patched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    client: Any = SimpleNamespace(
        **dict.fromkeys(
            ("PullMessages", "PullObject", "ConfirmMessageReceived", "PushMessages")
        )
    )
    grid = HttpGrid(token="x")
    grid._client = client
    patch_grid.patch_grid(grid)
    first = vars(grid)["_try_push_messages"]
    patch_grid.patch_grid(grid)
    assert vars(grid)["_try_push_messages"] is first
