"""A result is that of the settings beside it, whatever lies in the folder."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from flwr_safedshb.algorithm import checkpoint
from flwr_safedshb.algorithm.checkpoint import load
from simulations import config
from simulations.command import lock_path
from simulations.config import SettingsError
from simulations.engines import run
from simulations.results import record
from simulations.run import folders_of
from simulations.run import main as run_command

pytestmark = pytest.mark.federation

ROOT = Path(__file__).parents[2]
SMALL = "steps=4 evaluate_every=2 data.num_examples=800"


def started(*arguments: str) -> str:
    """Run in a process of its own, for Hydra takes over logging; return its words."""
    command = [sys.executable, "-m", "simulations.run", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout


def ran(folder: Path, overrides: str) -> str:
    return started(*shlex.split(overrides), f"hydra.run.dir={folder}")


def refused(folder: Path, overrides: str) -> int:
    """Refused runs never come to Hydra."""
    return run_command([*shlex.split(overrides), f"hydra.run.dir={folder}"])


def files(folder: Path) -> dict[str, bytes]:
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


OTHERS = {
    "steps=5": "steps was 4 and is 5",
    "seed=2": "seed was 1 and is 2",
    "momentum=0.5": "momentum was 0.99 and is 0.5",
    "aggregation=median": "aggregation._target_ was",
    "attack=foe": "attack._target_ was None",
    "privacy=high": "privacy.plan.noise_multiplier was 1.0 and is 3.0",
    "data.num_features=5": "data.num_features was 68 and is 5",
    "data.seed=9": "data.seed was",
    "split=by-label": "split._target_ was",
    "model=mlp": "model._target_ was",
    "output=uniform": "output was 'last' and is 'uniform'",
    "engine=batched": "engine.name was 'inprocess' and is 'batched'",
    "evaluate_every=1": "evaluate_every was 2 and is 1",
    "num_malicious_nodes=1": "num_malicious_nodes was 3 and is 1",
}


@pytest.mark.process
def test_another_run_in_the_same_folder_is_refused_with_the_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran(tmp_path, SMALL)
    before = files(tmp_path)
    for other, difference in OTHERS.items():
        assert refused(tmp_path, f"{SMALL} {other}") == 2
        told = capsys.readouterr()
        assert told.err.count("\n") == 1
        assert f"{tmp_path / 'model.npz'} is of another run: " in told.err
        assert difference in told.err
        assert "use another folder" in told.err
        assert not told.out
        # Not even Hydra's own record of the settings has changed.
        assert files(tmp_path) == before


@pytest.mark.process
def test_the_same_run_again_is_told_and_not_repeated(tmp_path: Path) -> None:
    first = ran(tmp_path, SMALL)
    results = (tmp_path / "model.json").read_bytes()
    model = (tmp_path / "model.npz").read_bytes()
    # Where it logs and how often it saves does not make it another run.
    again = ran(tmp_path, f"{SMALL} logger=csv checkpoint_every=7")
    assert "the same run has ended here before" in again
    (last,) = [line for line in first.splitlines() if line.startswith("round 4")]
    assert last in again
    assert (tmp_path / "model.json").read_bytes() == results
    assert (tmp_path / "model.npz").read_bytes() == model
    assert (tmp_path / "model.csv").exists()


@pytest.mark.process
def test_a_checkpoint_elsewhere_is_held_to_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = f"{SMALL} checkpoint={tmp_path / 'kept.npz'}"
    ran(tmp_path / "a", given)
    assert refused(tmp_path / "b", f"{given} seed=2") == 2
    assert "seed was 1 and is 2" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()
    found = json.loads((tmp_path / "kept.json").read_text())
    assert found["seed"] == 1


def test_what_is_no_checkpoint_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.npz").write_bytes(b"text")
    assert refused(tmp_path, SMALL) == 2
    assert "is not a checkpoint" in capsys.readouterr().err


def test_other_data_under_the_same_path_are_another_run(tmp_path: Path) -> None:
    source = tmp_path / "data.txt"
    lines = [f"{i % 2} 1:{i % 7} 2:{(i * i) % 5}\n" for i in range(400)]
    source.write_text("".join(lines))
    chosen = ["steps=2", "data=libsvm", f"data.path={source}"]
    model = tmp_path / "model.npz"
    run(chosen, model)
    copied = tmp_path / "copy.txt"
    copied.write_bytes(source.read_bytes())
    run([*chosen[:2], f"data.path={copied}"], model)  # the same data elsewhere
    source.write_text("".join(line.replace("1:", "1:-") for line in lines))
    with pytest.raises(SettingsError, match="data_sha256 was"):
        run(chosen, model)
    # In this process, too, a run is on what the file holds now.
    then = load(model)
    assert then is not None
    model.unlink()
    now = run(chosen, model)
    expected = run([*chosen[:2], f"data.path={shutil.copy(source, tmp_path / 'new')}"])
    assert now.evaluate_serverapp != then.evaluate_serverapp
    assert now.evaluate_serverapp == expected.evaluate_serverapp


def test_an_unfinished_run_starts_anew_and_ends_as_it_should(tmp_path: Path) -> None:
    """The momentums of its nodes went with the process that was killed."""
    chosen = [*shlex.split(SMALL), "steps=8", "momentum=0.9", "checkpoint_every=2"]
    expected = run(chosen)
    path = tmp_path / "model.npz"
    run(chosen, path)
    saved = checkpoint.load(path)
    assert saved is not None
    saved.step = 4
    checkpoint.save(path, saved)
    assert run(chosen, path).arrays == expected.arrays


@pytest.mark.process
def test_a_multirun_gives_every_job_a_folder_and_holds_it_to_its_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["-m", *shlex.split(SMALL), f"hydra.sweep.dir={tmp_path}"]
    started(*given, "seed=1,2")
    found = [record.read(tmp_path / str(i) / "model.json") for i in range(2)]
    assert [run and run["seed"] for run in found] == [1, 2]
    # And one table and one report about all of them.
    assert len((tmp_path / "results.csv").read_text().splitlines()) == 3
    assert "2</b><span>runs" in (tmp_path / "report.html").read_text()
    before = files(tmp_path)
    assert run_command([*given, "seed=1,3"]) == 2
    assert "seed was 2 and is 3" in capsys.readouterr().err
    assert files(tmp_path) == before


MINE = """
from flwr_safedshb.attacks import Attack
from simulations.data import Synthetic

class MyAttack(Attack):
    def craft_vectors(self, honest, f, rng, aggregate):
        return -honest.mean(axis=0)

class MyData(Synthetic):
    pass
"""


@pytest.mark.process
def test_parts_of_ones_own_run_by_import_path_and_by_a_folder_of_configuration(
    tmp_path: Path,
) -> None:
    (tmp_path / "my_module.py").write_text(MINE)
    (tmp_path / "conf" / "attack").mkdir(parents=True)
    text = "_target_: my_module.MyAttack\n"
    (tmp_path / "conf" / "attack" / "mine.yaml").write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    data = ["data._target_=my_module.MyData", *shlex.split(SMALL)]
    found = []
    ways = {
        "path": ["+attack._target_=my_module.MyAttack"],
        "folder": ["--config-dir", "conf", "attack=mine"],
    }
    for way, chosen in ways.items():
        folder = tmp_path / way
        command = [sys.executable, "-m", "simulations.run", *chosen, *data]
        subprocess.run(
            [*command, f"hydra.run.dir={folder}"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            check=True,
        )
        found.append(record.read(folder / "model.json"))
    first, second = found
    assert first is not None
    assert second is not None
    assert first["config"]["attack"] == {"_target_": "my_module.MyAttack"}
    assert first["config"]["data"]["_target_"] == "my_module.MyData"  # type: ignore[index]
    assert first["evaluations"] == second["evaluations"]


def test_an_installed_package_publishes_its_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "their_conf" / "attack"
    folder.mkdir(parents=True)
    for path in (folder.parent, folder):
        (path / "__init__.py").touch()
    (folder / "theirs.yaml").write_text("_target_: flwr_safedshb.attacks.FOE\n")
    monkeypatch.syspath_prepend(tmp_path)
    point = EntryPoint("theirs", "their_conf", config.ENTRY_POINTS)
    monkeypatch.setattr(config, "entry_points", lambda group: [point])
    cfg = config.compose_config("attack=theirs steps=3")
    assert cfg.attack == {"_target_": "flwr_safedshb.attacks.FOE"}


def test_two_runs_at_once_do_not_share_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with lock_path(tmp_path / "model.npz"):
        assert refused(tmp_path, SMALL) == 2
    assert "another run is at work in" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_folders_that_nobody_named_are_all_different() -> None:
    assert len({folders_of([]) for _ in range(20)}) == 20


@pytest.mark.process
@pytest.mark.parametrize("study", ["convergence", "trilemma"])
def test_a_study_leaves_the_result_of_its_own_settings(
    study: str, tmp_path: Path
) -> None:
    small = {
        "convergence": "study.steps=64 study.fit_from=16 study.num_examples=64",
        "trilemma": "study.sweeps.n.values=[5,10] study.sweeps.n.fit_from=5 "
        "study.sweeps.n.others.d=4 study.plain=[n] ~study.sweeps.d ~study.sweeps.m "
        "~study.sweeps.epsilon ~study.sweeps.f ~study.sweeps.heterogeneity",
    }[study]
    given = f"experiment={study} {small} study.workers=1 study.num_seeds=2"
    for seed in (1, 2):
        ran(tmp_path, f"{given} seed={seed}")
        found = json.loads((tmp_path / f"{study}.json").read_text())
        assert found["config"]["seed"] == seed
