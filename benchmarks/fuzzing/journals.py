"""Damaged folders of runs: as bytes, in the cells of their tables, or in the tables themselves. Each
is audited, and read as a run that is resumed or exported reads it. Whatever is found out, an audit that finds nothing
wrong must give the same result as that of the sound folder."""

import shutil
import sqlite3
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from random import Random
from typing import Any

from baffle.errors import BaffleError
from baffle.journal.audit import Verified, verify
from baffle.journal.database import NETWORKED, SCHEMAS
from baffle.journal.folder import RunFolder
from baffle.journal.replay import catch_up, lineage_of
from baffle.journal.store import Journal
from baffle.plan import parse
from fuzzing.checks import Tried, tried
from fuzzing.damage import Mutations, damaged_file, is_list
from fuzzing.members import PLAN
from fuzzing.texts import damaged_text
from tests.support.statements import NetworkedRun

JOURNALS = Path(__file__).resolve().parents[2] / "tests" / "journals"
SIMULATED = ("tiers", "groups-own-median", "epoch", "skipped")
SECONDS = 3.0
"""No audit of such a folder takes more CPU time; a sound one takes 0.02 s."""

TABLES = ("run", "rounds", "metrics", "snapshots", "participation", "epochs", "certificates")
VALUES: tuple[Any, ...] = (
    None, 0, 1, -1, 2**31, 2**40, 2**63 - 1, -(2**63), 0.5, 1e300, float("inf"), "", "0", "12", "\0", "[" * 5000,
    '{"a":' * 5000, "seed = 0x" + "f" * 5000, b"", b"12", b"\xff\xfe", bytes(32), bytes(64), b"\x91" * 5000,
    b"\xdd\xff\xff\xff\xff", b"\x91\xc6\xff\xff\xff\xff", '"x"', '{"round": 1e400}',
)  # fmt: skip
STATEMENTS = (
    "DROP TABLE {table}",
    "DELETE FROM {table}",
    "DELETE FROM {table} WHERE rowid = 1",
    "ALTER TABLE {table} RENAME TO other",
    "ALTER TABLE {table} ADD COLUMN more TEXT",
    "CREATE INDEX extra ON {table} (1)",
    "CREATE VIEW extra AS SELECT * FROM {table}",
    "CREATE TABLE extra AS SELECT * FROM {table}",
    "INSERT OR IGNORE INTO {table} SELECT * FROM {table}",
    "CREATE TRIGGER extra AFTER INSERT ON {table} BEGIN DELETE FROM {table}; END",
    "PRAGMA user_version = 7",
    "PRAGMA journal_mode = WAL",
)


class Sound:
    """A sound run, with a copy of its folder to damage."""

    def __init__(self, name: str, source: Path, copy: Path) -> None:
        self.name, self._source, self.folder = name, source, copy
        shutil.copytree(source, copy)
        self.verified = verify(copy)
        self.files = {path.name: path.read_bytes() for path in copy.iterdir() if path.is_file()}

    def restore(self) -> None:
        for path in self.folder.iterdir():
            if path.name not in self.files:
                path.unlink()
        for name, data in self.files.items():
            (self.folder / name).write_bytes(data)

    def examine(self) -> bool:
        """Audit the folder and read it as a server does that goes on. Returns whether an audit refuses it."""
        with suppress(BaffleError), Journal.open(self.folder / "journal.sqlite") as journal, journal.one_view():
            plan = journal.plan()
            catch_up(journal, lineage_of(journal, plan))
            list(journal.metrics())
            journal.participation.contributions(plan.federation.clients)
            journal.participation.last_contributions(plan.federation.clients)
            journal.statements.certificates()
        with suppress(BaffleError):
            RunFolder.existing(self.folder).read_summary()
        with suppress(BaffleError):
            Journal.begun(self.folder / "journal.sqlite")
        found: Verified = verify(self.folder)
        if found != self.verified:
            raise AssertionError("another result than that of the sound run")
        return False


class Damages:
    """Ways to damage a folder. Each returns what it did, in a few bytes."""

    def __init__(self, draw: Random, runs: list[Sound]) -> None:
        self.draw = draw
        self._mutations = Mutations(draw, [data for run in runs for data in run.files.values()])

    def bytes_of(self, run: Sound) -> bytes:
        """Flip, cut, repeat or overwrite bytes of a file."""
        name = self.draw.choice(("journal.sqlite", "journal.sqlite", "journal.sqlite", *run.files))
        (run.folder / name).write_bytes(damaged_file(run.files[name], self.draw))
        return name.encode()

    def sidecar(self, run: Sound) -> bytes:
        """A file that SQLite would keep beside the journal, with anything in it."""
        ending = self.draw.choice(("-wal", "-journal", "-shm"))
        data = self._mutations.bytes_of(run.files["journal.sqlite"][:8192])
        (run.folder / f"journal.sqlite{ending}").write_bytes(data)
        return ending.encode() + data[:40]

    def cells(self, run: Sound) -> bytes:
        """Other values in one or two cells: of any type, or what is there with damage inside."""
        with self._database(run) as db:
            tables = {table: [row[1] for row in db.execute(f"PRAGMA table_info({table})")] for table in TABLES}
            done = []
            for _ in range(self.draw.choice((1, 1, 2))):
                table = self.draw.choice([table for table in TABLES if tables[table]])
                column = self.draw.choice(tables[table])
                done.append(self._change_cell(db, table, column))
        return " ".join(done).encode()

    def _change_cell(self, db: sqlite3.Connection, table: str, column: str) -> str:
        first = next(row[1] for row in db.execute(f"PRAGMA table_info({table})"))
        rows = db.execute(f"SELECT {first}, {column} FROM {table}").fetchall()
        if not rows:
            return f"{table} is empty"
        key, value = self.draw.choice(rows)
        other = self._damaged(value) if self.draw.random() < 0.7 else self.draw.choice(VALUES)
        with suppress(sqlite3.IntegrityError, OverflowError):  # SQLite itself keeps some values out
            db.execute(f"UPDATE OR REPLACE {table} SET {column} = ? WHERE {first} IS ?", (other, key))
        return f"{table}.{column} = {other!r:.60}"

    def _damaged(self, value: Any) -> Any:
        match value:
            case bytes() if value and is_list(value) and len(value) < 1 << 16:
                return self._mutations.of(value)
            case bytes():
                return self._mutations.bytes_of(value)
            case str():
                return damaged_text(self.draw, value)
            case int():
                return self.draw.choice((value + 1, value - 1, -value, str(value), float(value), 2**62))
            case _:
                return self.draw.choice(VALUES)

    def tables(self, run: Sound) -> bytes:
        with self._database(run) as db:
            statement = self.draw.choice(STATEMENTS).format(table=self.draw.choice(TABLES))
            with suppress(sqlite3.Error):
                db.execute(statement)
        return statement.encode()

    def plans(self, run: Sound) -> bytes:
        """Another plan, as a careful forger writes it: in the file, in the journal, and in the journal's digest."""
        text = damaged_text(self.draw, run.files["plan.toml"].decode())
        (run.folder / "plan.toml").write_text(text)
        with self._database(run) as db, suppress(BaffleError):
            digest = parse(text).trajectory_digest()
            db.execute("UPDATE run SET plan = ?, trajectory_digest = ?", (text, digest))
        return text.encode()

    @staticmethod
    def _database(run: Sound) -> "closing[sqlite3.Connection]":
        db = sqlite3.connect(run.folder / "journal.sqlite", isolation_level=None)
        db.execute("PRAGMA synchronous = OFF")
        return closing(db)


def journals(count: int, seed: int) -> Iterator[Tried]:
    """Damaged folders of runs."""
    draw = Random(seed)
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # absurd rates overflow, which is no fault
        folder = Path(name)
        plan = parse(PLAN, ["ring.n_max=20", 'secure.mode="malicious-server"'])
        networked = NetworkedRun(plan, folder / "networked").whole()
        runs = [
            Sound("networked", networked, folder / "a copy"),
            *(Sound(name, JOURNALS / name, folder / name) for name in SIMULATED),
        ]
        damages = Damages(draw, runs)
        ways = {
            "journal, bytes": damages.bytes_of,
            "journal, cells": damages.cells,
            "journal, tables": damages.tables,
            "journal, plan": damages.plans,
            "journal, sidecars": damages.sidecar,
        }
        chances = (3, 6, 1, 1, 1)
        for _ in range(count):
            run = runs[0] if draw.random() < 0.6 else draw.choice(runs)
            (where,) = draw.choices(list(ways), chances)
            run.restore()
            yield tried(where, ways[where](run), run.examine, SECONDS)


assert set(TABLES) == {statement.split()[2] for statement in SCHEMAS[NETWORKED].split(";") if statement.strip()}
