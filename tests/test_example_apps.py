"""Apps in their plain and their private form, and what lies between them."""

import importlib
import importlib.util
import io
import re
import tomllib
import zipfile
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
import torch

from flwr_safedshb import PrivacyTarget
from flwr_safedshb.cli import main
from flwr_safedshb.node.flower_patches.fab import build_bundle
from tests.example_apps import EXAMPLES, app_in, run_app, run_on_ray

PAIRS = EXAMPLES / "from-fedavg"


def diffs() -> Any:
    spec = importlib.util.spec_from_file_location("diffs", PAIRS / "diffs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_from_plain_to_private_takes_few_lines() -> None:
    made = diffs()
    for app in made.APPS:
        for side, most in (("client", 15), ("server", 3)):
            lines = made.diff(app, side)
            assert made.count_changes(lines)[0] <= most, (app, side)
            text = "\n".join(lines)
            # What each says: epsilon, f, and evaluation within the guarantee.
            needed = {
                "client": ("PrivacyTarget(", "PrivateEvaluation("),
                "server": ("num_malicious_nodes=1", "evaluate_every="),
            }
            assert all(words in text for words in needed[side])
        plain, private = (
            (PAIRS / app / form / "task.py").read_text()
            for form in ("plain", "private")
        )
        assert plain == private


def test_the_docs_show_the_diffs_as_they_are() -> None:
    for path, text in diffs().pages():
        assert path.read_text() == text, "run python examples/from-fedavg/diffs.py"


def accuracy(folder: Path, model: Path) -> float:
    """Return how good a model is on data of a node that took no part."""
    from flwr.app import Context, RecordDict

    with app_in(folder):
        task: Any = importlib.import_module("task")
        net = task.Net() if hasattr(task, "Net") else task.make_model()
        net.load_state_dict(torch.load(model), strict=False)
        node = Context(1, 1, {"partition-id": 77}, RecordDict(), {})
        found = task.test(net, task.load_data(node)[1])
    return float(found[1] if isinstance(found, tuple) else found)


@pytest.mark.federation
@pytest.mark.parametrize("form", ["plain", "private"])
def test_the_app_of_the_quickstarts_structure_learns(form: str, tmp_path: Path) -> None:
    folder = PAIRS / "torch" / form
    run_app(folder, 4, model=str(tmp_path / "model.pt"))
    assert accuracy(folder, tmp_path / "model.pt") > 0.8


@pytest.mark.federation
@pytest.mark.parametrize("form", ["plain", "private"])
def test_the_app_with_lora_learns(form: str, tmp_path: Path) -> None:
    folder = PAIRS / "lora" / form
    run_app(folder, 3, model=str(tmp_path / "model.pt"))
    assert accuracy(folder, tmp_path / "model.pt") > (0.8 if form == "plain" else 0.7)


@pytest.mark.federation
@pytest.mark.parametrize("form", ["plain", "private"])
def test_the_app_of_the_older_kind_learns(
    form: str, caplog: pytest.LogCaptureFixture
) -> None:
    run_app(PAIRS / "older" / form, 4)
    assert accuracy_in(progress(caplog)[-1]) > 0.8


def progress(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what the servers of the older kind found after each round."""
    said = [r.getMessage() for r in caplog.records if "fit progress" in r.getMessage()]
    return [line.rpartition(",")[0] for line in said]  # without the seconds


def accuracy_in(line: str) -> float:
    """Return the accuracy that such a line states."""
    found = re.search(r"'accuracy': ([0-9.]+)", line)
    assert found is not None
    return float(found[1])


@pytest.mark.process
def test_apps_of_both_kinds_run_on_flowers_simulation_engine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The private ones leave there what they leave in process, to the last bit."""
    kinds = ("torch", "older")

    def config(app: str, form: str, place: str = "ray") -> dict[str, object]:
        model = (
            {} if app == "older" else {"model": str(tmp_path / f"{app}-{form}-{place}")}
        )
        # Nobody has seeded the plain training, which is looked at in the end.
        rounds = 4 if (app, form) == ("torch", "plain") else 2
        return {"num_server_rounds": rounds, **model}

    apps = [(app, form) for app in kinds for form in ("plain", "private")]
    runs = {PAIRS / app / form: config(app, form) for app, form in apps}
    started = new_app("my-app", tmp_path)
    project = started / "pyproject.toml"
    shorter = project.read_text().replace(
        "num-server-rounds = 40", "num-server-rounds = 2"
    )
    project.write_text(shorter.replace("num-nodes = 5", "num-nodes = 3"))
    runs[started] = {"model": str(tmp_path / "new-private-ray")}
    run_on_ray(runs, 3, tmp_path / "current")
    found = progress(caplog)
    for app in kinds:
        run_app(PAIRS / app / "private", 3, **config(app, "private", "here"))
    assert progress(caplog) == [*found, *found[2:]]
    run_app(started, 3, model=str(tmp_path / "new-private-here"))
    assert accuracy_in(found[1]) > 0.8
    # Chance is a third.
    assert accuracy(PAIRS / "torch" / "plain", tmp_path / "torch-plain-ray") > 0.6
    ray, here = (
        torch.load(tmp_path / f"torch-private-{place}") for place in ("ray", "here")
    )
    assert all(torch.equal(ray[name], here[name]) for name in ray | here)
    # Its batches are so large that threads, of which a worker has fewer, share one.
    ray, here = (
        torch.load(tmp_path / f"new-private-{place}") for place in ("ray", "here")
    )
    torch.testing.assert_close(ray, here)


FIGURE = re.compile(r"(\w+) ([0-9.]+), 95 % interval ([0-9.]+) to ([0-9.]+)")


@pytest.mark.federation
def test_hospitals_measure_a_rare_outcome_as_the_page_says(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = (EXAMPLES.parent / "docs" / "tabular.md").read_text()
    run_app(EXAMPLES / "tabular", 6)
    printed = FIGURE.findall(capsys.readouterr().out)
    for found, said in zip(printed, FIGURE.findall(page), strict=True):
        assert found[0] == said[0]
        for value, shown in zip(found[1:], said[1:], strict=True):
            assert float(value) == pytest.approx(float(shown), abs=0.05)
    # The forecast of the width is about that of the median site.
    with app_in(EXAMPLES / "tabular"):
        size: Any = importlib.import_module("size")
        target = PrivacyTarget(3.0, 1e-5, 1, sampling="whole")
        low, high = size.forecast_interval(145, 0.71, target, 770, 5)
    _, _, measured_low, measured_high = printed[0]
    width = float(measured_high) - float(measured_low)
    assert high - low == pytest.approx(width, rel=0.5)


def test_a_table_is_read_by_public_knowledge(tmp_path: Path) -> None:
    text = """age,blood_pressure,glucose,creatinine,sex,ward,readmitted
59,145,220,4.1,f,icu,1
159,,NA,"4,1",M,day clinic,0
59,145,220,4.1,f,icu,
59,145,220,inf,f,icu,2
"""
    path = tmp_path / "table.csv"
    path.write_text(text)
    with app_in(EXAMPLES / "tabular"):
        table: Any = importlib.import_module("table")
        inputs, labels = table.read_table(path)
        bounds, number = [*table.BOUNDS.values()], table.FEATURES
    assert labels.tolist() == [1, 0]
    middle = [59.0, 145.0, 220.0, 4.1]
    assert [(low + high) / 2 for low, high in bounds] == pytest.approx(middle)
    assert inputs.shape == (2, number)
    zeros = [0.0] * 8
    assert inputs[0].tolist() == pytest.approx([*zeros, 1, 0, 0, 0, 1], abs=1e-6)
    strays = [1, 0, 0, 1, 0, 1, 0, 0]  # beyond the bound, empty, no number, a comma
    assert inputs[1].tolist() == pytest.approx([*strays, 0, 1, 0, 0, 0], abs=1e-6)


def new_app(name: str, folder: Path) -> Path:
    """Write the app of `safedshb new` into a folder."""
    with chdir(folder):
        assert main(["new", name]) == 0
    return folder / name


@pytest.mark.federation
def test_a_new_app_learns_and_says_how_much_it_is_worth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = new_app("hospital-app", tmp_path)
    monkeypatch.chdir(tmp_path)
    with app_in(folder):
        importlib.import_module("simulate").main()
    low, high = re.findall(
        r"interval.*: ([0-9.]+) to ([0-9.]+)", capsys.readouterr().out
    )[0]
    assert 0.85 < float(low) < float(high)
    assert (tmp_path / "model.pt").exists()


def test_flower_takes_a_new_app_to_publish(tmp_path: Path) -> None:
    folder = new_app("hospital-app", tmp_path)
    flower_takes(folder)
    written = {path.name for path in folder.rglob("*") if path.is_file()}
    assert {"LICENSE", "README.md", "simulate.py", "client_app.py"} < written
    for path in folder.rglob("*.*"):
        assert not re.search("new[-_]app", path.read_text()), path


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Mine", "must be lower-case letters"),
        ("my_app", "must be lower-case letters"),
        ("../mine", "must be lower-case letters"),
        ("a" * 41, "at most 40"),
        ("torch", "would hide the Python module torch"),
        ("class", "would hide the Python module class"),
        ("taken", "taken exists and is not overwritten"),
    ],
)
def test_a_name_that_cannot_be_an_app_is_refused(
    name: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("taken").mkdir()
    assert main(["new", name]) == 2
    assert words in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


APPS = sorted(path.parent for path in EXAMPLES.rglob("pyproject.toml"))


@pytest.mark.parametrize("folder", APPS, ids=lambda f: str(f.relative_to(EXAMPLES)))
def test_flower_takes_every_app_to_publish(folder: Path) -> None:
    flower_takes(folder)


def flower_takes(folder: Path) -> None:
    """Assert all that `flwr app publish` checks before it sends anything."""
    from flwr.cli.config_utils import load_and_validate

    publish: Any = importlib.import_module("flwr.cli.app_cmd.publish")

    config, _ = load_and_validate(folder / "pyproject.toml", check_module=False)
    publish._validate_app_name(folder.name, "directory")
    publish._validate_app_name(config["project"]["name"], "name")
    description = config["project"]["description"]
    publish._validate_description(description)
    assert len(description) <= 200
    files = publish._collect_file_paths(folder)
    publish._validate_files(files)
    assert {"pyproject.toml"} < {file.name for file in files}
    bundled(folder)


def bundled(folder: Path) -> None:
    """Assert that an app's bundle has what Flower's Hub wants (format 1)."""
    content = zipfile.ZipFile(io.BytesIO(build_bundle(folder)))
    assert {"LICENSE", "README.md"} <= {*content.namelist()}
    about = tomllib.loads(content.read("pyproject.toml").decode())
    assert about["tool"]["flwr"]["app"]["fab-format-version"] == 1
    # Whoever runs it must know how many SuperNodes it is for.
    readme = content.read("README.md").decode()
    assert re.search(r"[1-9]\d* SuperNodes|num-supernodes=\d", readme)


@pytest.mark.parametrize("folder", [".", "flwr_safedshb/node/template/app"])
def test_the_other_apps_are_bundled_too(folder: str) -> None:
    bundled(EXAMPLES.parent / folder)
