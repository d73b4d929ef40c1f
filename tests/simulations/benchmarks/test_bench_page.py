"""The shape of a benchmark, what is kept of it, and the page of all of them."""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from simulations.benchmarks import __main__ as bench
from simulations.benchmarks import history, outcome, sheet
from simulations.benchmarks.history import Entry
from simulations.benchmarks.outcome import Check, Outcome, Table

CHECKS = (
    Check("speed", "3.00x", ">= 2x", True, "of <two>"),
    Check("memory", "9", "<= 3 models", False),
)


def draw(figure: Figure) -> None:
    figure.set_size_inches(2, 1)
    figure.subplots().plot([1, 2])


def example(quick: bool) -> Outcome:
    return Outcome(
        name="example",
        title="Example & more",
        tables=[Table("Times", ("model", "ms"), [("a <b>", "1.5")], "What ms means.")],
        checks=CHECKS,
        costs={"a / floor": 1.5},
        settings={"quick": quick},
        results=[1.0, 2.0],
        plot=draw,
    )


def entry(**changes: object) -> Entry:
    plain = Entry("1.0", "abc", "2030-01-02 03:04", "cpu, 2 cores", 0.1, {})
    return replace(plain, **changes)  # type: ignore[arg-type]


def test_command_prints_and_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    outcome.main(example, "Words.", ["--quick", "--out", str(tmp_path / "new")])
    printed = capsys.readouterr().out
    assert "1.5" in printed
    assert "What ms means." in printed
    assert printed.count("does not hold") == 1
    written = json.loads((tmp_path / "new" / "example.json").read_text())
    assert written["settings"] == {"quick": True}
    assert written["costs"] == {"a / floor": 1.5}
    assert written["machine"]["versions"]["numpy"]
    assert (tmp_path / "new" / "example.png").read_bytes().startswith(b"\x89PNG")


def test_targets_are_printed_without_being_read_as_markup() -> None:
    console = Console(width=100, record=True, file=None)
    outcome.show(console, example(quick=True))
    assert "of <two>" in console.export_text()


def section(tmp_path: Path) -> sheet.Section:
    outcome.write(tmp_path, example(quick=True))
    found = json.loads((tmp_path / "example.json").read_text())
    return sheet.Section(
        "example", 61.0, found, (tmp_path / "example.png").read_bytes()
    )


def test_page_has_targets_tables_and_pictures(tmp_path: Path) -> None:
    changes = Table("Since 1.0", ("figure", "now"), [("a", "2")])
    failed = sheet.Section("broken", 1.0, None, None)
    page = sheet.page_of([section(tmp_path), failed], entry(), changes)
    assert "1 of 2" in page
    assert page.count("MISSED") == 1
    assert page.count("<td>met</td>") == 1
    assert "data:image/png;base64," in page
    assert "<h2>Example &amp; more</h2>" in page
    assert "a &lt;b&gt;" in page
    assert "What ms means." in page
    assert "broken failed" in page
    assert "Since 1.0" in page
    assert "http" not in page


def test_markdown_has_every_table_and_what_does_not_hold(tmp_path: Path) -> None:
    failed = sheet.Section("broken", 1.0, None, None)
    text = sheet.markdown([section(tmp_path), failed], entry())
    assert "targets that hold: 1 of 2" in text
    assert text.count("| MISSED |") == text.count("| met |") == 1
    assert "python -m simulations.benchmarks.example" in text
    assert "a &lt;b&gt;" in text
    assert "What ms means." in text
    for block in text.split("\n\n"):
        if block.startswith("|"):  # the same number of columns in every line
            assert len({line.count(" | ") for line in block.splitlines()}) == 1


def test_history_compares_with_the_same_machine_only(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    assert history.last("cpu, 2 cores", path) is None
    for version, machine in (("1", "cpu, 2 cores"), ("2", "cpu, 2 cores"), ("3", "x")):
        history.append(entry(version=version, machine=machine), path)
    before = history.last("cpu, 2 cores", path)
    assert before == entry(version="2")


def test_regression_is_seen() -> None:
    before = entry(costs={"step": {"a": 1.0, "b": 2.0, "c": 3.0}})
    now = entry(costs={"step": {"a": 1.5, "b": 1.0, "c": 3.3, "new": 1.0}, "more": {}})
    table = history.comparison(before, now)
    assert table is not None
    assert [tuple(row) for row in table.rows] == [
        ("step: a", "1", "1.5", "1.50 times slower"),
        ("step: b", "2", "1", "2.00 times faster"),
        ("step: c", "3", "3.3", "same"),
    ]
    assert history.comparison(None, now) is None


@pytest.mark.process
def test_entry_says_where_it_comes_from() -> None:
    made = history.entry({"step": {"a": 1.0}})
    assert made.machine.endswith("cores")
    assert made.version
    assert made.commit


def test_kept_history_can_be_read() -> None:
    for line in history.PATH.read_text().splitlines():
        kept = Entry(**json.loads(line))
        assert all(cost > 0 for costs in kept.costs.values() for cost in costs.values())


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Benchmarks that take no time; returns the file of the history."""

    def measure(name: str, out: Path, quick: bool) -> sheet.Section:
        return replace(section(tmp_path), name=name)

    path = tmp_path / "history.jsonl"
    monkeypatch.setattr(bench, "measure", measure)
    monkeypatch.setattr(history, "PATH", path)
    monkeypatch.setattr(history.append, "__defaults__", (path,))
    monkeypatch.setattr(history.last, "__defaults__", (path,))
    return path


@pytest.mark.process
def test_all_benchmarks_run_and_only_a_record_is_kept(
    fake: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.main(["--out", str(tmp_path)])
    whole = (tmp_path / "index.html").read_text()
    assert all(f"benchmarks.{name}<" in whole for name in bench.BENCHMARKS)
    assert not fake.exists()
    bench.main(["--out", str(tmp_path), "--record"])
    assert len(fake.read_text().splitlines()) == 1
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- begin benchmarks -->\n<!-- end benchmarks -->\n")
    bench.main(["--out", str(tmp_path), "--page", str(page)])
    assert "| MISSED |" in page.read_text()
    capsys.readouterr()
    bench.main(["--out", str(tmp_path), "startup"])
    assert "same" in capsys.readouterr().out
    # Small sizes are other figures under the same names.
    bench.main(["--out", str(tmp_path), "--quick", "startup"])
    assert "same" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["nothing"],
        ["--record", "--quick"],
        ["--record", "startup"],
        ["--quick", "--page", "page.md"],
    ],
)
def test_bad_arguments(
    arguments: Sequence[str], fake: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        bench.main(arguments)
    assert left.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not fake.exists()


def test_a_page_is_looked_at_before_the_benchmarks(tmp_path: Path, fake: Path) -> None:
    out, page = tmp_path / "out", tmp_path / "page.md"
    page.write_text("no marks")
    assert bench.main(["--out", str(out), "--page", str(page)]) == 2
    assert not out.exists()


@pytest.mark.process
def test_failed_benchmark_fails_the_command_and_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake: Path
) -> None:
    gone = sheet.Section("startup", 1.0, None, None)
    monkeypatch.setattr(bench, "measure", lambda name, out, quick: gone)
    with pytest.raises(SystemExit, match="startup"):
        bench.main(["--out", str(tmp_path), "--record"])
    assert not fake.exists()
    assert "startup failed" in (tmp_path / "index.html").read_text()


@pytest.mark.process
def test_a_stale_file_is_no_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in ("json", "png"):
        (tmp_path / f"startup.{kind}").write_text("{}")
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert bench.measure("startup", tmp_path, quick=True).outcome is None
    assert not list(tmp_path.iterdir())
