"""`safedshb ledger`: what it says is what was charged, and it changes nothing."""

import csv
import io
import json
import os
import sqlite3
from pathlib import Path

import pytest

from flwr_safedshb import cli
from flwr_safedshb.algorithm.budget import LEDGER_NAME
from flwr_safedshb.privacy.ledger.ledger import Ledger, LedgerError
from flwr_safedshb.privacy.ledger.snapshot import open_snapshot
from flwr_safedshb.privacy.plan import PrivacyPlan

ONE = PrivacyPlan(1.0, 1.0, 4, 200)
TWO = PrivacyPlan(0.5, 2.0, 10, 200, sampling="poisson")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / LEDGER_NAME
    with Ledger(path, 3.0, 1e-5) as ledger:
        ledger.charge(ONE, 5, run="a")
        ledger.charge(TWO, 7, run="b")
        ledger.charge(ONE, 2, run="b")
    return path


def state(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.iterdir()}


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(["ledger", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_show_says_what_was_spent_on_which_run_and_what_is_left(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = state(path.parent)
    code, out, _ = said(capsys, "show", str(path), "--json")
    assert code == 0
    found = json.loads(out)
    assert (found["max_epsilon"], found["delta"]) == (3.0, 1e-5)
    with Ledger(path) as ledger:
        assert found["spent"]["epsilon"] == ledger.epsilon()
        assert found["spent"]["accountant"] == "Renyi filter"
        left = {x["plan"]["noise_multiplier"]: x["steps"] for x in found["left"]}
        assert left == {1.0: ledger.steps_left(ONE), 2.0: ledger.steps_left(TWO)}
    assert found["unit"] == "replace-one"
    assert found["spent"]["steps"] == 14
    runs = {run["run"]: run for run in found["runs"]}
    assert runs["a"]["steps"] == 5
    assert runs["a"]["epsilon_alone"] == pytest.approx(ONE.epsilon(5, 1e-5))
    assert runs["b"]["steps"] == 9
    assert len(runs["b"]["plans"]) == 2
    assert state(path.parent) == before


def test_show_says_what_was_committed_and_how_much_of_it_is_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / LEDGER_NAME
    with Ledger(path, 3.0, 1e-5) as ledger:
        ledger.commit([(ONE, 40)], "a")
        ledger.charge(ONE, 5, "a")
    _, out, _ = said(capsys, "show", str(path), "--json")
    found = json.loads(out)
    assert found["spent"]["epsilon"] == ONE.epsilon(40, 1e-5)
    assert found["spent"]["accountant"] == "PLD accountant"
    (committed,) = found["committed"]
    assert (committed["steps"], committed["used"]) == (40, 5)
    _, out, _ = said(capsys, "show", str(path))
    assert "committed by run a: 40 steps of C 1," in out
    assert "5 used by all runs" in out


def test_the_table_and_every_way_to_name_a_ledger(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node = path.parent / "node.toml"
    node.write_text(f'state-dir = "{path.parent}"\nmax-epsilon = 2.0\n')
    before = state(path.parent)
    for name in (path, path.parent, node):
        code, out, _ = said(capsys, "show", str(name))
        assert code == 0
        lines = [line for line in out.splitlines() if line.startswith("left:")]
        assert len(lines) == 2
        assert "allowed: epsilon = 3 at delta = 1e-05" in out
        assert "after 14 steps" in out
    assert state(path.parent) == before
    node.write_text("max-epsilon = 2.0\n")
    assert said(capsys, "show", str(node))[0] == cli.USAGE


def test_export_writes_every_charge(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = said(capsys, "export", str(path))
    assert code == 0
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [(row["run"], row["steps"]) for row in rows] == [
        ("a", "5"),
        ("b", "7"),
        ("b", "2"),
    ]
    assert {row["sampling"] for row in rows} == {"fixed", "poisson"}
    output = tmp_path / "charges.json"
    asked = ("export", str(path), "--format", "json", "--output", str(output))
    assert said(capsys, *asked)[:2] == (0, "")
    charges = json.loads(output.read_text())
    with Ledger(path) as ledger:
        assert [c["time"] for c in charges] == [c.time for c in ledger.charges()]
    assert charges[1]["noise_multiplier"] == 2.0
    content = output.read_bytes()
    code, _, err = said(capsys, *asked)
    assert code == cli.USAGE
    assert "not overwritten" in err
    assert output.read_bytes() == content


def test_a_missing_or_damaged_ledger_ends_in_1_and_stays_so(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nothing = path.parent / "state"
    code, out, err = said(capsys, "show", str(nothing / LEDGER_NAME))
    assert (code, out) == (1, "")
    assert "there is no ledger" in err
    assert not nothing.exists()
    content = path.read_bytes()
    path.write_bytes(content[:2000] + b"\xff" * 3000 + content[5000:])
    before = state(path.parent)
    code, out, err = said(capsys, "show", str(path))
    assert (code, out) == (1, "")
    assert "is refused" in err
    assert str(path) in err
    assert state(path.parent) == before


def test_an_empty_ledger(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Ledger(tmp_path / LEDGER_NAME, 3.0, 1e-5).close()
    code, out, _ = said(capsys, "show", str(tmp_path))
    assert code == 0
    assert "epsilon = 0 at delta = 1e-05 after 0 steps" in out
    assert len(said(capsys, "export", str(tmp_path))[1].splitlines()) == 1


def test_a_snapshot_while_another_is_charging(path: Path) -> None:
    """Readers do not wait for the end of a transaction, and see none of it."""
    writer = sqlite3.connect(path, isolation_level=None)
    writer.execute("BEGIN IMMEDIATE")
    writer.execute("UPDATE ledger SET count = 99")
    with open_snapshot(path) as ledger:
        assert len(ledger.charges()) == 3
    writer.execute("ROLLBACK")
    writer.close()


def test_what_a_dead_writer_left_is_undone_in_the_copy_alone(
    path: Path, tmp_path: Path
) -> None:
    writer = sqlite3.connect(path, isolation_level=None)
    writer.execute("PRAGMA cache_spill = 1")
    writer.execute("PRAGMA cache_size = 1")
    writer.execute("BEGIN IMMEDIATE")
    writer.execute("UPDATE ledger SET count = 99")
    for number in range(200):
        text = f"{number}" + "0" * 4000
        writer.execute("INSERT INTO plans (plan) VALUES (?)", (text,))
    dead = tmp_path / "dead"
    dead.mkdir()
    journal = path.with_name(f"{path.name}-journal")
    for file in (path, journal):
        (dead / file.name).write_bytes(file.read_bytes())
    writer.execute("ROLLBACK")
    writer.close()
    before = state(dead)
    with open_snapshot(dead / path.name) as ledger:
        assert len(ledger.charges()) == 3
    assert state(dead) == before
    (dead / journal.name).unlink()
    with pytest.raises(LedgerError), open_snapshot(dead / path.name):
        pass


ODD = '=HYPERLINK("http://x","\x1b[31m\u202e")\r\nrun'


def written_before(path: Path, *names: str) -> None:
    """Write charges under names that a ledger no longer takes."""
    with Ledger(path) as ledger:
        for name in names:
            with ledger._file.transaction():
                ledger._file.append("charge", ONE, 1, name)


def test_odd_names_of_old_ledgers_are_shown_as_text(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    starts = ["", "=", "+", "-", "@", " =", "\t=", "\r=", "\uff1d", "a;"]
    written_before(path, *(start + ODD for start in starts))
    for arguments in (("show",), ("show", "--json"), ("export",)):
        code, out, _ = said(capsys, *arguments, str(path))
        assert code == 0
        assert {c for c in out if not c.isprintable()} == {"\n"}
    rows = list(csv.DictReader(io.StringIO(out)))
    assert len(rows) == 3 + len(starts)
    for row in rows[3:]:
        assert row["run"][0] not in "=+-@ \t\r\uff1d"
        # Where a semicolon ends a cell there is no second one.
        assert ";" not in row["run"]
        assert "HYPERLINK" in row["run"]


@pytest.mark.parametrize("name", [ODD, "a b", "-1", ".", "x" * 65, "é", "a\n"])
def test_a_ledger_takes_plain_names_only(path: Path, name: str) -> None:
    with Ledger(path) as ledger:
        with pytest.raises(ValueError, match="run="):
            ledger.charge(ONE, run=name)
        assert len(ledger.charges()) == 3


def test_an_export_is_its_owners_whatever_the_umask(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, before = tmp_path / "charges.csv", os.umask(0)
    try:
        assert said(capsys, "export", str(path), "--output", str(output))[0] == 0
    finally:
        os.umask(before)
    assert output.stat().st_mode & 0o777 == 0o600


def test_follow_shows_the_ledger_again_after_a_charge(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0

    def sleep(_: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 2:
            with Ledger(path) as ledger:
                ledger.charge(ONE, 1, run="c")
        if looks == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr("flwr_safedshb.cli.ledger.time.sleep", sleep)
    code, out, _ = said(capsys, "show", str(path), "--follow")
    assert code == 0
    spent = [line for line in out.splitlines() if line.startswith("spent:")]
    assert len(spent) == 2
    assert "14 steps" in spent[0]
    assert "15 steps" in spent[1]


def test_follow_ends_where_there_is_no_ledger(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = said(capsys, "show", str(tmp_path / "none.sqlite"), "--follow")
    assert code == 1
    assert "there is no ledger" in err
