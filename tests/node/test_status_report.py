"""The terminal of a node says what was served, and what is left of its budget."""

import threading
import time
from pathlib import Path

import pytest

from flwr_safedshb.algorithm.budget import LEDGER_NAME
from flwr_safedshb.node.service import StatusReporter, describe_budget
from flwr_safedshb.privacy.ledger.ledger import Ledger
from flwr_safedshb.privacy.plan import PrivacyPlan


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    path = tmp_path / LEDGER_NAME
    with Ledger(path, max_epsilon=4.0, delta=1e-5) as ledger:
        for _ in range(3):
            ledger.charge(PrivacyPlan(1.0, 1.0, 25, 600))
    return path


def test_a_budget_is_said_in_words(ledger: Path) -> None:
    with Ledger(ledger) as opened:
        spent = opened.epsilon()
    assert describe_budget(ledger) == (
        f"3 steps charged: epsilon = {spent:.4g} of 4 spent at delta = 1e-05, "
        f"{4 - spent:.4g} left"
    )


def test_it_is_said_once_a_minute_if_there_is_news(
    ledger: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    reporter = StatusReporter(ledger.parent)
    caplog.clear()
    said: list[str] = []
    for seconds, served in ((1, 1), (60, 2), (61, 2), (61, 3)):
        now[0] += seconds
        reporter.report(served, "round 3 (train) of run 7")
        for thread in threading.enumerate():
            if thread.name.endswith("(_report)"):
                thread.join(60)
        said.append(caplog.text)
        caplog.clear()
    assert [bool(words) for words in said] == [False, True, False, True]
    assert "2 messages answered, the last in round 3 (train) of run 7" in said[1]
    assert "3 steps charged: epsilon = " in said[1]


def test_a_damaged_ledger_is_said_to_be(
    ledger: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ledger.write_bytes(b"no ledger")
    StatusReporter(ledger.parent)._report(1, "round 1")
    assert "The ledger cannot be read" in caplog.text
