"""The journal as a file: what it keeps, when it is durable, and which files it refuses."""

import errno
import os
import sqlite3
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from baffle.core.chain import Present, chain_next, chain_start
from baffle.core.messages import Group, Outcome, encode
from baffle.core.state import apply
from baffle.errors import ChainError, FullDiskError, JournalError, RunFolderError
from baffle.journal.database import NETWORKED, SIMULATED, writing
from baffle.journal.store import Journal
from baffle.lineage import Lineage
from baffle.plan import Plan, change
from baffle.trajectory import Trajectory, trajectory_of

N = 5


@pytest.fixture
def trajectory(tiny: Callable[..., Plan]) -> Trajectory:
    return trajectory_of(tiny("ring.n_max=20"), N)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.sqlite"


@pytest.fixture
def journal(trajectory: Trajectory, path: Path) -> Iterator[Journal]:
    """A new journal that commits rounds only when `commit` is called."""
    new = Journal.create(path, _slow(trajectory.plan), trajectory.rule.start(np.ones(N, np.float32)), {"numpy": "2"})
    yield new
    new.close()


def _slow(plan: Plan) -> Plan:
    return change(plan, ["run.commit_seconds=3600"])


def _start(trajectory: Trajectory) -> Present:
    return Lineage(trajectory).beginning(trajectory.rule.start(np.ones(N, np.float32)))


def _outcome(number: int) -> Outcome:
    totals = np.random.default_rng(number).integers(-1000, 1000, 4).astype("<i4").tobytes()
    return Outcome(number, "scalars", (Group(number, totals, 30),))


def _append(journal: Journal, trajectory: Trajectory, present: Present, *, snapshot: bool = False) -> Present:
    outcome = _outcome(present.round)
    state = apply(trajectory.rule, present.state, outcome)
    who = {0: "contributed", 2: "contributed" if present.round else "missing"}
    chain = journal.append(present.chain, outcome, state, snapshot=snapshot, metrics={"loss": 1.5}, participation=who)
    return Present(present.round + 1, state, chain)


def test_what_is_appended_is_read_back(journal: Journal, trajectory: Trajectory) -> None:
    present = _start(trajectory)
    for number in range(4):
        present = _append(journal, trajectory, present)
        assert journal.length() == number + 1
    entries = list(journal.entries())
    assert [entry.round for entry in entries] == [0, 1, 2, 3]
    assert [entry.outcome() for entry in entries] == [_outcome(number) for number in range(4)]
    assert entries[-1].chain == present.chain
    assert list(journal.entries(2)) == entries[2:]
    assert journal.entry(1) == entries[1]
    with pytest.raises(ChainError, match="round 4 is missing") as missing:
        journal.entry(4)
    assert missing.value.round_number == 4


def test_the_chain_covers_trajectory_start_outcomes_and_states(journal: Journal, trajectory: Trajectory) -> None:
    state = trajectory.rule.start(np.ones(N, np.float32))
    chain = chain_start(trajectory.digest, state)
    present = _start(trajectory)
    assert present.chain == chain
    for number in range(3):
        state = apply(trajectory.rule, state, _outcome(number))
        chain = chain_next(chain, encode(_outcome(number)), state)
        present = _append(journal, trajectory, present)
        assert present.chain == chain
    other = trajectory.rule.start(np.zeros(N, np.float32))
    assert (
        len(
            {
                chain_start(trajectory.digest, state),
                chain_start(bytes(32), state),
                chain_start(trajectory.digest, other),
            }
        )
        == 3
    )
    bits = {
        chain_next(chain, b"a", state),
        chain_next(bytes(32), b"a", state),
        chain_next(chain, b"b", state),
        chain_next(chain, b"a", other),
    }
    assert len(bits) == 4


def test_metrics_are_kept_in_order_with_who_took_part(journal: Journal, trajectory: Trajectory, path: Path) -> None:
    present = _start(trajectory)
    for _ in range(3):
        present = _append(journal, trajectory, present)
    journal.commit()
    assert list(journal.metrics()) == [{"round": number, "loss": 1.5} for number in range(3)]
    with sqlite3.connect(path) as db:
        rows = db.execute("SELECT * FROM participation WHERE round = 0 ORDER BY client").fetchall()
    db.close()
    assert rows == [(0, 0, "contributed"), (0, 2, "missing")]
    assert journal.participation.contributions(3) == {0: 3, 2: 2}
    assert journal.participation.last_contributions(3) == {0: 2, 2: 2}


def test_the_initial_and_the_two_newest_snapshots_are_kept(journal: Journal, trajectory: Trajectory) -> None:
    present = _start(trajectory)
    assert journal.snapshot_numbers() == [0]
    kept = {0: present.state}
    for number in range(1, 8):
        present = _append(journal, trajectory, present, snapshot=number % 2 == 0)
        kept[number] = present.state
    assert journal.snapshot_numbers() == [0, 4, 6]
    for number in (0, 4, 6):
        assert journal.snapshot(trajectory.rule, number).digest() == kept[number].digest()
    with pytest.raises(JournalError, match=r"no snapshot 2; it has \[0, 4, 6\]"):
        journal.snapshot(trajectory.rule, 2)


def test_plan_and_size_are_kept_and_the_plan_may_be_extended(
    journal: Journal, trajectory: Trajectory, tiny: Callable[..., Plan]
) -> None:
    assert journal.plan() == _slow(trajectory.plan)
    assert journal.n_weights() == N
    longer = tiny("ring.n_max=20", "rounds=99")
    journal.extend(longer)
    assert journal.plan() == longer
    journal.extend(tiny("ring.n_max=20", "seed=1"))
    with pytest.raises(ChainError, match="round 0") as changed:
        journal.plan()
    assert changed.value.round_number == 0


def test_a_round_is_recorded_once(journal: Journal, trajectory: Trajectory) -> None:
    start = _start(trajectory)
    _append(journal, trajectory, start)
    with pytest.raises(RunFolderError):
        _append(journal, trajectory, start)


def _seen(path: Path) -> int:
    reader = Journal.open(path)
    try:
        return reader.length()
    finally:
        reader.close()


def test_rounds_are_committed_in_groups_and_a_reader_sees_whole_groups(
    journal: Journal, trajectory: Trajectory, path: Path
) -> None:
    present = _start(trajectory)
    for _ in range(3):
        present = _append(journal, trajectory, present)
    assert _seen(path) == 0
    journal.commit()
    assert _seen(path) == 3
    _append(journal, trajectory, present)
    assert _seen(path) == 3


def test_a_group_is_committed_when_its_time_is_up(
    trajectory: Trajectory, path: Path, tiny: Callable[..., Plan]
) -> None:
    plan = tiny("ring.n_max=20", "run.commit_seconds=0.2")
    journal = Journal.create(path, plan, _start(trajectory).state, {})
    present = _append(journal, trajectory, _start(trajectory))
    assert _seen(path) == 0
    time.sleep(0.25)
    _append(journal, trajectory, present)
    assert _seen(path) == 2
    journal.close()


def test_with_no_time_between_commits_every_round_is_durable_at_once(
    trajectory: Trajectory, path: Path, tiny: Callable[..., Plan]
) -> None:
    journal = Journal.create(path, tiny("ring.n_max=20", "run.commit_seconds=0"), _start(trajectory).state, {})
    present = _start(trajectory)
    for number in range(3):
        present = _append(journal, trajectory, present)
        assert _seen(path) == number + 1
    journal.close()


def test_a_round_is_durable_together_with_its_metrics(
    trajectory: Trajectory, path: Path, tiny: Callable[..., Plan]
) -> None:
    journal = Journal.create(path, tiny("ring.n_max=20", "run.commit_seconds=0"), _start(trajectory).state, {})
    _append(journal, trajectory, _start(trajectory))
    reader = Journal.open(path)
    assert list(reader.metrics()) == [{"round": 0, "loss": 1.5}]
    assert reader.participation.contributions(3) == {0: 1}
    reader.close()
    journal.close()


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit])
def test_a_round_that_is_interrupted_while_it_is_written_leaves_nothing(
    trajectory: Trajectory, path: Path, monkeypatch: pytest.MonkeyPatch, interruption: type[BaseException]
) -> None:
    """A signal may come between two rows; whoever closes the journal then must not commit the first."""

    def interrupted(_state: object) -> bytes:
        raise interruption

    plan = change(trajectory.plan, ["run.commit_seconds=0"])
    with Journal.create(path, plan, trajectory.rule.start(np.ones(N, np.float32)), {}) as journal:
        present = _append(journal, trajectory, _start(trajectory))
        monkeypatch.setattr("baffle.journal.store.pack", interrupted)
        with pytest.raises(interruption):
            _append(journal, trajectory, present, snapshot=True)
    with Journal.open(path) as journal:
        assert journal.length() == 1
        assert len(list(journal.metrics())) == 1
        assert journal.participation.last_contributions(3) == {0: 0}


@pytest.mark.parametrize("errorcode", [sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_CORRUPT])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO])
def test_a_full_quota_is_told_from_a_broken_disk(
    path: Path, monkeypatch: pytest.MonkeyPatch, errorcode: int, number: int
) -> None:
    """SQLite reports both as the same error, so a file is written to find out."""
    fault = sqlite3.OperationalError("disk I/O error")
    fault.sqlite_errorcode = errorcode

    def no_room(_file: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("os.fsync", no_room)
    full = number != errno.EIO and errorcode != sqlite3.SQLITE_CORRUPT
    with sqlite3.connect(path) as db, pytest.raises(RunFolderError, match="cannot be written: ") as raised:  # noqa: SIM117
        with writing(db, path):
            raise fault
    db.close()
    assert isinstance(raised.value, FullDiskError) is full
    assert (os.strerror(number) in str(raised.value)) is full
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_round_that_cannot_be_written_whole_is_not_written(
    trajectory: Trajectory, path: Path, tiny: Callable[..., Plan]
) -> None:
    journal = Journal.create(path, tiny("ring.n_max=20", "run.commit_seconds=0"), _start(trajectory).state, {})
    present = _append(journal, trajectory, _start(trajectory))
    db = sqlite3.connect(path)
    db.execute("INSERT INTO metrics VALUES (1, '{}')")
    db.commit()
    db.close()
    with pytest.raises(RunFolderError, match="cannot be written"):
        _append(journal, trajectory, present)
    journal.close()
    assert _seen(path) == 1


def test_one_view_is_of_one_moment(trajectory: Trajectory, path: Path, tiny: Callable[..., Plan]) -> None:
    journal = Journal.create(path, tiny("ring.n_max=20", "run.commit_seconds=0"), _start(trajectory).state, {})
    present = _append(journal, trajectory, _start(trajectory), snapshot=True)
    reader = Journal.open(path)
    with reader.one_view():
        assert reader.length() == 1
        for _ in range(3):
            present = _append(journal, trajectory, present, snapshot=True)
        assert reader.length() == 1
        assert reader.snapshot_numbers() == [0, 1]
    assert reader.length() == 4
    reader.close()
    journal.close()


def test_what_was_committed_survives_a_process_that_just_goes_away(
    trajectory: Trajectory, path: Path, tmp_path: Path
) -> None:
    journal = Journal.create(path, _slow(trajectory.plan), _start(trajectory).state, {})
    present = _start(trajectory)
    for _ in range(3):
        present = _append(journal, trajectory, present)
    journal.commit()
    _append(journal, trajectory, present)
    (tmp_path / "copy").mkdir()
    for file in tmp_path.glob("journal.sqlite*"):
        (tmp_path / "copy" / file.name).write_bytes(file.read_bytes())
    journal.close()
    again = Journal.open(tmp_path / "copy" / path.name, commit_seconds=0)
    assert again.length() == 3
    assert again.entry(2).chain == present.chain
    again.close()


def test_a_closed_journal_is_one_plain_file(trajectory: Trajectory, path: Path) -> None:
    journal = Journal.create(path, trajectory.plan, _start(trajectory).state, {})
    _append(journal, trajectory, _start(trajectory))
    assert len(list(path.parent.glob("journal.sqlite*"))) > 1
    journal.close()
    assert list(path.parent.glob("journal.sqlite*")) == [path]
    assert _seen(path) == 1


def test_closing_waits_for_nobody_who_reads(trajectory: Trajectory, path: Path) -> None:
    journal = Journal.create(path, trajectory.plan, _start(trajectory).state, {})
    _append(journal, trajectory, _start(trajectory))
    journal.commit()
    reader = Journal.open(path)
    entries = reader.entries()
    assert next(entries).round == 0
    began = time.monotonic()
    journal.close()
    assert time.monotonic() - began < 3
    assert list(entries) == []
    reader.close()
    assert _seen(path) == 1


def test_nothing_there_or_an_empty_file_is_a_journal_not_yet_begun(path: Path) -> None:
    assert not Journal.begun(path)
    assert not path.exists()
    path.touch()
    assert not Journal.begun(path)


def test_a_created_journal_has_begun(journal: Journal, path: Path) -> None:
    assert journal.length() == 0
    assert Journal.begun(path)


def test_a_journal_half_made_has_not_begun(trajectory: Trajectory, path: Path) -> None:
    db = sqlite3.connect(path)
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("BEGIN")
    db.execute("CREATE TABLE run (format TEXT)")
    db.close()
    assert not Journal.begun(path)
    journal = Journal.create(path, trajectory.plan, _start(trajectory).state, {})
    assert Journal.begun(path)
    assert journal.snapshot_numbers() == [0]
    journal.close()


NO_DATABASE = b"this is not a database, whatever it claims to be" * 99


@pytest.mark.parametrize("commit_seconds", [None, 0.0])
def test_a_file_that_is_no_database_is_refused(path: Path, commit_seconds: float | None) -> None:
    path.write_bytes(NO_DATABASE)
    with pytest.raises((JournalError, RunFolderError), match=r"journal\.sqlite"):
        Journal.open(path, commit_seconds=commit_seconds)
    assert path.read_bytes() == NO_DATABASE


def test_whether_a_file_that_is_no_database_has_begun_cannot_be_said(path: Path) -> None:
    path.write_bytes(NO_DATABASE)
    with pytest.raises(JournalError, match="damaged or not a journal"):
        Journal.begun(path)


def test_a_database_of_something_else_is_refused(path: Path) -> None:
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE songs (title TEXT)")
    db.commit()
    db.close()
    with pytest.raises(JournalError, match="not a journal"):
        Journal.open(path)


@pytest.mark.parametrize(
    "change",
    [f"UPDATE run SET format = '{NETWORKED}'", "UPDATE run SET format = 'baffle-journal/3'", "DELETE FROM run"],
)
def test_a_journal_of_another_version_is_refused(journal: Journal, path: Path, change: str) -> None:
    journal.commit()
    db = sqlite3.connect(path)
    db.execute(change)
    db.commit()
    db.close()
    for commit_seconds in (None, 0.0):
        with pytest.raises(JournalError, match=f"expected '{SIMULATED}'.*another version"):
            Journal.open(path, commit_seconds=commit_seconds)


def test_a_missing_journal_is_named(path: Path) -> None:
    with pytest.raises(JournalError, match=r"journal\.sqlite is missing"):
        Journal.open(path)


def test_a_journal_opened_for_reading_cannot_be_written(journal: Journal, trajectory: Trajectory, path: Path) -> None:
    journal.commit()
    reader = Journal.open(path)
    with pytest.raises(RunFolderError, match="cannot be written"):
        _append(reader, trajectory, _start(trajectory))
    reader.close()


def test_a_place_that_cannot_hold_a_file_is_refused(trajectory: Trajectory, tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="cannot be opened"):
        Journal.create(tmp_path / "missing" / "journal.sqlite", trajectory.plan, _start(trajectory).state, {})


def test_a_journal_and_its_sidecars_are_their_owners_alone(trajectory: Trajectory, path: Path) -> None:
    before = os.umask(0)
    initial = trajectory.rule.start(np.ones(N, np.float32))
    with Journal.create(path, trajectory.plan, initial, {}) as journal:
        _append(journal, trajectory, _start(trajectory))
        files = sorted(file.name for file in path.parent.iterdir())
        modes = {stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()}
    os.umask(before)
    assert files == ["journal.sqlite", "journal.sqlite-shm", "journal.sqlite-wal"]
    assert modes == {0o600}
