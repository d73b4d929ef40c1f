"""Commands say in one line what is wrong with their arguments, before they start."""

import importlib
import shlex
from pathlib import Path

import pytest

FILE = "/proc/nope/x.json"  # nothing can be made there, not even as root
WRONG = {
    "simulations.study": [
        ("duel --seeds -3", "--seeds: -3 must be at least 0"),
        ("duel --seeds ten", "--seeds: invalid whole number value: 'ten'"),
        ("duel --rule ours", "--rule: invalid choice: 'ours'"),
        ("duel --set g=3", "unexpected keyword argument 'g'"),
        ("duel --nope 3", "unrecognized arguments: --nope 3"),
        ("duel --panel ours", "--panel ours: ours is no label"),
        ("duel --output /proc/nope/x", "/proc/nope"),
        ("nothing", "nothing: there is no such study"),
    ],
    "simulations.studies.pruning": [("--out x", "x must end in one of")],
    "simulations.call_graph": [("--nope", "unrecognized arguments: --nope")],
    "simulations.chaos.__main__": [
        ("--only nothing", "invalid choice: 'nothing'"),
        ("--seed -1", "--seed: -1 must be at least 0"),
        (f"--output {FILE}", "/proc/nope"),
    ],
    "simulations.benchmarks.__main__": [
        ("nothing", "nothing: the benchmarks are"),
        (f"--quick --out {FILE}", "/proc/nope"),
    ],
    "simulations.results.report": [
        ("missing.json", "missing.json is not the result of a run"),
        ("/proc", "/proc"),
    ],
    "simulations.data.own": [
        ("", "required: folder"),
        ("new num_nodes=abc", "num_nodes: Value 'abc'"),
        ("new num_nodes=-1", "count=-1 must be at least 1"),
        ("new num_nodez=3", "num_nodez: there is no such setting"),
        ("new data=nothing", "data=nothing: there is no such option"),
        (f"{FILE} data.num_examples=400", "/proc/nope"),
    ],
}


@pytest.mark.parametrize(
    ("module", "given", "words"),
    [(module, *case) for module, cases in WRONG.items() for case in cases],
)
def test_wrong_arguments_are_one_line_and_nothing_starts(
    module: str,
    given: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        code = importlib.import_module(module).main(shlex.split(given))
    except SystemExit as left:  # of the parser
        code = left.code
    assert code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert words in printed.err
    assert not list(tmp_path.iterdir())


def test_benchmarks_refuse_a_folder_before_they_measure(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from simulations.benchmarks.result import run_benchmark

    assert run_benchmark("aggregation", ["--out", "/proc/nope"]) == 2
    assert "/proc/nope" in capsys.readouterr().err


def test_chaos_empties_no_folder_of_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    chaos = importlib.import_module("simulations.chaos.__main__")
    assert chaos.main(["--output", str(tmp_path)]) == 2
    assert "thesis.tex" in capsys.readouterr().err
    assert (tmp_path / "thesis.tex").read_text() == "years of work"
