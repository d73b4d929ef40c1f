import pytest

from flwr_safedshb.node.gate import wire


@pytest.fixture(autouse=True)
def soon_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait shorter for those who were answered and stay: the loopback is quick."""
    monkeypatch.setattr(wire, "_LINGER_SECONDS", 0.05)
