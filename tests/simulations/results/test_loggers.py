"""A run's figures as other tools read them."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from simulations.check import check
from simulations.config import SettingsError, resolved
from simulations.engines import run
from simulations.results import loggers
from simulations.results import record as results
from simulations.results.loggers import CSV, TensorBoard, rows
from simulations.results.record import RunRecord

OVERRIDES = ["steps=4", "evaluate_every=2", "data.num_examples=800"]


@pytest.fixture(scope="module")
def record() -> RunRecord:
    chosen = [*OVERRIDES, "attack=non-finite"]
    return results.record(chosen, run(chosen), 1.0)


def test_rows_are_the_record_by_step(record: RunRecord) -> None:
    table = dict(rows(record))
    assert list(table) == [0, 1, 2, 3, 4]
    assert {frozenset(row) for row in table.values()} == {frozenset(table[0])}
    found = [row["evaluation/accuracy"] for row in table.values()]
    accuracy = record["evaluations"]["accuracy"]
    assert found == [accuracy[0], None, accuracy[1], None, accuracy[2]]
    assert [row["round/excluded-not-finite"] for row in table.values()] == [
        None,
        *[3] * 4,
    ]
    assert [table[i]["round/replies"] for i in range(5)] == [None, 4, 4, 4, 4]
    assert table[3]["round/lambda-max"] == record["rounds"]["lambda_max"][2]


def test_csv_has_a_row_for_each_step(record: RunRecord, tmp_path: Path) -> None:
    path = CSV()(record, tmp_path / "model.npz")
    assert path == tmp_path / "model.csv"
    with path.open(newline="") as file:
        read = list(csv.DictReader(file))
    for (step, row), line in zip(rows(record), read, strict=True):
        assert int(line.pop("step")) == step
        assert {k: float(v) if v else None for k, v in line.items()} == row


def test_tensorboard_reads_the_events(record: RunRecord, tmp_path: Path) -> None:
    folder = TensorBoard()(record, tmp_path / "model.npz")
    events = EventAccumulator(str(folder))
    events.Reload()
    found = events.Scalars("evaluation/accuracy")
    assert [event.step for event in found] == [0, 2, 4]
    assert [event.value for event in found] == pytest.approx(
        record["evaluations"]["accuracy"]
    )
    assert [event.step for event in events.Scalars("round/kappa")] == [1, 2, 3, 4]
    assert "privacy/text_summary" in events.Tags()["tensors"]


def test_without_tensorboard_the_remedy_is_named_before_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loggers, "find_spec", lambda name: None)
    with pytest.raises(SettingsError, match=r"install flwr-safedshb\[tensorboard\]"):
        check("logger=tensorboard")


def test_an_earlier_log_is_replaced_and_others_stay(
    record: RunRecord, tmp_path: Path
) -> None:
    other = TensorBoard()(record, tmp_path / "other.npz")
    for _ in range(2):
        folder = TensorBoard()(record, tmp_path / "model.npz")
        assert len(list(folder.iterdir())) == 1
    assert other.is_dir()


@pytest.mark.process
def test_the_config_chooses(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "simulations.run", *OVERRIDES, "logger=csv"]
    ran = subprocess.run(
        [*command, f"hydra.run.dir={tmp_path}"],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"log: {tmp_path / 'model.csv'}" in ran.stdout
    assert len((tmp_path / "model.csv").read_text().splitlines()) == 6


def test_where_it_logs_is_no_part_of_what_a_run_is() -> None:
    assert resolved("logger=csv") == resolved("")
