import multiprocessing
import os
import random
import resource
import shutil
import signal
import sqlite3
import stat
import threading
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from flwr_safedshb.privacy.accounting import accountant
from flwr_safedshb.privacy.ledger import database
from flwr_safedshb.privacy.ledger.admission import AdmissionRule
from flwr_safedshb.privacy.ledger.ledger import (
    BudgetExhausted,
    Ledger,
    LedgerCorrupted,
    LedgerError,
)
from flwr_safedshb.privacy.plan import PrivacyPlan
from tests.guard import HANGS

DELTA = 1e-5
# How often a writer is killed; set it higher to be surer.
KILLS = int(os.environ.get("SAFEDSHB_LEDGER_KILLS", "20"))

PLAN = PrivacyPlan(1.0, 2.0, batch_size=10, num_examples=1000)
OTHER = PrivacyPlan(1.0, 3.0, batch_size=20, num_examples=1000)
CHEAP = PrivacyPlan(1.0, 100.0, batch_size=10, num_examples=1000)

# Processes that share nothing with this one.
fresh = multiprocessing.get_context("forkserver")
fresh.set_forkserver_preload(["flwr_safedshb.privacy.ledger.ledger", "pytest"])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


def steps_charged(ledger: Ledger) -> int:
    return sum(charge.steps for charge in ledger.charges())


def run_together(*processes: BaseProcess) -> None:
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=HANGS)
        assert process.exitcode == 0


# The budget


def test_epsilon_covers_runs_restarts_and_plans(path: Path) -> None:
    with Ledger(path, max_epsilon=3.0, delta=DELTA) as ledger:
        assert ledger.epsilon() == 0
        ledger.charge(PLAN, run=1)
        ledger.charge(PLAN, steps=9, run=1)
    ledger = Ledger(path)
    ledger.charge(OTHER, steps=5, run="second")
    fixed = accountant.compute_epsilon([(PLAN, 10), (OTHER, 5)], DELTA)
    assert fixed < ledger.epsilon() == Ledger(path).epsilon() < 3.0
    assert (ledger.max_epsilon, ledger.delta) == (3.0, DELTA)
    listed = [(c.run, c.plan, c.steps) for c in ledger.charges()]
    assert listed == [("1", PLAN, 1), ("1", PLAN, 9), ("second", OTHER, 5)]
    assert all(c.time.endswith("+00:00") for c in ledger.charges())
    # Each run alone is its own first block.
    assert ledger.epsilon("second") == OTHER.epsilon(5, DELTA)
    assert ledger.epsilon(1) > PLAN.epsilon(10, DELTA)


@pytest.mark.parametrize("past", [[], [(OTHER, 3)]])
def test_last_step_that_fits_is_taken_and_no_other(
    path: Path, past: list[tuple[PrivacyPlan, int]]
) -> None:
    budget = 3 * accountant.compute_epsilon([(PLAN, 60), (OTHER, 3)], DELTA)
    ledger = Ledger(path, budget, DELTA)
    for plan, steps in past or [(PLAN, 1)]:
        ledger.charge(plan, steps)
    allowed = ledger.steps_left(PLAN)
    assert allowed >= 6
    ledger.charge(PLAN, allowed - 3)
    for _ in range(3):
        ledger.charge(PLAN)
    for again in (ledger, Ledger(path)):
        with pytest.raises(BudgetExhausted, match="nothing was charged"):
            again.charge(PLAN)
    assert ledger.steps_left(PLAN) == 0
    assert steps_charged(ledger) == allowed + sum(n for _, n in past or [(PLAN, 1)])
    assert 0.97 * budget < ledger.epsilon() <= budget


def test_exhausted_for_one_plan_may_still_have_room_for_another(path: Path) -> None:
    budget = 3 * accountant.compute_epsilon([(PLAN, 60)], DELTA)
    ledger = Ledger(path, budget, DELTA)
    with pytest.raises(BudgetExhausted):
        ledger.charge(PLAN, steps=10**6)
    assert ledger.charges() == []
    ledger.charge(PLAN, steps=3)
    with pytest.raises(BudgetExhausted):
        ledger.charge(PLAN, steps=10**6)
    ledger.charge(CHEAP)
    assert ledger.epsilon() <= budget


def test_plan_without_noise_never_fits(path: Path) -> None:
    ledger = Ledger(path, 100.0, DELTA)
    with pytest.raises(BudgetExhausted):
        ledger.charge(PrivacyPlan(1.0, 0.0, batch_size=10, num_examples=1000))


def test_many_steps_are_decided_with_little_accounting(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = 2 * accountant.compute_epsilon([(PLAN, 60)], DELTA)
    searches: list[int] = []
    search = AdmissionRule.find_max_steps

    def spy(*arguments: object) -> int:
        searches.append(1)
        return search(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(AdmissionRule, "find_max_steps", spy)
    ledger, elsewhere = Ledger(path, budget, DELTA), Ledger(path)
    for _ in range(30):
        ledger.charge(PLAN)
        elsewhere.charge(PLAN)  # must not make the first one start again
    assert len(searches) <= 3


def test_what_one_object_knows_to_fit_does_not_outlive_the_charges_of_another(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is remembered is compared with the file, and not with what was seen last."""
    budget = 2 * accountant.compute_epsilon([(PLAN, 300)], DELTA)
    ledger, elsewhere = Ledger(path, budget, DELTA), Ledger(path)
    asked: list[int] = []
    search = AdmissionRule.find_max_steps

    def spy(*arguments: object) -> int:
        asked.append(1)
        return search(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(AdmissionRule, "find_max_steps", spy)
    for _ in range(20):
        ledger.charge(PLAN)
    assert len(asked) == 1
    with pytest.raises(BudgetExhausted):
        elsewhere.charge(CHEAP, 10**8)
    elsewhere.charge(CHEAP, elsewhere.steps_left(CHEAP))
    with pytest.raises(BudgetExhausted):
        ledger.charge(PLAN)
    assert ledger.epsilon() <= budget


# The limits


def test_weaker_limits_are_refused_and_stricter_ones_bind_the_object(
    path: Path,
) -> None:
    Ledger(path, 2.0, DELTA)
    with pytest.raises(LedgerError, match="weaker than 2"):
        Ledger(path, max_epsilon=2.1)
    for delta in (1e-6, 1e-4):
        with pytest.raises(LedgerError, match="delta="):
            Ledger(path, delta=delta)
    strict = Ledger(path, max_epsilon=0.001, delta=DELTA)
    assert strict.max_epsilon == 0.001
    with pytest.raises(BudgetExhausted):
        strict.charge(PLAN)
    Ledger(path).charge(PLAN)
    assert Ledger(path).max_epsilon == 2.0


def test_missing_file_is_made_only_with_both_limits(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for limits in ({}, {"max_epsilon": 1.0}, {"delta": DELTA}):
        with pytest.raises(LedgerError, match="no ledger"):
            Ledger(path, **limits)  # type: ignore[arg-type]
    assert not path.exists()
    Ledger(path, 1.0, DELTA)
    assert "earlier releases of these data are not in it" in caplog.text
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="directory must exist"):
        Ledger(tmp_path / "absent" / "ledger.sqlite", 1.0, DELTA)


# Durability and exclusion


def test_file_is_private_and_fully_synchronous(path: Path) -> None:
    ledger = Ledger(path, 1.0, DELTA)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with ledger._file._lock_file() as connection:
        assert connection.execute("PRAGMA synchronous").fetchone() == (3,)  # EXTRA
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)
        connection.execute("INSERT INTO plans (plan) VALUES ('')")
        journal = Path(f"{path}-journal")
        assert stat.S_IMODE(journal.stat().st_mode) == 0o600
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def write_until_killed(path: Path, released: Path) -> None:
    ledger = Ledger(path)
    log = os.open(released, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    while True:
        ledger.charge(CHEAP, run=os.getpid())
        os.write(log, b"x")  # a release: what is written here must be charged
        time.sleep(0.0005)  # a gap, so that the other processes get their turn


@pytest.mark.process
def test_kill_at_any_moment_never_hides_a_release(path: Path) -> None:
    rng = random.Random(0)
    Ledger(path, 1e6, DELTA)
    logs = [path.with_suffix(f".released{i}") for i in range(2)]

    def start(log: Path) -> BaseProcess:
        before = log.stat().st_size if log.exists() else 0
        process = fresh.Process(target=write_until_killed, args=(path, log))
        process.start()
        deadline = time.monotonic() + HANGS
        while not (log.exists() and log.stat().st_size > before):
            assert process.exitcode is None
            assert time.monotonic() < deadline
            time.sleep(0.001)
        return process

    def released() -> int:
        return sum(log.stat().st_size for log in logs)

    writers = [start(log) for log in logs]
    try:
        for _ in range(KILLS):
            time.sleep(rng.uniform(0, 0.02))
            victim = rng.randrange(2)
            writers[victim].kill()
            writers[victim].join()
            assert writers[victim].exitcode == -signal.SIGKILL
            before = released()
            assert steps_charged(Ledger(path)) >= before
            writers[victim] = start(logs[victim])
    finally:
        for writer in writers:
            writer.kill()
            writer.join()
    # Each kill may waste the one charge in flight, and no more.
    wasted = steps_charged(Ledger(path)) - released()
    assert 0 <= wasted <= KILLS + 2
    assert released() > KILLS


def charge_all(path: Path, plan: PrivacyPlan, taken: Path) -> None:
    ledger = Ledger(path)
    count = 0
    try:
        while True:
            ledger.charge(plan)
            count += 1
    except BudgetExhausted:
        taken.write_text(str(count))


@pytest.mark.process
@pytest.mark.parametrize("plans", [(PLAN, PLAN), (PLAN, OTHER)])
def test_two_processes_cannot_both_take_the_last_step(
    path: Path, plans: tuple[PrivacyPlan, PrivacyPlan]
) -> None:
    ledger = Ledger(path, 2 * accountant.compute_epsilon([(PLAN, 20)], DELTA), DELTA)
    ledger.charge(PLAN)
    alone = ledger.steps_left(PLAN)
    logs = [path.with_suffix(f".taken{i}") for i in range(2)]
    run_together(
        *(
            fresh.Process(target=charge_all, args=(path, plan, log))
            for plan, log in zip(plans, logs, strict=True)
        )
    )
    taken = [int(log.read_text()) for log in logs]
    assert steps_charged(ledger) == sum(taken) + 1
    assert ledger.epsilon() <= ledger.max_epsilon
    assert [ledger.steps_left(plan) for plan in plans] == [0, 0]
    if plans == (PLAN, PLAN):
        assert sum(taken) == alone


def create_and_charge(path: Path) -> None:
    Ledger(path, 5.0, DELTA).charge(CHEAP)


@pytest.mark.process
def test_processes_that_create_at_once_share_one_ledger(path: Path) -> None:
    run_together(
        *(fresh.Process(target=create_and_charge, args=(path,)) for _ in range(4))
    )
    assert steps_charged(Ledger(path)) == 4
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.process
def test_forked_child_uses_a_connection_of_its_own(path: Path) -> None:
    ledger = Ledger(path, 5.0, DELTA)
    ledger.charge(CHEAP)
    pid = os.fork()
    if pid == 0:
        try:
            ledger.charge(CHEAP)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    ledger.charge(CHEAP)
    assert steps_charged(ledger) == 3


def test_threads_may_share_a_ledger(path: Path) -> None:
    ledger = Ledger(path, 5.0, DELTA)

    def charge() -> None:
        for _ in range(5):
            ledger.charge(CHEAP)

    threads = [threading.Thread(target=charge) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert steps_charged(ledger) == 20


def charge_on_a_full_disk(path: Path, released: Path) -> None:
    ledger = Ledger(path)
    ledger.charge(CHEAP)
    limit = path.stat().st_size  # the file cannot grow any more
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    count = 1
    try:
        while True:
            ledger.charge(CHEAP)
            count += 1
    except LedgerError as error:
        said = str(error)
    assert "release nothing" in said
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    )
    ledger.charge(CHEAP)  # usable again, without a restart
    released.write_text(str(count + 1))


@pytest.mark.process
def test_full_disk_is_a_clear_error_and_no_undercount(path: Path) -> None:
    Ledger(path, 50.0, DELTA)
    log = path.with_suffix(".released")
    run_together(fresh.Process(target=charge_on_a_full_disk, args=(path, log)))
    released = int(log.read_text())
    assert released > 10
    assert released <= steps_charged(Ledger(path)) <= released + 1


@pytest.mark.parametrize(
    ("mode", "statement", "words"),
    [
        ("mode=ro", "DELETE FROM plans", "permissions"),
        ("mode=rw", "PRAGMA max_page_count = 1; CREATE TABLE x (y)", "free space"),
        ("mode=rw", "SELECT * FROM absent", "is refused"),
    ],
)
def test_errors_of_sqlite_come_with_a_remedy(
    path: Path, mode: str, statement: str, words: str
) -> None:
    Ledger(path, 1.0, DELTA)
    connection = sqlite3.connect(f"file:{path}?{mode}", uri=True)
    with pytest.raises(sqlite3.Error) as caught:
        connection.executescript(statement)
    connection.close()
    assert words in str(database.explain_error(path, caught.value))


# Damage


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The file of a ledger with a history."""
    path = tmp_path_factory.mktemp("history") / "ledger.sqlite"
    with Ledger(path, 5.0, DELTA) as ledger:
        for step in range(40):
            ledger.charge(PLAN if step % 3 else OTHER, run=step // 10)
    return path.read_bytes()


@pytest.fixture
def spent(path: Path, history: bytes) -> Ledger:
    """A ledger with a history."""
    path.write_bytes(history)
    path.chmod(0o600)
    ledger = Ledger(path)
    ledger.close()
    return ledger


def test_damaged_bytes_are_refused_or_change_nothing(path: Path, spent: Ledger) -> None:
    rng = random.Random(1)
    whole, listed = path.read_bytes(), spent.charges()
    refused = 0
    for trial in range(200):
        damaged = bytearray(whole)
        start = rng.randrange(len(whole))
        for i in range(start, min(start + rng.choice([1, 1, 16, 512]), len(whole))):
            damaged[i] ^= rng.randrange(1, 256)
        copy = path.with_name(f"damaged{trial}.sqlite")
        copy.write_bytes(damaged)
        try:
            ledger = Ledger(copy)
            assert ledger.charges() == listed
            assert (ledger.max_epsilon, ledger.delta) == (5.0, DELTA)
        except LedgerError:
            refused += 1
    assert refused > 20  # the other bytes are free space


@pytest.mark.parametrize("left", [0, 1, 100, 4096, 0.5, 0.99])
def test_truncated_file_is_refused(path: Path, spent: Ledger, left: float) -> None:
    size = path.stat().st_size
    os.truncate(path, left if isinstance(left, int) else int(size * left))
    for limits in ({}, {"max_epsilon": 5.0, "delta": DELTA}):
        with pytest.raises(LedgerCorrupted, match="is refused"):
            Ledger(path, **limits)  # type: ignore[arg-type]


def foreign_database(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE charges (id INTEGER PRIMARY KEY)")


@pytest.mark.parametrize(
    "make",
    [
        foreign_database,
        lambda path: path.write_text("not a database at all" * 400),
        lambda path: path.write_bytes(b""),
        lambda path: path.with_name(f"{path.name}-journal").write_bytes(b"x" * 900),
    ],
)
def test_foreign_file_is_refused_and_left_alone(
    path: Path, make: Callable[[Path], object]
) -> None:
    make(path)
    before = {p.name: p.read_bytes() for p in path.parent.iterdir()}
    with pytest.raises(LedgerCorrupted, match="is refused"):
        Ledger(path, 1.0, DELTA)
    assert {p.name: p.read_bytes() for p in path.parent.iterdir()} == before


def test_a_ledger_of_another_format_is_refused_in_words(path: Path) -> None:
    Ledger(path, 1.0, DELTA).close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 1")
    connection.close()
    with pytest.raises(LedgerError, match="has format 1, and this version") as found:
        Ledger(path, 1.0, DELTA)
    assert type(found.value) is LedgerError


@pytest.mark.parametrize(
    "tampering",
    [
        "DELETE FROM entries WHERE id = 40",
        "DELETE FROM entries WHERE id = 7",
        "DELETE FROM entries",
        "UPDATE entries SET steps = 0 WHERE id = 7",
        "UPDATE entries SET run = 'x' WHERE id = 40",
        "UPDATE entries SET plan = 1 WHERE plan = 2",
        "UPDATE entries SET plan = 99 WHERE id = 7",
        "UPDATE entries SET steps = x'00' WHERE id = 7",
        "UPDATE plans SET plan = replace(plan, '2.0', '9.0')",
        "UPDATE plans SET plan = '[]' WHERE id = 1",
        "UPDATE plans SET plan = x'80' WHERE id = 1",
        "DELETE FROM plans",
        "UPDATE ledger SET max_epsilon = 50.0",
        "UPDATE ledger SET unit = 'add-remove'",
        "UPDATE ledger SET unit = 'person'",
        "UPDATE entries SET kind = 'commit' WHERE id = 7",
        "UPDATE ledger SET delta = 0.1",
        "UPDATE ledger SET max_epsilon = 'much'",
        "UPDATE ledger SET count = 39",
        "DELETE FROM ledger",
        "DROP TABLE entries",
    ],
)
def test_tampering_is_refused(path: Path, spent: Ledger, tampering: str) -> None:
    with sqlite3.connect(path) as connection:
        if "entries" in tampering and "DROP" not in tampering:
            with pytest.raises(sqlite3.IntegrityError, match="append-only"):
                connection.execute(tampering)
        for trigger in ("entries_stay", "entries_keep"):
            connection.execute(f"DROP TRIGGER {trigger}")
        connection.execute(tampering)
    connection.close()
    with pytest.raises(LedgerCorrupted, match="is refused"):
        Ledger(path)


def test_charges_that_are_changed_in_use_are_noticed(path: Path) -> None:
    """A process that lives long has read them once, and the copy to restore ages."""
    ledger = Ledger(path, 5.0, DELTA)
    for _ in range(3):
        ledger.charge(CHEAP, run="session")
    intact = path.read_bytes()
    path.write_bytes(intact.replace(b"session", b"noisses"))
    for _ in range(2):
        with pytest.raises(LedgerCorrupted, match="an entry was changed"):
            ledger.charge(CHEAP, run="session")
    path.write_bytes(intact)
    ledger.charge(CHEAP, run="session")
    assert len(ledger.charges()) == 4


def test_a_look_at_something_else_does_not_hide_a_change(path: Path) -> None:
    ledger = Ledger(path, 5.0, DELTA)
    ledger.charge(CHEAP, run="session")
    path.write_bytes(path.read_bytes().replace(b"session", b"noisses"))
    with pytest.raises(LedgerCorrupted, match="an entry was changed"):
        ledger.charge(CHEAP, run="session")


def test_file_removed_replaced_or_rolled_back_in_use_is_noticed(path: Path) -> None:
    old = path.with_name("old.sqlite")
    ledger = Ledger(path, 5.0, DELTA)
    ledger.charge(CHEAP)
    shutil.copy(path, old)
    ledger.charge(CHEAP)
    newest = path.read_bytes()
    path.write_bytes(old.read_bytes())  # rolled back in place
    for _ in range(2):  # and the refusal is no passing mood
        with pytest.raises(LedgerCorrupted, match="missing"):
            ledger.charge(CHEAP)
    path.write_bytes(newest)
    ledger.charge(CHEAP)
    old.replace(path)
    for _ in range(2):
        with pytest.raises(LedgerError, match="removed or replaced"):
            ledger.charge(CHEAP)
    path.unlink()
    with pytest.raises(LedgerError, match="removed"):
        ledger.charge(CHEAP)
