"""The journal as a file: what it keeps, when it is durable, and which files it refuses."""

import errno
import os
import sqlite3
import stat
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from baffle.core.messages import encode
from baffle.core.state import apply, chain_next, chain_start
from baffle.errors import ChainError, FullDiskError, JournalError, RunFolderError
from baffle.journal.database import NETWORKED, SIMULATED, writing
from baffle.journal.store import Journal
from baffle.plan import Plan
from tests.support.journals import N, Written, change, database, outcome_of

Begin = Callable[[float], Written]


@pytest.fixture
def begin(tiny: Callable[..., Plan], tmp_path: Path) -> Iterator[Begin]:
    """Begins a journal that commits rounds after so many seconds. It is closed when the test ends."""
    begun: list[Written] = []

    def new(commit_seconds: float) -> Written:
        begun.append(Written.begin(tmp_path, tiny("ring.n_max=20", f"run.commit_seconds={commit_seconds}")))
        return begun[-1]

    yield new
    for written in begun:
        written.journal.close()


@pytest.fixture
def run(begin: Begin) -> Written:
    """A run whose rounds are committed only when `commit` is called."""
    return begin(3600)


@pytest.fixture
def durable(begin: Begin) -> Written:
    return begin(0)


def test_what_is_appended_is_read_back(run: Written) -> None:
    for number in range(4):
        run.append()
        assert run.journal.length() == number + 1
    entries = list(run.journal.entries())
    assert [entry.round for entry in entries] == [0, 1, 2, 3]
    assert [entry.outcome() for entry in entries] == [outcome_of(number) for number in range(4)]
    assert entries[-1].chain == run.present.chain
    assert list(run.journal.entries(2)) == entries[2:]
    assert run.journal.entry(1) == entries[1]
    with pytest.raises(ChainError, match="round 4 is missing") as missing:
        run.journal.entry(4)
    assert missing.value.round_number == 4


def test_the_chain_covers_trajectory_start_outcomes_and_states(run: Written) -> None:
    rule, digest = run.trajectory.rule, run.trajectory.digest
    state = initial = run.present.state
    chain = chain_start(digest, state)
    assert run.present.chain == chain
    for number in range(3):
        state = apply(rule, state, outcome_of(number))
        chain = chain_next(chain, encode(outcome_of(number)), state)
        assert run.append().chain == chain
    starts = {chain_start(digest, initial), chain_start(bytes(32), initial), chain_start(digest, state)}
    assert len(starts) == 3
    others = ((bytes(32), b"a", state), (chain, b"b", state), (chain, b"a", initial))
    assert len({chain_next(*parts) for parts in ((chain, b"a", state), *others)}) == 4


def test_metrics_are_kept_in_order_with_who_took_part(run: Written) -> None:
    for _ in range(3):
        run.append()
    run.journal.commit()
    assert list(run.journal.metrics()) == [{"round": number, "loss": 1.5} for number in range(3)]
    with database(run.folder) as db:
        rows = db.execute("SELECT * FROM participation WHERE round = 0 ORDER BY client").fetchall()
    assert rows == [(0, 0, "contributed"), (0, 2, "missing")]
    assert run.journal.participation.contributions(3) == {0: 3, 2: 2}
    assert run.journal.participation.last_contributions(3) == {0: 2, 2: 2}


def test_the_initial_and_the_two_newest_snapshots_are_kept(run: Written) -> None:
    assert run.journal.snapshot_numbers() == [0]
    states = [run.present.state]
    states += [run.append(snapshot=number % 2 == 0).state for number in range(1, 8)]
    assert run.journal.snapshot_numbers() == [0, 4, 6]
    for number in (0, 4, 6):
        assert run.journal.snapshot(run.trajectory.rule, number).digest() == states[number].digest()
    with pytest.raises(JournalError, match=r"no snapshot 2; it has \[0, 4, 6\]"):
        run.journal.snapshot(run.trajectory.rule, 2)


def test_plan_and_size_are_kept_and_the_plan_may_be_extended(run: Written, tiny: Callable[..., Plan]) -> None:
    assert run.journal.plan() == run.trajectory.plan
    assert run.journal.n_weights() == N
    longer = tiny("ring.n_max=20", "rounds=99")
    run.journal.extend(longer)
    assert run.journal.plan() == longer
    run.journal.extend(tiny("ring.n_max=20", "seed=1"))
    with pytest.raises(ChainError, match="round 0") as changed:
        run.journal.plan()
    assert changed.value.round_number == 0


# When a round is durable


def test_rounds_are_committed_in_groups_and_a_reader_sees_whole_groups(run: Written) -> None:
    for _ in range(3):
        run.append()
    assert run.seen() == 0
    run.journal.commit()
    run.append()
    assert run.seen() == 3
    run.journal._committed -= 3601  # the time of a group is up
    run.append()
    assert run.seen() == 5


def test_with_no_time_between_commits_every_round_is_durable_at_once_with_its_metrics(durable: Written) -> None:
    for number in range(3):
        durable.append()
        with Journal.open(durable.path) as reader:
            assert reader.length() == number + 1
            assert list(reader.metrics())[number] == {"round": number, "loss": 1.5}
            assert reader.participation.contributions(3)[0] == number + 1


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit])
def test_a_round_that_is_interrupted_while_it_is_written_leaves_nothing(
    durable: Written, monkeypatch: pytest.MonkeyPatch, interruption: type[BaseException]
) -> None:
    """A signal may come between two rows. When the journal is closed then, the first must not be committed."""

    def interrupted(_state: object) -> bytes:
        raise interruption

    durable.append()
    with monkeypatch.context() as patched:
        patched.setattr("baffle.journal.store.pack", interrupted)
        with pytest.raises(interruption):
            durable.append(snapshot=True)
    durable.journal.commit()
    with Journal.open(durable.path) as journal:
        assert journal.length() == 1
        assert len(list(journal.metrics())) == 1
        assert journal.participation.last_contributions(3) == {0: 0}


@pytest.mark.parametrize("errorcode", [sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_CORRUPT])
@pytest.mark.parametrize("number", [errno.EDQUOT, errno.EIO])
def test_a_full_quota_is_told_from_a_broken_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, errorcode: int, number: int
) -> None:
    """SQLite reports both as the same error, so a file is written to find out."""
    path = tmp_path / "journal.sqlite"
    fault = sqlite3.OperationalError("disk I/O error")
    fault.sqlite_errorcode = errorcode

    def no_room(_file: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("os.fsync", no_room)
    full = number != errno.EIO and errorcode != sqlite3.SQLITE_CORRUPT
    with closing(sqlite3.connect(path)) as db, pytest.raises(RunFolderError, match="cannot be written: ") as raised:  # noqa: SIM117
        with writing(db, path):
            raise fault
    assert isinstance(raised.value, FullDiskError) is full
    assert (os.strerror(number) in str(raised.value)) is full
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_a_round_that_cannot_be_written_whole_is_not_written(durable: Written, tmp_path: Path) -> None:
    start = durable.append()
    change(durable.folder, "INSERT INTO metrics VALUES (1, '{}')")
    with pytest.raises(RunFolderError, match="cannot be written"):
        durable.append()
    durable.journal.commit()
    assert durable.seen() == 1
    with Journal.open(durable.path) as reader, pytest.raises(RunFolderError, match="cannot be written"):
        reader.append(start.chain, outcome_of(1), start.state)
    with pytest.raises(RunFolderError, match="cannot be opened"):
        Journal.create(tmp_path / "missing" / "journal.sqlite", durable.trajectory.plan, start.state, {})


def test_one_view_is_of_one_moment(durable: Written) -> None:
    durable.append(snapshot=True)
    with Journal.open(durable.path) as reader:
        with reader.one_view():
            assert reader.length() == 1
            for _ in range(3):
                durable.append(snapshot=True)
            assert reader.length() == 1
            assert reader.snapshot_numbers() == [0, 1]
        assert reader.length() == 4


def test_a_closed_journal_is_one_plain_file_and_while_it_is_open_all_are_their_owners_alone(
    tiny: Callable[..., Plan], tmp_path: Path
) -> None:
    before = os.umask(0)
    run = Written.begin(tmp_path, tiny("ring.n_max=20"))
    os.umask(before)
    run.append()
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in tmp_path.glob("journal*")}
    assert modes == dict.fromkeys(("journal.sqlite", "journal.sqlite-shm", "journal.sqlite-wal"), 0o600)
    run.journal.close()
    assert list(tmp_path.glob("journal.sqlite*")) == [run.path]
    assert run.seen() == 1


def test_closing_does_not_wait_for_a_reader_to_end(tiny: Callable[..., Plan], tmp_path: Path) -> None:
    run = Written.begin(tmp_path, tiny("ring.n_max=20"))
    run.append()
    run.journal.commit()
    with Journal.open(run.path) as reader:
        entries = reader.entries()
        assert next(entries).round == 0
        run.journal.close()
        assert list(entries) == []
    assert run.seen() == 1


# Which files are refused


def test_a_journal_has_begun_when_it_was_created_in_full(tiny: Callable[..., Plan], tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    assert not Journal.begun(path)
    assert not path.exists()
    path.touch()
    assert not Journal.begun(path)
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("BEGIN")
        db.execute("CREATE TABLE run (format TEXT)")
    assert not Journal.begun(path)
    with Written.begin(tmp_path, tiny("ring.n_max=20")).journal as journal:
        assert Journal.begun(path)
        assert journal.snapshot_numbers() == [0]
        assert journal.length() == 0


NO_DATABASE = b"this is not a database, whatever it claims to be" * 99


@pytest.mark.parametrize("commit_seconds", [None, 0.0])
def test_a_file_that_is_no_database_is_refused(tmp_path: Path, commit_seconds: float | None) -> None:
    path = tmp_path / "journal.sqlite"
    with pytest.raises(JournalError, match=r"journal\.sqlite is missing"):
        Journal.open(path, commit_seconds=commit_seconds)
    path.write_bytes(NO_DATABASE)
    with pytest.raises((JournalError, RunFolderError), match=r"journal\.sqlite"):
        Journal.open(path, commit_seconds=commit_seconds)
    with pytest.raises(JournalError, match="damaged or not a journal"):
        Journal.begun(path)
    assert path.read_bytes() == NO_DATABASE


@pytest.mark.parametrize(
    "statement",
    [f"UPDATE run SET format = '{NETWORKED}'", "UPDATE run SET format = 'baffle-journal/3'", "DELETE FROM run"],
)
def test_a_journal_of_another_version_is_refused(run: Written, statement: str) -> None:
    change(run.folder, statement)
    for commit_seconds in (None, 0.0):
        with pytest.raises(JournalError, match=f"expected '{SIMULATED}'.*another version"):
            Journal.open(run.path, commit_seconds=commit_seconds)
