"""A run's figures as other tools read them."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from simulations.check import check
from simulations.config import SettingsError, resolve_config
from simulations.engines import run
from simulations.results import loggers
from simulations.results import record as results
from simulations.results.loggers import CSV, TensorBoard, rows
from simulations.results.schema import RunRecord

pytestmark = pytest.mark.federation

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
    assert table[3]["round/lambda-max"] == record["rounds"]["metrics"]["lambda-max"][2]


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


class Service:
    """Weights & Biases and MLflow, as far as a run speaks to them."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, float]] = {}
        self.about: dict[str, str] = {}
        self.id = "7"
        self.info = self
        self.run_id = "7"

    def init(self, project: str, config: dict[str, str]) -> "Service":
        self.about = config
        return self

    def start_run(self) -> "Service":
        return self

    def set_experiment(self, name: str) -> None:
        assert name == "safedshb"

    def log_params(self, about: dict[str, str]) -> None:
        self.about = about

    def log(self, row: dict[str, float], step: int) -> None:
        self.rows[step] = row

    log_metrics = log

    def __enter__(self) -> "Service":
        return self

    def __exit__(self, *error: object) -> None:
        pass


@pytest.mark.parametrize("kind", [loggers.WandB, loggers.MLflow])
def test_services_get_the_whole_run(
    kind: type[loggers.WandB] | type[loggers.MLflow],
    record: RunRecord,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    service = Service()
    monkeypatch.setattr(loggers, "find_spec", lambda name: name)
    monkeypatch.setattr(loggers, "import_module", lambda name: service)
    assert kind()(record, tmp_path / "model.npz") == "safedshb/7"
    assert list(service.rows) == [0, 1, 2, 3, 4]
    assert service.rows[4]["round/replies"] == record["rounds"]["replies"][3]
    assert "epsilon" in service.about["privacy"]


def test_a_service_that_fails_costs_the_log_and_not_the_run(
    record: RunRecord, tmp_path: Path
) -> None:
    def away(run: RunRecord, model: Path) -> str:
        raise ConnectionError("no answer\nmany more lines")

    with pytest.raises(SettingsError, match=r"no answer; the run is kept, and the sam"):
        loggers.log_run(away, record, tmp_path / "model.npz")


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_service_is_named_before_the_run(name: str) -> None:
    with pytest.raises(SettingsError, match=f"install {name}, or use logger=csv"):
        check(f"logger={name}")


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
    assert resolve_config("logger=csv") == resolve_config("")
