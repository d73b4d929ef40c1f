"""A result beside its thresholds, what is kept of it, and the page of all of them."""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from simulations.benchmarks import __main__ as bench
from simulations.benchmarks import history, html, result
from simulations.benchmarks.history import Entry
from simulations.benchmarks.plots import EXTRAPOLATED, Panel
from simulations.benchmarks.result import (
    Measurement,
    Result,
    ResultTable,
    compare_thresholds,
    format_cell,
)
from simulations.benchmarks.thresholds import BENCHMARKS, Benchmark, Threshold

EXAMPLE = Benchmark(
    "Example & more",
    (
        Threshold("speed of <two>", ">=", 2),
        Threshold("memory", "<=", 3, "models"),
        Threshold("peer", ">=", 1),
    ),
)
LINES = {"ours": {1: 2.0, 10: 3.0}, f"theirs{EXTRAPOLATED}": {10: 9.0}}
BARS = {"": {"a": 1.0, "b": 2.0}}


def measure(quick: bool) -> Result:
    return Result(
        tables=[
            ResultTable("Times", ("model", "ms"), [("a <b>", "1.5")], "What ms means.")
        ],
        figures={
            "speed of <two>": Measurement(3.0, "a note"),
            "memory": Measurement(9.0),
        },
        costs={"a / floor": 1.5},
        raw={"quick": quick},
        panels=[Panel("A", "n", "s", LINES), Panel("B", "", "s", BARS, kind="bars")],
    )


@pytest.fixture(autouse=True)
def _example(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BENCHMARKS, "example", EXAMPLE)
    module = SimpleNamespace(measure=measure)
    monkeypatch.setitem(sys.modules, "simulations.benchmarks.example", module)


def entry(**changes: object) -> Entry:
    plain = Entry("1.0", "abc", "2030-01-02 03:04", "cpu, 2 cores", 0.1, {})
    return replace(plain, **changes)  # type: ignore[arg-type]


def test_command_prints_and_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    out = tmp_path / "new"
    assert result.run_benchmark("example", ["--quick", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "What ms means." in printed
    assert "speed of <two>" in printed
    assert printed.count("MISSED") == printed.count("not measured") == 1
    written = json.loads((out / "example.json").read_text())
    assert written["raw"] == {"quick": True}
    assert written["costs"] == {"a / floor": 1.5}
    assert written["machine"]["versions"]["numpy"]
    assert (out / "example.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("sign", "value", "holds"),
    [
        *((">=", 3.0, True), (">=", 2.9, False), (">=", float("nan"), False)),
        *(("<=", 3.0, True), ("<=", 3.1, False), ("<=", float("nan"), False)),
    ],
)
def test_a_threshold_holds_on_its_side(sign: str, value: float, holds: bool) -> None:
    assert Threshold("", sign, 3.0).holds(value) is holds


def test_a_figure_without_a_threshold_is_an_error() -> None:
    with pytest.raises(ValueError, match="renamed"):
        compare_thresholds("example", {"renamed": Measurement(1.0)})


@pytest.mark.parametrize("name", BENCHMARKS)
def test_thresholds_have_names_of_their_own_and_a_sign(name: str) -> None:
    thresholds = BENCHMARKS[name].thresholds
    assert len({threshold.figure for threshold in thresholds}) == len(thresholds) > 0
    assert {threshold.sign for threshold in thresholds} <= {"<=", ">="}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        *((0.0316, "0.0316"), (7, "7"), (12.34, "12.3"), (99.97, "100")),
        *((1520.4, "1,520"), (1e5, "1e5"), (1.234e12, "1.2e12"), (None, "")),
    ],
)
def test_numbers_are_written_short(value: float | None, words: str) -> None:
    assert format_cell(value) == words


def section(tmp_path: Path) -> html.Section:
    result.write_result(tmp_path, "example", measure(quick=True))
    saved = json.loads((tmp_path / "example.json").read_text())
    return html.Section("example", 61.0, saved, b"png")


FAILED = html.Section("broken", 1.0, None, None)


def test_page_has_thresholds_tables_and_pictures(tmp_path: Path) -> None:
    changes = ResultTable("Since 1.0", ("figure", "now"), [("a", "2")])
    page = html.write_page([section(tmp_path), FAILED], entry(), changes)
    assert "1 of 2" in page
    assert page.count("MISSED") == page.count("<td>met</td>") == 1
    assert "data:image/png;base64," in page
    assert "<h3>Example &amp; more</h3>" in page
    assert "a &lt;b&gt;" in page
    assert "What ms means." in page
    assert "broken failed" in page
    assert "Since 1.0" in page
    assert "http" not in page


def test_markdown_has_every_table_and_what_does_not_hold(tmp_path: Path) -> None:
    text = html.write_markdown([section(tmp_path), FAILED], entry())
    assert "thresholds met: 1 of 2" in text
    assert text.count("| MISSED |") == text.count("| met |") == 1
    assert "python -m simulations.benchmarks.example" in text
    assert "a &lt;b&gt;" in text
    assert "What ms means." in text
    for block in text.split("\n\n"):
        if block.startswith("|"):  # the same number of columns in every line
            assert len({line.count(" | ") for line in block.splitlines()}) == 1


def test_regression_is_seen() -> None:
    before = entry(costs={"step": {"a": 1.0, "b": 2.0, "c": 3.0}})
    now = entry(costs={"step": {"a": 1.5, "b": 1.0, "c": 3.3, "new": 1.0}, "more": {}})
    table = history.compare_entries(before, now)
    assert table is not None
    assert [tuple(row) for row in table.rows] == [
        ("step: a", "1", "1.5", "1.50 times slower"),
        ("step: b", "2", "1", "2.00 times faster"),
        ("step: c", "3", "3.3", "same"),
    ]
    assert history.compare_entries(None, now) is None


def test_kept_history_can_be_read_and_is_of_benchmarks_that_are_there() -> None:
    for line in history.PATH.read_text().splitlines():
        kept = Entry(**json.loads(line))
        assert kept.costs.keys() <= BENCHMARKS.keys()
        assert all(cost > 0 for costs in kept.costs.values() for cost in costs.values())


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Benchmarks that take no time; returns the file of the history."""

    def run_alone(name: str, out: Path, quick: bool) -> html.Section:
        return replace(section(tmp_path), name=name)

    monkeypatch.setattr(bench, "run_alone", run_alone)
    monkeypatch.setattr(history, "PATH", tmp_path / "history.jsonl")
    return tmp_path / "history.jsonl"


def test_history_compares_with_the_same_machine_only(path: Path) -> None:
    assert history.load_last("cpu, 2 cores") is None
    for version, machine in (("1", "cpu, 2 cores"), ("2", "cpu, 2 cores"), ("3", "x")):
        history.append_entry(entry(version=version, machine=machine))
    assert history.load_last("cpu, 2 cores") == entry(version="2")


@pytest.mark.process
def test_all_benchmarks_run_and_only_a_record_is_kept(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.main(["--out", str(tmp_path)])
    whole = (tmp_path / "index.html").read_text()
    assert all(f"benchmarks.{name}<" in whole for name in BENCHMARKS)
    assert not path.exists()
    bench.main(["--out", str(tmp_path), "--record"])
    (line,) = path.read_text().splitlines()
    kept = Entry(**json.loads(line))
    assert kept.machine.endswith("cores")
    assert kept.version
    assert kept.commit
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- begin benchmarks -->\n<!-- end benchmarks -->\n")
    (tmp_path / "example.png").unlink()
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
    arguments: Sequence[str], path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        bench.main(arguments)
    assert left.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not path.exists()


def test_a_page_is_looked_at_before_the_benchmarks(tmp_path: Path, path: Path) -> None:
    out, page = tmp_path / "out", tmp_path / "page.md"
    page.write_text("no marks")
    assert bench.main(["--out", str(out), "--page", str(page)]) == 2
    assert not out.exists()


@pytest.mark.process
def test_failed_benchmark_fails_the_command_and_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: Path
) -> None:
    gone = html.Section("startup", 1.0, None, None)
    monkeypatch.setattr(bench, "run_alone", lambda name, out, quick: gone)
    with pytest.raises(SystemExit, match="startup"):
        bench.main(["--out", str(tmp_path), "--record"])
    assert not path.exists()
    assert "startup failed" in (tmp_path / "index.html").read_text()


@pytest.mark.process
def test_a_stale_file_is_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in ("json", "png"):
        (tmp_path / f"startup.{kind}").write_text("{}")
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert bench.run_alone("startup", tmp_path, quick=True).result is None
    assert not list(tmp_path.iterdir())
