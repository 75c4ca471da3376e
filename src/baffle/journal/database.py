"""The SQLite file of a journal: how it is opened, the checks that it must pass before anything in it is used, and its
tables besides the rounds: how each client ended each round and, in a networked run, the statements of its epochs and
certificates. Participation is outside the chain, but as durable as the rounds."""

import shlex
import sqlite3
import stat
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baffle.core.messages import decode, encode
from baffle.core.ports import CONTRIBUTED
from baffle.errors import FULL, FullDiskError, JournalError, MessageError, RunFolderError
from baffle.files import Attempt, require_room
from baffle.plan.sections import LARGEST
from baffle.statement import Certificate, EpochRecord, read_statement

SIMULATED, NETWORKED = "baffle-journal/1", "baffle-journal/2"
"""Of a simulation, and of a networked run, which has statements. Networked runs of version 0.1 have the first."""

READERS_SECONDS = 60.0  # how long a run waits for another process that is reading its journal
FOLD_SECONDS = 1.0  # how long a run that ends waits for a gap between readers, to leave one plain file behind

_TABLES = """
CREATE TABLE run (format TEXT, plan TEXT, trajectory_digest BLOB, n_weights INTEGER, versions TEXT);
CREATE TABLE rounds (round INTEGER PRIMARY KEY, outcome BLOB NOT NULL, chain BLOB NOT NULL);
CREATE TABLE metrics (round INTEGER PRIMARY KEY, record TEXT NOT NULL);
CREATE TABLE snapshots (round INTEGER PRIMARY KEY, state BLOB NOT NULL);
CREATE TABLE participation (round INTEGER, client INTEGER, event TEXT, PRIMARY KEY (round, client)) WITHOUT ROWID;
"""
_OF_NETWORKS = """
CREATE TABLE epochs (epoch INTEGER PRIMARY KEY, statement BLOB NOT NULL, nonces BLOB NOT NULL,
  signatures BLOB NOT NULL, roster BLOB NOT NULL);
CREATE TABLE certificates (round INTEGER, run BLOB, record BLOB NOT NULL, PRIMARY KEY (round, run)) WITHOUT ROWID;
"""
SCHEMAS = {SIMULATED: _TABLES, NETWORKED: _TABLES + _OF_NETWORKS}
STATISTICS = ("sqlite_stat1", "sqlite_stat4")  # tables that SQLite's own `ANALYZE` adds
SIDECARS = ("-wal", "-shm", "-journal")  # endings of the files that SQLite keeps beside a database
NAMES_ANOTHER = bytes.fromhex("d9d505f920a163d7")  # how a rollback journal ends that names another file


def connect(path: Path, *, read_only: bool = False) -> sqlite3.Connection:
    try:
        if read_only:
            return sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
        _require_plain_files(path, written=True)
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
    """Fold the write-ahead log into the file, in a gap between readers. If none comes, the log has to stay."""
    give_up = time.monotonic() + FOLD_SECONDS
    while time.monotonic() <= give_up:
        try:
            db.execute("PRAGMA journal_mode = DELETE")
        except sqlite3.OperationalError as fault:
            if fault.sqlite_errorcode & 0xFF not in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                return
            time.sleep(0.01)
        except sqlite3.Error:
            return
        else:
            return


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Report every error of SQLite as a damaged journal. A damaged length can also ask for too much memory, and an
    error message may quote bytes of the file that are not text."""
    try:
        yield
    except (sqlite3.Error, MemoryError, UnicodeDecodeError) as fault:
        reason = str(fault) or "out of memory"
        raise JournalError(f"{path} cannot be read: {reason}; it is damaged or not a journal") from None


def fetch(db: sqlite3.Connection, path: Path, query: str, *values: object) -> list[Any]:
    """All rows that a query gives."""
    with reading(path):
        return db.execute(query, values).fetchall()


def is_begun(path: Path, *, read_only: bool = False) -> bool:
    """Whether a journal was created in full. A process killed while creating it leaves an empty file or none."""
    _require_plain_files(path, written=not read_only)
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
    """Report a failed write, and leave no half round, even after an interrupt: lost rounds can be computed again."""
    try:
        yield
    except BaseException as fault:
        with suppress(sqlite3.Error):
            db.rollback()
        if not isinstance(fault, sqlite3.DatabaseError):
            raise
        raise_if_full(path, fault)
        raise RunFolderError(f"{path} cannot be written: {fault}; {remedy(path.parent)}") from None


def raise_if_full(path: Path, fault: sqlite3.Error) -> None:
    """Raise a FullDiskError if SQLite failed because there is no room. SQLite does not tell an exhausted quota, or a
    limit on the size of files, from a broken disk, so a file is written to find out; never call this for a folder that
    is only read."""
    code = getattr(fault, "sqlite_errorcode", sqlite3.SQLITE_OK)
    full, why = code == sqlite3.SQLITE_FULL, str(fault)
    if code & 0xFF in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN):
        try:
            require_room(path)
        except OSError as reason:
            full, why = reason.errno in FULL, reason.strerror or str(reason)
    if full:
        raise FullDiskError(f"{path} cannot be written: {why}", remedy(path.parent)) from None


def remedy(folder: Path) -> str:
    """What to do when a file of a run cannot be written."""
    return f"free some space or mend the disk, then go on with: baffle run --resume {shlex.quote(str(folder))}"


def require_journal(path: Path) -> None:
    """Refuse a file that this version cannot read, before anything in it is changed."""
    _require_plain_files(path, written=False)
    if not path.is_file():
        raise JournalError(f"{path} is missing: expected the folder of a run that `baffle run --out` made")
    with reading(path), closing(connect(path, read_only=True)) as db:
        schema = _schema(db, path)
        formats = [row[0] for row in db.execute("SELECT format FROM run LIMIT 2")]
    if formats != [schema]:
        got = repr(formats[0])[:80] if len(formats) == 1 else "several" if formats else "None"
        raise JournalError(f"{path} has format {got}, expected {schema!r}: made by another version of baffle")


def _require_plain_files(path: Path, *, written: bool) -> None:
    """Refuse SQLite's files if they are something else: to open a pipe or a device could block for ever, and SQLite
    writes through links. It also deletes the file that a rollback journal names, once it has undone that journal."""
    try:
        real = path.resolve() if path.is_file() and not written else path
        for file in (real.with_name(real.name + ending) for ending in ("", *SIDECARS)):
            with suppress(FileNotFoundError):  # a run that goes on may have just removed it
                _require_plain_file(file, written=written)
    except OSError as fault:
        raise JournalError(f"{path} cannot be read: {fault.strerror or fault}") from None


def _require_plain_file(path: Path, *, written: bool) -> None:
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode) or (written and found.st_nlink > 1):
        raise JournalError(f"{path} is a link, or no file at all; expected one that SQLite wrote, or none")
    if not path.name.endswith("-journal"):
        return  # to open and close one that SQLite has locked, in this process, would end the lock
    with path.open("rb") as file:
        file.seek(max(0, found.st_size - len(NAMES_ANOTHER)))
        if file.read(len(NAMES_ANOTHER)) == NAMES_ANOTHER:
            raise JournalError(f"{path} names another file, which SQLite would delete; remove {path.name}")


def _schema(db: sqlite3.Connection, path: Path) -> str:
    """The format whose plain tables the file holds. Views, triggers and computed columns could do anything."""
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


@dataclass(frozen=True)
class Participation:
    """The table `participation`: a round, a client, and how it ended the round."""

    db: sqlite3.Connection
    path: Path

    def contributors(self, round_number: int) -> set[int]:
        """The clients that contributed to a round."""
        query = "SELECT client FROM participation WHERE round = ? AND event = ?"
        return {int(client) for (client,) in fetch(self.db, self.path, query, round_number, CONTRIBUTED)}

    def contributions(self, clients: int) -> dict[int, int]:
        """How many rounds each of the run's clients contributed to."""
        return self._of_contributions("count(*)", clients)

    def last_contributions(self, clients: int) -> dict[int, int]:
        """The last round that each of the run's clients contributed to. Clients that never did are missing."""
        return self._of_contributions("max(round)", clients)

    def _of_contributions(self, number: str, clients: int) -> dict[int, int]:
        query = f"SELECT client, {number} FROM participation WHERE event = ? GROUP BY client"
        numbers: dict[int, int] = dict(fetch(self.db, self.path, query, CONTRIBUTED))
        if not all(client in range(clients) for client in numbers):
            raise JournalError(f"{self.path} counts rounds of clients that the run does not have; it is damaged")
        if not all(isinstance(value, int) and value >= 0 for value in numbers.values()):
            raise JournalError(f"{self.path} counts contributions to rounds that have no number; it is damaged")
        return numbers

    def by_client(self, clients: int) -> Iterator[tuple[int, str, int]]:
        """How often each of the run's clients ended a round in each way."""
        yield from self._counts("client", clients)

    def by_round(self) -> Iterator[tuple[int, str, int]]:
        """How many clients ended each round in each way."""
        yield from self._counts("round", LARGEST)

    def _counts(self, column: str, end: int) -> Iterator[tuple[int, str, int]]:
        query = f"SELECT {column}, event, count(*) FROM participation GROUP BY {column}, event ORDER BY {column}"
        with reading(self.path):
            for number, event, count in self.db.execute(query):
                if not (isinstance(number, int) and 0 <= number < end and isinstance(event, str)):
                    raise JournalError(f"{self.path} names a {column} that the run does not have; it is damaged")
                yield number, event, count

    def count(self, event: str) -> int:
        """How often clients ended a round in this way."""
        return int(fetch(self.db, self.path, "SELECT count(*) FROM participation WHERE event = ?", event)[0][0])


@dataclass(frozen=True)
class Statements:
    """The tables `epochs` and `certificates`, which a simulation's journal does not have."""

    db: sqlite3.Connection
    path: Path
    attempt: Attempt

    @property
    def networked(self) -> bool:
        """Whether this is the journal of a networked run."""
        return bool(fetch(self.db, self.path, "SELECT format FROM run")[0][0] == NETWORKED)

    def insert_epoch(self, record: EpochRecord, roster: bytes) -> None:
        row = (read_statement(record.statement).epoch, record.statement, record.nonces, record.signatures, roster)
        self.db.execute("INSERT INTO epochs VALUES (?, ?, ?, ?, ?)", row)

    def epochs(self) -> list[EpochRecord]:
        """The epochs of a networked run, in order; none in a simulation."""
        return [record for record, _ in self.epochs_with_rosters()]

    def epochs_with_rosters(self) -> list[tuple[EpochRecord, bytes]]:
        """The epochs in order, each with the text of the roster that its statement names."""
        if not self.networked:
            return []
        query = "SELECT statement, nonces, signatures, roster FROM epochs ORDER BY epoch"
        rows = fetch(self.db, self.path, query)
        if not all(isinstance(value, bytes) for row in rows for value in row):
            raise JournalError(f"{self.path}: an epoch is not bytes; the journal is damaged")
        return [(EpochRecord(*record), roster) for *record, roster in rows]

    def epoch_began(self) -> int:
        """The first round of the present epoch; 0 in a simulation."""
        newest = self.epochs()[-1:]
        return read_statement(newest[0].statement).first if newest else 0

    def add_certificate(self, certificate: Certificate) -> None:
        """Keep a certificate: what more than two thirds of the clients have signed about the state before a round."""

        def write() -> None:
            with writing(self.db, self.path):
                row = (certificate.round, certificate.run, encode(certificate))
                self.db.execute("INSERT OR REPLACE INTO certificates VALUES (?, ?, ?)", row)
                self.db.commit()

        self.attempt(write)

    def certificates(self) -> list[Certificate]:
        """All certificates, in the order of their rounds."""
        if not self.networked:
            return []
        rows = fetch(self.db, self.path, "SELECT record FROM certificates ORDER BY round")
        try:
            return [decode(record, Certificate) for (record,) in rows]
        except (MessageError, TypeError) as fault:
            raise JournalError(f"{self.path}: a certificate cannot be read: {fault}") from None
