"""A newcomer who follows CONTRIBUTING needs the files it names, and no others."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOUND = re.findall(
    r'```(\w+) title="([^"]+)"\n(.*?)```',
    (ROOT / "CONTRIBUTING.md").read_text(),
    flags=re.DOTALL,
)
BLOCKS = {name: text for kind, name, text in FOUND if kind != "diff"}
CHANGES = {name: text for kind, name, text in FOUND if kind == "diff"}


# A study with a rule and an attack of its own.
OWN = "own_study.py"


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository with the files and the changes of CONTRIBUTING."""
    folder = tmp_path_factory.mktemp("copy") / "repository"
    for name in ("flwr_safedshb", "conf", "docs", "simulations", "tests"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", folder)
    for name, text in BLOCKS.items():
        assert not (folder / name).exists(), f"{name} is there already"
        (folder / name).write_text(text)
    for name, changes in CHANGES.items():
        changed = apply_changes((folder / name).read_text(), changes)
        (folder / name).write_text(changed)
    return folder


def apply_changes(text: str, changes: str) -> str:
    """Apply hunks, with an empty line between two, whose old lines are in one place."""
    for hunk in changes.rstrip().split("\n\n"):
        lines = hunk.splitlines()
        before = "".join(f"{line[1:]}\n" for line in lines if line[0] != "+")
        after = "".join(f"{line[1:]}\n" for line in lines if line[0] != "-")
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    return text


def ran(copy: Path, *command: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=copy,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_a_rule_an_attack_and_a_sampler_are_one_file_one_yaml_one_test() -> None:
    rooms = [(Path(name).parts[0], Path(name).suffix) for name in BLOCKS if name != OWN]
    three = [("flwr_safedshb", ".py"), ("conf", ".yaml"), ("tests", ".py")]
    assert rooms[:9] == three * 3


def test_a_policy_rule_a_formula_and_a_metric_change_two_files_at_most() -> None:
    assert [*CHANGES] == [
        "flwr_safedshb/privacy/policy.py",
        "docs/deployment.md",
        "flwr_safedshb/privacy/clipping/ghost_norms.py",
        "flwr_safedshb/algorithm/round.py",
    ]
    tests = [Path(name) for name in BLOCKS if name != OWN][9:]
    assert [name.parts[0] for name in tests] == ["tests"] * 3


@pytest.mark.process
def test_their_tests_pass_and_so_do_those_that_all_share(copy: Path) -> None:
    files = (
        "aggregation/test_medoid",
        "attacks/test_corner",
        "privacy/test_blocks",
        "privacy/test_samplers",
        "simulations/test_conf",
        "aggregation/test_rule",
        "attacks/test_attacks",
        "test_imports",
        "privacy/test_max_batch_size",
        "privacy/test_policy",
        "privacy/clipping/test_prelu",
        "algorithm/test_direction_norm",
    )
    new = "max_batch_size or max-batch-size or prelu or direction_norm"
    chosen = f"medoid or Medoid or corner or Corner or blocks or {new}"
    out = ran(
        copy,
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", "-rA", "-k", chosen),
        *(f"tests/{name}.py" for name in files),
    )
    passed = set(re.findall(r"^PASSED tests/(\S+)", out, flags=re.MULTILINE))
    for expected in (
        "aggregation/test_medoid.py::test_medoid_is_the_vector_nearest_to_all_others",
        "attacks/test_corner.py::test_every_adversary_sends_the_largest_values",
        "privacy/test_blocks.py::test_a_batch_is_a_block",
        "privacy/test_blocks.py::test_epsilon_is_that_of_the_gaussian_mechanism",
        "privacy/test_samplers.py::test_all_samplers_draw_distinct_examples[blocks]",
        "privacy/test_samplers.py::test_all_samplers_cost_what_they_should[blocks]",
        "simulations/test_conf.py::test_privacy[blocks]",
        "simulations/test_conf.py::test_aggregation[medoid]",
        "simulations/test_conf.py::test_attack[corner]",
        "aggregation/test_rule.py::test_output_follows_permutation_translation_scale_and_rotation[Medoid()]",
        "attacks/test_attacks.py::test_attacks_that_hide_send_one_vector[Corner()]",
        "test_imports.py::test_dependencies_point_one_way[aggregation/medoid.py]",
        "privacy/test_max_batch_size.py::test_a_larger_batch_is_refused",
        "privacy/test_policy.py::test_every_limit_is_held[max-batch-size]",
        "privacy/clipping/test_prelu.py::test_sum_is_the_literal_one[100.0-4-vmap]",
        "algorithm/test_direction_norm.py::test_the_norm_of_the_direction_is_that_of_the_step",
    ):
        assert expected in passed, out[-3000:]


@pytest.mark.process
def test_no_list_in_a_test_has_to_be_told(copy: Path) -> None:
    """What is compared with all rules, attacks or samplers takes them as they are."""
    files = (
        "cli/test_cli",
        "cli/test_plan_command",
        "node/test_kit",
        "privacy/test_policy",
        "privacy/test_samplers",
        "privacy/accounting/test_baselines",
        "simulations/test_conf",
        "test_imports",
    )
    quick = ("-n", "2", "-m", "not process and not federation")
    ran(
        copy,
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", *quick),
        *(f"tests/{name}.py" for name in files),
    )


@pytest.mark.process
def test_they_run_in_an_experiment(copy: Path) -> None:
    overrides = ["aggregation=medoid", "attack=corner", "privacy=blocks", "steps=2"]
    out = ran(copy, "-m", "simulations.run", *overrides, "hydra.run.dir=out")
    assert "round 2: loss" in out
    record = json.loads((copy / "out" / "model.json").read_text())
    assert record["config"]["aggregation"]["_target_"].endswith("medoid.Medoid")
    assert "blocks of neighbours" in json.dumps(record)
    # All weight on one of seven.
    assert [len(nodes) for nodes in record["rounds"]["left_out"]] == [6, 6]
    assert len(record["rounds"]["metrics"]["direction-norm"]) == 2
    assert "direction-norm" in (copy / "out" / "model.html").read_text()


@pytest.mark.process
def test_a_study_is_one_short_file_of_two_by_three_by_three_runs(copy: Path) -> None:
    assert len(BLOCKS[OWN].splitlines()) <= 60
    given = ["own_study:study", "--set", "evaluate_every=10", "--output", "own"]
    ran(copy, "-m", "simulations.study", *given)
    lines = (copy / "own" / "results.csv").read_text().splitlines()
    assert len(lines) == 1 + 2 * 3 * 3
    assert (copy / "own" / "figures" / "Test-accuracy_accuracy.png").exists()


@pytest.mark.process
def test_both_are_listed(copy: Path) -> None:
    script = "from flwr_safedshb.cli import main; main(['{}', '--json'])"
    for command, name in (("rules", "Medoid()"), ("attacks", "Corner")):
        rows = json.loads(ran(copy, "-c", script.format(command)))
        assert name in {row[command.removesuffix("s")] for row in rows}


@pytest.mark.process
def test_they_are_written_as_the_rest_is(copy: Path) -> None:
    python = [name for name in (*BLOCKS, *CHANGES) if name.endswith(".py")]
    assert "All checks passed" in ran(copy, "-m", "ruff", "check", *python)
    formatted = ran(copy, "-m", "ruff", "format", "--check", *python)
    assert f"{len(python)} files already formatted" in formatted


def test_what_make_compat_runs_is_there() -> None:
    makefile = (ROOT / "Makefile").read_text()
    (listed,) = re.findall(
        r"^FLOWER := ((?:.*\\\n)*.*)\n", makefile, flags=re.MULTILINE
    )
    paths = listed.replace("\\", " ").split()
    assert len(paths) > 5
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_files_that_contributing_names_are_there() -> None:
    """Sentences that begin with "Inside" name files of that folder."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    sentences = re.findall(
        r"Inside `([\w/]+/)`,(.*?)\.(?:\n\n|\s+(?=Inside))", text, re.S
    )
    assert sentences
    for folder, words in sentences:
        for name in re.findall(r"`([\w/]+\.py)`", words):
            assert (ROOT / "flwr_safedshb" / folder / name).is_file(), name
