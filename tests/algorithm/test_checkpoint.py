"""A server that is killed resumes and ends with the same model."""

import inspect
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from flwr_safedshb.aggregation import SMEA
from flwr_safedshb.algorithm import checkpoint
from flwr_safedshb.algorithm.norm_bound import NormBound
from flwr_safedshb.algorithm.progress import Progress
from flwr_safedshb.simulation.in_process import InProcessGrid
from flwr_safedshb.strategy import SafeDSHB
from tests.federation import federation, flat, model
from tests.guard import HANGS
from tests.replies import Layers, record

ROUNDS = 7


class Killed(BaseException):
    """Passes every handler, as a kill does."""


def progress() -> Progress:
    return Progress(
        session="s",
        seed=2**70,
        num_rounds=9,
        step=4,
        arrays=model(),
        kept=ArrayRecord({name: Array(a.numpy() + 1) for name, a in model().items()}),
        train={1: MetricRecord({"kappa": float("inf"), "left-out": [1, 2**64 - 1]})},
        evaluate_serverapp={0: MetricRecord({"accuracy": 0.1 + 0.2})},
        settings={"momentum": [0.5, 0.25], "aggregation": "SMEA()"},
    )


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "new" / "run.npz"
    checkpoint.save(path, progress())
    assert checkpoint.load(path) == progress()
    assert [file.name for file in path.parent.iterdir()] == ["run.npz"]


def test_no_file_is_no_progress(tmp_path: Path) -> None:
    assert checkpoint.load(tmp_path / "none") is None


@pytest.mark.parametrize(
    "content", [b"", b"PK\x03\x04", b"\x80\x04.", b"\x93NUMPY", b"text"]
)
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "run.npz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="is not a checkpoint"):
        checkpoint.load(path)


def test_every_cut_of_a_checkpoint_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.npz"
    checkpoint.save(path, progress())
    content = path.read_bytes()
    for length in range(0, len(content), 97):
        path.write_bytes(content[:length])
        with pytest.raises(ValueError, match="is not a checkpoint"):
            checkpoint.load(path)


def test_a_failed_write_leaves_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.npz"
    checkpoint.save(path, progress())
    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch:

            def fail(*_: object) -> None:
                raise OSError("disk full")

            patch.setattr(os, name, fail)
            with pytest.raises(OSError, match="disk full"):
                checkpoint.save(path, Progress("t", 0, 1, 0, model()))
    assert checkpoint.load(path) == progress()
    assert [file.name for file in tmp_path.iterdir()] == ["run.npz"]


def strategy(path: Path | None, every: int = 1, **more: object) -> SafeDSHB:
    arguments: dict[str, object] = {
        "aggregation": SMEA(),
        "num_malicious_nodes": 1,
        "server_learning_rate": lambda step: 1.0 / (1 + step),
        "momentum": 0.5,
        "seed": 5,
        "checkpoint": path,
        "checkpoint_every": every,
    }
    return SafeDSHB(**{**arguments, **more})  # type: ignore[arg-type]


def killing(
    at: int, momentums: dict[int, dict[int, Layers]]
) -> Callable[[int, int, Layers], RecordDict]:
    """Clients that keep momentum by step, and a kill in the middle of a round."""

    def spoil(partition: int, step: int, layers: Layers) -> RecordDict:
        mine = momentums.setdefault(partition, {})
        past = mine.get(step - 1, [np.zeros_like(layer) for layer in layers])
        mine[step] = [
            np.float32(0.5) * (old + new) for old, new in zip(past, layers, strict=True)
        ]
        if step == at and partition == 2:
            raise Killed
        return record(list(mine[step]))

    return spoil


@pytest.mark.federation
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("output", ["last", "uniform"])
@pytest.mark.parametrize("at", range(ROUNDS))
def test_a_killed_run_ends_as_an_uninterrupted_one(
    tmp_path: Path, every: int, output: str, at: int
) -> None:
    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        return MetricRecord({"norm": float(np.linalg.norm(flat(arrays)))})

    def run(grid: InProcessGrid, path: Path | None) -> tuple[bytes, object]:
        result = strategy(path, every, output=output).start(
            grid, model(), ROUNDS, evaluate_fn=evaluate
        )
        left = {
            number: {k: v for k, v in metrics.items() if k != "left-out"}
            for number, metrics in result.train_metrics_clientapp.items()
        }
        return flat(result.arrays).tobytes(), (left, result.evaluate_metrics_serverapp)

    expected = run(federation(5, killing(-1, {})), None)
    path = tmp_path / "run.npz"
    momentums: dict[int, dict[int, Layers]] = {}
    with pytest.raises(Killed):
        run(federation(5, killing(at, momentums)), path)
    saved = checkpoint.load(path)
    assert (0 if saved is None else saved.step) == at // every * every
    assert run(federation(5, killing(-1, momentums)), path) == expected


def test_a_finished_run_is_not_repeated(tmp_path: Path) -> None:
    asked: list[int] = []

    def spoil(partition: int, step: int, layers: Layers) -> RecordDict:
        asked.append(step)
        return record(list(layers))

    path = tmp_path / "run.npz"
    first = strategy(path).start(federation(3, spoil), model(), 2)
    again = strategy(path).start(federation(3, spoil), model(), 2)
    assert len(asked) == 6
    assert first.arrays == again.arrays
    assert again.train_metrics_clientapp == first.train_metrics_clientapp


# Every argument of the strategy: another value of it, or None where a run may be
# resumed with any.
OTHERS: dict[str, object] = {
    "noise_std": 0.5,
    "norm_bound": NormBound(100.0, 0.5),
    "aggregation": SMEA(max_nodes=7),
    "num_malicious_nodes": 0,
    "server_learning_rate": lambda step: 1.0 if step == 3 else 1.0 / (1 + step),
    "momentum": 0.6,
    "output": "uniform",
    "local_steps": 2,
    "evaluate_every": 3,
    "evaluate_max_loss": 2.0,
    "evaluate_per_class": True,
    "foreign_clients": True,
    "receipts": "gram",
    "fraction_train": 0.9,
    "fraction_evaluate": 0.5,
    "min_train_nodes": 4,
    "min_evaluate_nodes": 4,
    "participation_confidence": 0.99,
    "seed": 6,
    "run_settings": {"data": {"path": "other"}},
    "min_available_nodes": None,
    "node_timeout": None,
    "give_up_after": None,
    "straggler_grace": None,
    "stop_when": None,
    "authenticated_nodes": None,
    "checkpoint": None,
    "checkpoint_every": None,
    "arrayrecord_key": None,
    "configrecord_key": None,
}


def test_no_argument_of_the_strategy_is_forgotten() -> None:
    assert sorted(inspect.signature(SafeDSHB).parameters) == sorted(OTHERS)


def unfinished(path: Path) -> None:
    """Leave the checkpoint of a run that was killed in its third round."""
    with pytest.raises(Killed):
        strategy(path).start(federation(5, killing(2, {})), model(), 4)


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize(
    "name", [name for name, new in OTHERS.items() if new is not None]
)
def test_a_run_with_another_argument_is_refused(
    tmp_path: Path, name: str, finished: bool
) -> None:
    path = tmp_path / "run.npz"
    if finished:
        strategy(path).start(federation(5), model(), 4)
    else:
        unfinished(path)
    before = path.read_bytes()
    # Among the first steps the schedules agree: what is to come decides, too.
    place = {"server_learning_rate": r"\[3\]", "run_settings": r"\.data"}.get(name, "")
    words = f"is of another run: {name}{place} was .* and is .*; .* another path"
    with pytest.raises(ValueError, match=words):
        strategy(path, 1, **{name: OTHERS[name]}).start(federation(5), model(), 4)
    assert path.read_bytes() == before


def test_a_run_with_other_arguments_of_start_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.npz"
    strategy(path).start(federation(3), model(), 2)
    other = ArrayRecord({"other": Array(np.zeros(3, np.float32))})
    moved = ArrayRecord({name: Array(a.numpy() + 1) for name, a in model().items()})
    config = ConfigRecord({"epochs": 2})

    def start(initial: ArrayRecord, rounds: int = 2, **more: ConfigRecord) -> None:
        strategy(path).start(federation(3), initial, rounds, **more)  # type: ignore[arg-type]

    with pytest.raises(ValueError, match=r"model.weight was 'float32\[2, 5\]'"):
        start(other)
    with pytest.raises(ValueError, match="initial_arrays was"):
        start(moved)
    with pytest.raises(ValueError, match="num_rounds was 2 and is 1"):
        start(model(), 1)
    with pytest.raises(ValueError, match=r"train_config.epochs was None and is 2"):
        start(model(), train_config=config)
    with pytest.raises(ValueError, match=r"evaluate_config.epochs was None and is 2"):
        start(model(), evaluate_config=config)


def test_how_a_run_is_handled_may_change_and_a_seed_may_be_left_out(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run.npz"
    unfinished(path)
    changed = strategy(
        path, every=3, seed=None, node_timeout=5.0, min_available_nodes=4
    )
    changed.start(federation(5), model(), 4)
    assert changed.run.progress is not None
    assert changed.run.progress.seed == 5
    saved = checkpoint.load(path)
    assert saved is not None
    assert saved.step == 4


def test_a_run_without_a_seed_resumes_with_the_one_it_drew(tmp_path: Path) -> None:
    path = tmp_path / "run.npz"
    first = strategy(path, seed=None)
    first.start(federation(3), model(), 2)
    assert first.run.progress is not None
    drawn = first.run.progress.seed
    strategy(path, seed=None).start(federation(3), model(), 2)
    strategy(path, seed=drawn).start(federation(3), model(), 2)
    with pytest.raises(ValueError, match=f"seed was {drawn} and is 5"):
        strategy(path, seed=5).start(federation(3), model(), 2)


def test_a_random_first_model_that_is_gone_does_not_lose_the_run(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run.npz"
    unfinished(path)
    saved = checkpoint.load(path)
    assert saved is not None
    strategy(path).start(federation(5), saved.arrays, 4)
    done = checkpoint.load(path)
    assert done is not None
    # A finished run is not what training on from its model would give.
    with pytest.raises(ValueError, match="initial_arrays was"):
        strategy(path).start(federation(5), done.arrays, 4)


SCRIPT = """
    import sys, time
    import numpy as np, torch
    from flwr.app import ArrayRecord
    from flwr_safedshb.client import SafeDSHBClient
    from flwr_safedshb.app import client_app
    from flwr_safedshb.simulation.in_process import InProcessGrid
    from flwr_safedshb.privacy.randomness.noise import SeededRandomness
    from flwr_safedshb.privacy.plan import PrivacyPlan
    from flwr_safedshb.strategy import SafeDSHB

    folder, pause = sys.argv[1], float(sys.argv[2])
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(50, 4, generator=generator)
    model = torch.nn.Linear(4, 1)
    torch.nn.init.zeros_(model.weight), torch.nn.init.zeros_(model.bias)

    def client_fn(context):
        print("step", flush=True)
        time.sleep(pause)
        return SafeDSHBClient(
            model, lambda out, y: (out.squeeze(1) - y) ** 2, (data, data.sum(dim=1)),
            PrivacyPlan(1.0, 0.5, 10, 50), context, max_epsilon=1e3, delta=1e-5,
            randomness=SeededRandomness(1),
        )

    grid = InProcessGrid(
        client_app(client_fn), 3, node_config=lambda i: {
            "state-dir": f"{folder}/{i}", "require-secure-noise": False
        }
    )
    strategy = SafeDSHB(
        num_malicious_nodes=1, momentum=0.9, seed=0,
        checkpoint=f"{folder}/run.npz", checkpoint_every=2,
    )
    result = strategy.start(grid, ArrayRecord(model.state_dict()), 8)
    vector = np.concatenate([a.numpy().ravel() for a in result.arrays.values()])
    print("model", vector.tobytes().hex())
"""


@pytest.mark.process
def test_kill_9_and_resume_with_real_clients_and_ledgers(tmp_path: Path) -> None:
    """Killed in the middle of rounds, twice; momentum comes from the state-dirs."""
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT)]

    def run(folder: str, pause: float = 0.0) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*command, str(tmp_path / folder), str(pause)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def final(process: subprocess.Popen[str]) -> str:
        output, _ = process.communicate(timeout=HANGS)
        assert process.returncode == 0
        return output.splitlines()[-1]

    expected = final(run("straight"))
    assert expected.startswith("model ")
    for steps in (10, 8):  # rounds of 3 clients: within the 4th, then the 5th
        process = run("killed", pause=0.02)
        assert process.stdout is not None
        try:
            for _ in range(steps):
                assert process.stdout.readline() == "step\n"
        finally:
            process.send_signal(signal.SIGKILL)
            process.communicate()
    saved = checkpoint.load(tmp_path / "killed" / "run.npz")
    assert saved is not None
    assert 0 < saved.step < 8
    assert final(run("killed")) == expected


def test_checkpoints_hold_no_pickles(tmp_path: Path) -> None:
    path = tmp_path / "run.npz"
    strategy(path).start(federation(3), model(), 1)
    with np.load(path, allow_pickle=False) as file:
        assert json.loads(file["content"].tobytes())["step"] == 1
