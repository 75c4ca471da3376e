"""The SQLite file of a journal: how it is opened, and what it must look like before any of it is believed."""

import shlex
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from baffle.errors import FULL, FullDiskError, JournalError, RunFolderError
from baffle.files import require_room

SIMULATED, NETWORKED = "baffle-journal/1", "baffle-journal/2"
"""The formats of journals: of a simulation, and of a networked run, which has statements. Networked runs of version 0.1
have the first."""
READERS_SECONDS = 60.0
"""How long a run waits for another process that is reading its journal."""

FOLD_SECONDS = 1.0
"""How long a run that ends waits for a gap between readers, to leave one plain file behind."""

SCHEMAS = {
    SIMULATED: """
CREATE TABLE run (format TEXT, plan TEXT, trajectory_digest BLOB, n_weights INTEGER, versions TEXT);
CREATE TABLE rounds (round INTEGER PRIMARY KEY, outcome BLOB NOT NULL, chain BLOB NOT NULL);
CREATE TABLE metrics (round INTEGER PRIMARY KEY, record TEXT NOT NULL);
CREATE TABLE snapshots (round INTEGER PRIMARY KEY, state BLOB NOT NULL);
CREATE TABLE participation (round INTEGER, client INTEGER, event TEXT, PRIMARY KEY (round, client)) WITHOUT ROWID;
"""
}
SCHEMAS[NETWORKED] = (
    SCHEMAS[SIMULATED]
    + """
CREATE TABLE epochs (epoch INTEGER PRIMARY KEY, statement BLOB NOT NULL, nonces BLOB NOT NULL,
  signatures BLOB NOT NULL, roster BLOB NOT NULL);
CREATE TABLE certificates (round INTEGER, run BLOB, record BLOB NOT NULL, PRIMARY KEY (round, run)) WITHOUT ROWID;
"""
)
STATISTICS = ("sqlite_stat1", "sqlite_stat4")
"""Tables that SQLite's own `ANALYZE` adds."""

SIDECARS = ("-wal", "-shm", "-journal")
"""Endings of the files that SQLite keeps beside a database."""


def connect(path: Path, *, read_only: bool = False) -> sqlite3.Connection:
    try:
        if read_only:
            return sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
        with suppress(OSError):  # SQLite says better what is wrong with a place
            path.touch(mode=0o600)  # for its owner alone; SQLite gives its other files the same mode
        db = sqlite3.connect(path, timeout=READERS_SECONDS, isolation_level="DEFERRED")
        try:
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = FULL")
        except sqlite3.Error:
            db.close()
            raise
    except sqlite3.Error as fault:
        if not read_only:
            raise_if_full(path, fault)
        raise RunFolderError(f"{path} cannot be opened: {fault}") from None
    return db


def fold_log(db: sqlite3.Connection) -> None:
    """Fold the write-ahead log into the file. While another process reads, the log has to stay; one that looks again
    and again, as a live page does, leaves gaps."""
    give_up = time.monotonic() + FOLD_SECONDS
    while True:
        try:
            db.execute("PRAGMA journal_mode = DELETE")
        except sqlite3.OperationalError as fault:
            if fault.sqlite_errorcode & 0xFF not in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                return
        except sqlite3.Error:
            return
        else:
            return
        if time.monotonic() > give_up:
            return
        time.sleep(0.01)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Report whatever SQLite finds wrong as a damaged journal. A damaged length can also ask for too much memory, and
    what SQLite quotes from the file need not be text."""
    try:
        yield
    except (sqlite3.Error, MemoryError, UnicodeDecodeError) as fault:
        reason = str(fault) or "out of memory"
        raise JournalError(f"{path} cannot be read: {reason}; it is damaged or not a journal") from None


def is_begun(path: Path, *, read_only: bool = False) -> bool:
    """Whether a journal was created in full. A process killed while creating it leaves an empty file or none."""
    if not path.is_file():
        return False
    with reading(path):
        try:
            with closing(connect(path, read_only=True) if read_only else sqlite3.connect(path)) as db:
                return db.execute("SELECT 1 FROM sqlite_master WHERE name = 'run'").fetchone() is not None
        except sqlite3.DatabaseError as fault:
            raise_if_full(path, fault)  # to read after a crash needs room for the index of the write-ahead log
            raise


@contextmanager
def writing(db: sqlite3.Connection, path: Path) -> Iterator[None]:
    """Report what SQLite cannot write. Rounds that are not yet durable can be computed again, but half a round must not
    stay, whatever it was interrupted by."""
    try:
        yield
    except BaseException as fault:
        with suppress(sqlite3.Error):
            db.rollback()
        if not isinstance(fault, sqlite3.DatabaseError):
            raise
        raise_if_full(path, fault)
        raise RunFolderError(f"{path} cannot be written: {fault}; {_remedy(path)}") from None


def raise_if_full(path: Path, fault: sqlite3.Error) -> None:
    """Raise a FullDiskError if SQLite failed because there is no room. It does not tell an exhausted quota, or a limit
    on the size of files, from a broken disk, so a file is written to find out: only in a folder of one's own."""
    code = getattr(fault, "sqlite_errorcode", sqlite3.SQLITE_OK)
    full, why = code == sqlite3.SQLITE_FULL, str(fault)
    if code & 0xFF in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN):
        try:
            require_room(path)
        except OSError as reason:
            full, why = reason.errno in FULL, reason.strerror or str(reason)
    if full:
        raise FullDiskError(f"{path} cannot be written: {why}", _remedy(path)) from None


def _remedy(path: Path) -> str:
    return f"free some space or mend the disk, then go on with: baffle run --resume {shlex.quote(str(path.parent))}"


def require_journal(path: Path) -> None:
    """Refuse a file that this version cannot read, before anything in it is changed."""
    _require_plain_files(path)
    with reading(path), closing(connect(path, read_only=True)) as db:
        schema = _schema(db, path)
        formats = [row[0] for row in db.execute("SELECT format FROM run LIMIT 2")]
    if formats != [schema]:
        got = repr(formats[0])[:80] if len(formats) == 1 else "several" if formats else "None"
        raise JournalError(f"{path} has format {got}, expected {schema!r}: made by another version of baffle")


def require_sound(db: sqlite3.Connection, path: Path) -> None:
    """Refuse a file whose pages do not form proper trees.

    A forged file can refer to one page again and again, so that a few kilobytes hold more rows than anybody can read.
    """
    with reading(path):
        (fault,) = db.execute("PRAGMA quick_check(1)").fetchone()
    if fault != "ok":
        raise JournalError(f"{path} is damaged: {' '.join(str(fault).split())}")


def _require_plain_files(path: Path) -> None:
    """Opening a pipe or a device as one of SQLite's files could block for ever."""
    try:
        if not path.is_file():
            raise JournalError(f"{path} is missing: expected the folder of a run that `baffle run --out` made")
        real = path.resolve()
        for sidecar in (real.with_name(real.name + ending) for ending in SIDECARS):
            if sidecar.is_symlink() or (sidecar.exists() and not sidecar.is_file()):
                raise JournalError(f"{sidecar} is not a plain file; expected one that SQLite wrote, or none")
    except OSError as fault:
        raise JournalError(f"{path} cannot be read: {fault.strerror or fault}") from None


def _schema(db: sqlite3.Connection, path: Path) -> str:
    """The format whose tables the file holds. Views, triggers and computed columns, which could do anything, are
    refused: a journal has plain tables."""
    stored = {name: sql for name, sql in db.execute("SELECT name, sql FROM sqlite_master") if name not in STATISTICS}
    tables = {name: _tables(schema) for name, schema in SCHEMAS.items()}
    for name, expected in tables.items():
        if stored == expected:
            return name
    raise JournalError(
        f"{path} does not hold the tables of a journal ({', '.join(sorted(tables[SIMULATED]))}) and nothing else, but "
        f"{', '.join(sorted(map(str, stored)))[:200] or 'none'}; it is damaged, of another version, or not a journal"
    )


def _tables(schema: str) -> dict[str, str]:
    statements = [statement.strip() for statement in schema.split(";") if statement.strip()]
    return {statement.split()[2]: statement for statement in statements}
