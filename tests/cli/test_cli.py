"""The `safedshb` command: what it says, to whom, and with which exit code."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

import flwr_safedshb
from flwr_safedshb import aggregation, attacks, cli
from flwr_safedshb.cli import _listing, rules
from flwr_safedshb.theory import (
    kappa_nnm,
    kappa_smea,
    kappa_smea_paper,
    kappa_trimmed_mean,
)
from tests.guard import HANGS

COMMAND = [sys.executable, "-c", "import sys; from flwr_safedshb.cli import main; "]
COMMAND[-1] += "sys.exit(main())"
COMMANDS = sorted(
    path.stem
    for path in Path(cli.__file__).parent.glob("*.py")
    if not path.stem.startswith("_")
)


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def on_a_terminal(*arguments: str, **environment: str) -> bytes:
    """Return what a command writes to a terminal."""
    master, slave = pty.openpty()
    child = subprocess.Popen(
        [*COMMAND, *arguments],
        stdout=slave,
        stderr=slave,
        env={**os.environ, "TERM": "xterm-256color", **environment},
    )
    os.close(slave)
    written = b""
    try:
        while chunk := os.read(master, 65536):
            written += chunk
    except OSError:  # on Linux, how a closed terminal ends
        pass
    os.close(master)
    assert child.wait(timeout=HANGS) == 0
    return written


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself_with_examples(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main([command, "--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert f"\n  safedshb {command}" in text
    assert max(map(len, text.splitlines())) <= 90


def test_help_names_commands_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    for command in COMMANDS:
        assert f"\n    {command} " in text
    for code in (cli.YES, cli.NO, cli.USAGE, cli.INTERRUPTED):
        assert f" {code} " in text


@pytest.mark.parametrize("wrong", [["nothing"], [], ["rules", "--n", "many"]])
def test_what_is_not_understood_is_two(
    wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(wrong)
    assert stopped.value.code == cli.USAGE
    line, *more = capsys.readouterr().err.splitlines()
    assert line.startswith("safedshb")
    assert line.endswith("--help)")
    assert not more


def test_what_is_out_of_bounds_is_two(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = said(capsys, "rules", "--n", "4", "--f", "2")
    assert (code, out) == (cli.USAGE, "")
    assert err.startswith("safedshb rules: f=2 needs n > 2f, got n=4; lower f")


def test_rules_for_a_program(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said(capsys, "rules", "--n", "50", "--f", "10", "--json")
    assert code == cli.YES
    found = {row["rule"].partition("(")[0]: row for row in json.loads(out)}
    public = {
        name
        for name in flwr_safedshb.__all__
        if isinstance(kind := getattr(flwr_safedshb, name), type)
        and issubclass(kind, aggregation.Rule)
    }
    assert found.keys() >= public
    assert found["SMEA"]["kappa"] == kappa_smea(50, 10)
    assert found["SMEA"]["notion"] == "spectral"
    assert found["SMEA"]["paper_kappa"] == kappa_smea_paper(50, 10)
    bounded = next(r for r in json.loads(out) if r["rule"] == "Filter(spectral_bound)")
    assert bounded["notion"] == "spectral bound"
    assert bounded["spectral_kappa"] is None
    assert (bounded["kappa"], bounded["paper_kappa"]) == (1.0, 2000 / 900 + 0.5)
    # n - f - 1 = 39 times as much in the spectral sense.
    assert found["Krum"]["spectral_kappa"] == 39 * found["Krum"]["kappa"]
    assert found["Krum"]["paper_kappa"] is None
    assert found["Average"]["kappa"] is found["Average"]["notion"] is None
    assert found["NNM"]["kappa"] == kappa_nnm(50, 10, kappa_trimmed_mean(50, 10))
    assert found["Median"]["needs"] == "coordinates"


def test_rules_for_people(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    code, out, _ = said(capsys, "rules")
    assert code == cli.YES
    rows = [line.split() for line in out.splitlines() if "()" in line]
    assert rows[0][:3] == ["SMEA()", "12", "one"]
    both = [row[:3] for row in rows]
    assert ["Krum()", "24", "all"] in both
    assert "(one: 72)" in " ".join(out.split())
    assert ["Filter()", "-", "-"] in [r[:3] for r in rows]
    assert "Filter(spectral_bound)" in out
    assert "The paper's kappa: 48." in " ".join(out.split())
    code, out, _ = said(capsys, "rules", "--d", "1", "--n", "7", "--f", "2")
    rows = [line.split() for line in out.splitlines() if "()" in line]
    # One dimension: both senses are one. And Filter has a constant for f < n/3.
    both = [row[:3] for row in rows]
    assert ["Krum()", "10", "all"] in both
    assert "(one: 10)" in " ".join(out.split())
    assert ["Filter()", "20.99", "one"] in both


def test_attacks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = said(capsys, "attacks", "--json")
    assert code == cli.YES
    listed = {row["attack"]: row for row in json.loads(out)}
    found = {
        name: listed[name]
        for name in flwr_safedshb.__all__
        if isinstance(kind := getattr(flwr_safedshb, name), type)
        and issubclass(kind, attacks.Attack)
    }
    searching = {name for name, row in found.items() if row["knows_rule"]}
    assert searching >= {"ALIE", "FOE", "Drift", "MimicShift", "Strongest"}
    assert found["LabelFlip"]["on"] == "data"
    assert found["ALIE"]["on"] != "data"
    assert found["Gaussian"]["options"] == {"std": 200.0}
    monkeypatch.setenv("COLUMNS", "100")
    assert "ALIE()" in said(capsys, "attacks")[1]


def test_classes_that_only_others_build_on_are_not_listed() -> None:
    names = [kind.__name__ for kind in _listing.find_classes(attacks, attacks.Attack)]  # type: ignore[type-abstract]
    assert names == sorted(names)
    assert not {"Attack", "SearchedAttack", "_DistanceBounded"} & set(names)


@pytest.mark.process
def test_colours_are_for_terminals_only() -> None:
    piped = subprocess.run([*COMMAND, "rules"], capture_output=True, check=True)
    assert b"SMEA" in piped.stdout
    assert b"\x1b" not in piped.stdout
    assert b"\x1b[1m" in on_a_terminal("rules")


@pytest.mark.process
@pytest.mark.parametrize("more", [[], ["--json"]])
def test_a_reader_that_leaves_early_hears_nothing(more: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [*COMMAND, "rules", *more]
    ran = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (ran.returncode, ran.stderr) == (cli.NO, b"")


def test_ctrl_c_is_told_without_a_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(arguments: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(rules, "run", stopped)
    assert said(capsys, "rules") == (cli.INTERRUPTED, "", "safedshb rules: stopped\n")


@pytest.mark.process
def test_help_waits_for_nothing_heavy() -> None:
    script = (
        "import sys; from flwr_safedshb.cli import _make_parser; _make_parser(); "
        "print({'torch', 'numpy', 'flwr', 'rich', 'scipy'} & set(sys.modules))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == "set()"
