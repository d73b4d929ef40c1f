"""Settings that make no run: one line that names them, and nothing has started."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from simulations import engines, run
from simulations.check import check, check_study
from simulations.config import SettingsError, compose_config, format_override
from simulations.study import main as study_main

ROOT = Path(__file__).parents[2]

# Overrides, and words of the line that they get.
BAD = {
    "steps=-1": "steps=-1 must be at least 1",
    "steps=0": "steps=0 must be",
    f"steps={10**20}": "steps=10+ must be at most",
    "steps=abc": "steps: Value 'abc'",
    "steps=1.5": "steps: Value '1.5'",
    "steps=": "steps: Value ''",
    "steps=null": "steps: ",
    "~steps": "steps: Missing",
    "steps": "parsing override 'steps'",
    "steps=[1": r"\[1",
    "steps=1,2": "steps=1,2",
    "local_steps=0": "local_steps=0 must be at least 1",
    "local_steps=3": "steps=400 is no multiple of local_steps=3",
    "local_steps=1000000000": "is no multiple",
    "steps=2000 local_steps=2000": "local_steps=2000 must be an integer from 1 to 1000",
    "stepz=3": "stepz: there is no such setting; did you mean steps?",
    "+stepz=3": "stepz: there is no such setting; did you mean steps?",
    "agregation=smea": "did you mean aggregation?",
    "aggregation=sema": "aggregation=sema: .* choose .*average, .*smea",
    "aggregation.max_nodes=3": r"aggregation.max_nodes: .* with \+ before",
    "+aggregation.max_nodez=3": "aggregation: .*'max_nodez'",
    "+aggregation.max_nodes=-1": "max_nodes=-1",
    "+aggregation.time_limit=inf": "aggregation.time_limit=inf must be finite",
    "num_malicious_nodes=5": "num_malicious_nodes=5 of num_nodes=7: .* 3 or less",
    "num_malicious_nodes=-1": "num_malicious_nodes=-1 must be",
    "num_nodes=0": "num_nodes=0 must be",
    "attack=alie num_malicious_nodes=0": "num_malicious_nodes=0 with an attack",
    "attack=drift +attack.seed=abc": "attack.seed=abc must be a whole number",
    "attack=nope": "attack=nope: there is no such option; choose alie",
    "seed=-1": "seed=-1",
    f"seed={2**63}": "seed=.* must be below",
    "server_learning_rate=-1": "server_learning_rate=-1.0",
    "server_learning_rate=nan": "server_learning_rate=nan",
    "server_learning_rate=inf": "server_learning_rate=inf",
    "momentum=1": "momentum=1.0",
    "momentum=nan": "momentum=nan",
    "weight_decay=-1": "weight_decay=-1.0",
    "weight_decay=inf": "weight_decay=inf",
    "norm_confidence=1": r"confidence=1 must lie in \(0, 1\)",
    "norm_confidence=0.9 engine=deployment privacy=hospitals": "0.9 needs noise that",
    "output=first": "output='first'",
    "evaluate_every=0": "evaluate_every=0",
    "checkpoint_every=0": "checkpoint_every=0",
    "checkpoint=run.json": "checkpoint=run.json must end in .npz",
    "checkpoint=5": "checkpoint=5 must end in .npz",
    "checkpoint=[1]": "checkpoint: ",
    "log_level=LOUD": "log_level=LOUD must be one of",
    "privacy=none": "privacy=none: .* choose high",
    "privacy.plan=3": "privacy.plan: ",
    "privacy.plan.batch_size=0": "privacy.plan: batch_size=0",
    "privacy.plan.batch_size=abc": "privacy.plan: batch_size='abc'",
    "privacy.plan.batch_size=10000": "lower privacy.plan.batch_size",
    "privacy.plan.clip_norm=nan": "clip_norm=nan",
    "privacy.plan.noise_multiplier=-1": "privacy.plan: noise_multiplier=-1",
    "privacy.plan.adjacency=add-remove": "add-remove.*'fixed'",
    "privacy.delta=0": r"privacy.delta=0 must lie in \(0, 1\)",
    "privacy.delta=nan": "privacy.delta=nan",
    "privacy.target_epsilon=0": "privacy.target_epsilon=0 must be above 0",
    "privacy.target_epsilon=nan": "privacy.target_epsilon=nan must be",
    "privacy.target_epsilon=1e-300": "target_epsilon=1e-300 needs a noise multiplier",
    "private_evaluation.every=0 private_evaluation.noise_multiplier=9": "every=0",
    "private_evaluation.every=1": "private_evaluation.noise_multiplier=null: give it",
    "private_evaluation.held_out=1": "held_out=1",
    "private_evaluation.held_out=nan": "held_out=nan",
    "private_evaluation.every=1 private_evaluation.noise_multiplier=1e-160": "1e-160",
    "split=unequal": "split.sizes=.* are for 5 nodes and 11050 examples",
    "split=unequal split.sizes=[0,1]": "sizes=",
    "data=libsvm": "data.path: Missing",
    "data=libsvm data.path=/nope": "data.path='/nope'",
    "data.num_examples=-5": "data: num_examples=-5",
    "data.num_features=0": "data: num_features=0",
    "data.seed=null": "data.seed=None must be a whole number",
    "data.test_fraction=2": "data: test_fraction=2",
    "data._target_=no.Such": "data: .*no.Such",
    "split=dirichlet split.alpha=-1": "alpha=-1",
    "model=cnn": "model: input_shape",
    "model=mlp model.hidden=[0]": r"model: hidden=\[0\]",
    "model=mlp model.hidden=abc": "model: hidden=abc",
    "model._target_=torch.nn.Linear": "model: .*in_features",
    "schedule=strongly-convex momentum=0.5": "momentum=0.5 is of schedule=constant",
    "schedule=strongly-convex weight_decay=0": "strong_convexity=0",
    "schedule=non-convex aggregation=median": "effective_std=null",
    "engine.name=ray": "engine.name=ray needs engine.client_cpus",
    "engine.name=foo": "engine=foo must be one of",
    "+engine.foo=1": "engine.foo: there is no such setting",
    "engine=ray engine.client_cpus=0": "engine.client_cpus=0",
    "engine=deployment engine.seeded_noise=true": "engine.seeded_noise=true",
    "engine.seeded_noise=false": "engine.seeded_noise=false: .* engine=deployment",
    "engine=deployment engine.max_epsilon=0.01": "epsilon=.* engine.max_epsilon=0.01",
    "engine=deployment engine.max_epsilon=null": "engine.max_epsilon=null",
    "engine=deployment engine.node_timeout=-1": "engine.node_timeout=-1",
    "experiment=nope": "experiment=nope: .* choose convergence",
}
BAD_STUDIES = {
    "experiment=trilemma steps=5": "steps is not used: .* study.steps",
    "experiment=trilemma study.num_seeds=0": "study: num_seeds=0",
    "experiment=trilemma study.workers=0": "study: workers=0",
    "experiment=trilemma study.delta=2": "study: delta=2",
    "experiment=trilemma study.base.f=30": "study: f=30 needs n > 2f",
    "experiment=trilemma study.plain=[x]": "study: x must be one of n, f, d, m",
    "experiment=trilemma study.plain=[]": r"study: plain=\[\] must name sweeps",
    "experiment=trilemma ~study.sweeps.n": "study: sweeps must hold n",
    "experiment=trilemma study.base.epsilon=-1": "study: .* epsilon above 0",
    "experiment=trilemma study.sweeps.d.fit_from=1e9": "study.sweeps.d: fit_from",
    "experiment=convergence study.steps=abc": "study: steps=abc must be a whole number",
    "experiment=convergence study.steps=-1": "study: steps=-1",
    "experiment=convergence study.steps=true": "study: steps=True",
    "experiment=convergence study.weight_decay=nan": "study.weight_decay=nan",
    "experiment=convergence study.num_malicious_nodes=5": "study: f=5 needs n > 2f",
    "experiment=convergence study.batch_size=4096": "study: batch_size=4096",
    "experiment=convergence study.fit_from=4096": "study: fit_from=4096",
    "experiment=convergence study.delta=0": "study: delta=0",
    "experiment=convergence study.stepz=0": "study.stepz: there is no such setting",
}


@pytest.mark.parametrize("overrides", BAD)
def test_bad_settings_are_one_line(overrides: str) -> None:
    with pytest.raises(SettingsError, match=BAD[overrides]) as error:
        check(overrides)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("overrides", BAD_STUDIES)
def test_bad_settings_of_studies_are_one_line(overrides: str) -> None:
    with pytest.raises(SettingsError, match=BAD_STUDIES[overrides]) as error:
        check_study(overrides)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "overrides",
    ["", "attack=none num_malicious_nodes=0", "aggregation=krum attack=label-flip"],
)
def test_good_settings_pass_and_one_bad_word_more_does_not(overrides: str) -> None:
    check(overrides)
    with pytest.raises(SettingsError, match="steps"):
        check(f"{overrides} steps=0")


def test_a_used_folder_of_a_deployment_is_refused(tmp_path: Path) -> None:
    (tmp_path / "flwr").mkdir()
    with pytest.raises(SettingsError, match="holds another deployment"):
        engines.run(["engine=deployment", f"engine.folder={tmp_path}"])


@pytest.mark.parametrize("engine", engines.ENGINES)
def test_no_engine_starts_with_bad_settings(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    monkeypatch.setitem(engines.ENGINES, engine, started.append)
    with pytest.raises(SettingsError, match="steps=-1"):
        engines.run([f"engine={engine}", "steps=-1"])
    assert not started
    with pytest.raises(RuntimeError, match="ended without a model"):
        engines.run([f"engine={engine}", "steps=2"])
    assert len(started) == 1  # the engine is the one that would have been


def said(error: str) -> str:
    """Return the one line that a command printed, or fail."""
    assert error.count("\n") == 1, error
    assert "Traceback" not in error
    return error


@pytest.mark.process
def test_the_command_says_one_line_and_makes_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "simulations.run", "aggregation=sema"]
    ran = subprocess.run(
        [*command, f"hydra.run.dir={tmp_path / 'out'}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 2
    assert "there is no such option; choose arc, average" in said(ran.stderr)
    assert not ran.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("-m steps=2,-1", "steps=-1"),
        ("-m stepz=2,3", "stepz: there is no such setting"),
        ("-m seed=1,2 checkpoint=same.npz", "same.npz would be that of several runs"),
        ("experiment=convergence study.steps=abc", "steps=abc"),
        ("hydra.run.dir=/proc/nope/x", "/proc/nope"),
    ],
)
def test_a_multirun_and_a_study_are_checked_before_they_start(
    given: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["run"])
    assert run.main(shlex.split(given)) == 2
    assert words in said(capsys.readouterr().err)
    assert not list(tmp_path.iterdir())


SWEEPS = ("paper", "beyond", "demo")


def swept(name: str, given: str) -> int:
    """Return with which code a study ends that was given few runs, and this."""
    few = ["--seeds", "1"] if "--seeds" not in given else []
    few += ["--privacy", "low"] if name == "paper" else []
    few += ["--part", "rules"] if name == "beyond" else []
    small = ["data=synthetic"] if "--set" in given and name != "demo" else []
    try:
        return study_main([name, *few, *shlex.split(given), *small])
    except SystemExit as left:  # of the parser
        return int(left.code or 0)


@pytest.mark.parametrize("name", SWEEPS)
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("--set steps=-1", "steps=-1 must be"),
        ("--set steps=abc", "steps: Value 'abc'"),
        ("--set stepz=3", "did you mean steps?"),
        ("--set num_malicious_nodes=40", "num_malicious_nodes"),
        ("--set aggregation.foo=1", "aggregation.foo: there is no such"),
        ("--set momentum=nan", "momentum=nan"),
        ("--set privacy.plan.clip_norm=-1", "clip_norm=-1"),
        ("--set seed=3", "--set seed: the runs are named after their own"),
        ("--workers 0", "--workers: 0 must be at least 1"),
        ("--workers abc", "--workers: invalid whole number value: 'abc'"),
        ("--seeds -1", "--seeds"),
        ("--seeds abc", "--seeds: invalid whole number value: 'abc'"),
        ("--stepz 3", "unrecognized arguments: --stepz 3"),
    ],
)
def test_sweeps_are_checked_before_they_start(
    name: str,
    given: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert swept(name, f"--output out {given}") == 2
    assert words in said(capsys.readouterr().err)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", SWEEPS)
def test_a_folder_that_cannot_be_is_one_line(
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    checked: list[str] = []

    def checks_two(overrides: str) -> None:
        checked.append(overrides)
        if len(checked) <= 2:
            check(overrides)

    monkeypatch.setattr("simulations.check.check", checks_two)
    assert swept(name, "--output /proc/nope/x --set evaluate_every=9") == 2
    assert "/proc/nope" in said(capsys.readouterr().err)
    assert len(checked) >= 2


@pytest.mark.parametrize("name", ["paper", "beyond"])
def test_a_page_is_checked_before_the_runs(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    given = ["--output", str(tmp_path / "out"), "--page", str(page)]
    assert study_main([name, *given]) == 2
    assert "page.md" in said(capsys.readouterr().err)
    page.write_text("no marks")
    assert study_main([name, *given]) == 2
    assert "must hold <!-- begin" in said(capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def test_a_page_does_not_show_a_quick_look(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        study_main(["paper", "--quick", "--page", str(tmp_path / "page.md")])
    assert "leave out --quick" in said(capsys.readouterr().err)


@pytest.mark.parametrize("path", ["/a/b.npz", "/a b/c,d.npz", "/it's/(x)=[1].npz"])
def test_any_path_is_one_word_of_an_override(path: str) -> None:
    assert (
        compose_config(shlex.join([format_override("checkpoint", path)])).checkpoint
        == path
    )


def test_the_whole_error_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(SettingsError, match=re.escape("steps=-1")):
        run.main(["steps=-1"])
