import pytest

from flwr_safedshb.node.gate import http


@pytest.fixture(autouse=True)
def short_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait shorter for clients that were answered and stay: the loopback is quick."""
    monkeypatch.setattr(http, "_DRAIN_SECONDS", 0.05)
