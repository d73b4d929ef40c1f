"""A node says what was served, and what is left of its budget."""

import threading
import time
from pathlib import Path

import pytest

from flwr_safedshb.algorithm.budget import LEDGER_NAME
from flwr_safedshb.node.metrics import METRICS_PATH
from flwr_safedshb.node.node_status import BudgetStatus, NodeStatus
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
    assert str(BudgetStatus.read(ledger)) == (
        f"3 steps charged: epsilon = {spent:.4g} of 4 spent at delta = 1e-05 "
        f"for one example, {4 - spent:.4g} left"
    )


def wait_for_reports() -> None:
    for thread in threading.enumerate():
        if thread.name.endswith("(_report)"):
            thread.join(60)


def test_it_is_said_once_a_minute_if_there_is_news(
    ledger: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    status = NodeStatus(ledger.parent)
    caplog.clear()
    said: list[str] = []
    for seconds, answers in ((1, 1), (60, 1), (61, 0), (61, 1)):
        now[0] += seconds
        for _ in range(answers):
            status.note_answer("round 3 (train) of run 7")
        status.report()
        wait_for_reports()
        said.append(caplog.text)
        caplog.clear()
    assert [bool(words) for words in said] == [False, True, False, True]
    assert "2 messages answered, the last in round 3 (train) of run 7" in said[1]
    assert "3 steps charged: epsilon = " in said[1]


def test_a_damaged_ledger_is_said_to_be(
    ledger: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ledger.write_bytes(b"no ledger")
    status = NodeStatus(ledger.parent)
    status._report()
    assert "The ledger cannot be read" in caplog.text
    assert "The ledger cannot be read" in status.make_pages()["/"]()[1].decode()


def test_the_owner_sees_the_budget_on_a_page_and_in_metrics(ledger: Path) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    status = NodeStatus(ledger.parent)
    status.note_answer("round <b>1 of run 7")
    pages = status.make_pages()
    text = pages["/"]()[1].decode()
    assert "1 messages answered, the last: round &lt;b&gt;1 of run 7" in text
    assert "3 steps charged: epsilon = " in text
    found = {
        sample.name: sample.value
        for family in text_string_to_metric_families(pages[METRICS_PATH]()[1].decode())
        for sample in family.samples
    }
    assert found["safedshb_node_messages_total"] == 1.0
    assert found["safedshb_node_steps_total"] == 3.0
    spent, left = (found[f"safedshb_node_epsilon_{n}"] for n in ("spent", "left"))
    assert 0.0 < spent < 4.0
    assert spent + left == pytest.approx(4.0)
    assert found["safedshb_node_ledger_readable"] == 1.0
