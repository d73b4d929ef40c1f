"""A server that is killed resumes and ends with the same model."""

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
from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict

from flwr_safedshb.aggregation import SMEA
from flwr_safedshb.grids.in_process import InProcessGrid
from flwr_safedshb.server import checkpoint
from flwr_safedshb.server.checkpoint import Progress
from flwr_safedshb.server.strategy import SafeDSHB
from tests.federation import federation, flat, model
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
        train={1: MetricRecord({"kappa": float("inf"), "left-out": [1, 2**62]})},
        evaluate_serverapp={0: MetricRecord({"accuracy": 0.1 + 0.2})},
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
    with pytest.raises(ValueError, match="is no checkpoint"):
        checkpoint.load(path)


def test_every_cut_of_a_checkpoint_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.npz"
    checkpoint.save(path, progress())
    content = path.read_bytes()
    for length in range(0, len(content), 97):
        path.write_bytes(content[:length])
        with pytest.raises(ValueError, match="is no checkpoint"):
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
    return SafeDSHB(
        SMEA(),
        1,
        server_learning_rate=lambda step: 1.0 / (1 + step),
        momentum=0.5,
        seed=5,
        checkpoint=path,
        checkpoint_every=every,
        **more,  # type: ignore[arg-type]
    )


def killing(
    at: int, momenta: dict[int, dict[int, Layers]]
) -> Callable[[int, int, Layers], RecordDict]:
    """Clients that keep momentum by step, and a kill in the middle of a round."""

    def spoil(partition: int, step: int, layers: Layers) -> RecordDict:
        mine = momenta.setdefault(partition, {})
        past = mine.get(step - 1, [np.zeros_like(layer) for layer in layers])
        mine[step] = [
            np.float32(0.5) * (old + new) for old, new in zip(past, layers, strict=True)
        ]
        if step == at and partition == 2:
            raise Killed
        return record(list(mine[step]))

    return spoil


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
    momenta: dict[int, dict[int, Layers]] = {}
    with pytest.raises(Killed):
        run(federation(5, killing(at, momenta)), path)
    saved = checkpoint.load(path)
    assert (0 if saved is None else saved.step) == at // every * every
    assert run(federation(5, killing(-1, momenta)), path) == expected


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


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.npz"
    strategy(path).start(federation(3), model(), 2)
    other = ArrayRecord({"other": Array(np.zeros(3, np.float32))})
    with pytest.raises(ValueError, match="another model"):
        strategy(path).start(federation(3), other, 2)
    with pytest.raises(ValueError, match="a run of 2 rounds, and num_rounds=3"):
        strategy(path).start(federation(3), model(), 3)
    changed = strategy(path)
    changed.server_learning_rate = 1.0
    with pytest.raises(ValueError, match="in round 2, and the schedules say"):
        changed.start(federation(3), model(), 2)


SCRIPT = """
    import sys, time
    import numpy as np, torch
    from flwr.app import ArrayRecord
    from flwr_safedshb.client.client import SafeDSHBClient, client_app
    from flwr_safedshb.grids.in_process import InProcessGrid
    from flwr_safedshb.privacy.randomness.noise import SeededRandomness
    from flwr_safedshb.privacy.plan import PrivacyPlan
    from flwr_safedshb.server.strategy import SafeDSHB

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
        client_app(client_fn), 3, node_config=lambda i: {"state-dir": f"{folder}/{i}"}
    )
    strategy = SafeDSHB(
        num_malicious_nodes=1, momentum=0.9, seed=0,
        checkpoint=f"{folder}/run.npz", checkpoint_every=2,
    )
    result = strategy.start(grid, ArrayRecord(model.state_dict()), 8)
    vector = np.concatenate([a.numpy().ravel() for a in result.arrays.values()])
    print("model", vector.tobytes().hex())
"""


@pytest.mark.slow
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
        output, _ = process.communicate(timeout=300)
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
