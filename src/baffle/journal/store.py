"""The journal: outcomes, their chained hashes, snapshots and metrics in one SQLite file. A networked run's journal also
keeps the statements of its epochs, and certificates.

The chain proves that a model follows from its totals, not that the totals were honest.
"""

import json
import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from baffle.core.messages import Outcome, decode, encode
from baffle.core.state import FLOAT, Rule, ServerState, chain_over, pack, unpack
from baffle.errors import ChainError, JournalError
from baffle.files import Attempt, once
from baffle.journal.database import (
    NETWORKED,
    SCHEMAS,
    SIMULATED,
    Participation,
    Statements,
    connect,
    fetch,
    fold_log,
    is_begun,
    reading,
    require_journal,
    writing,
)
from baffle.plan import Plan, parse
from baffle.statement import EpochRecord, read_statement

KEPT_SNAPSHOTS = 2

KEPT_DIGESTS = 1 << 16  # rounds whose state's hash is remembered, for clients that missed them


@dataclass(frozen=True)
class Entry:
    """One round as it is stored."""

    round: int
    outcome_bytes: bytes
    chain: bytes

    def outcome(self) -> Outcome:
        return decode(self.outcome_bytes, Outcome)


class Journal:
    """One run's journal, open for writing by its server or for reading by any process.

    Rounds are committed in groups: a simulation can compute a lost round again, so it commits about once a second;
    with `commit_seconds = 0` every round is durable when `append` returns. `attempt` makes every write; it may wait for
    room if every round is committed at once.
    """

    def __init__(
        self, db: sqlite3.Connection, path: Path, commit_seconds: float, attempt: Attempt, *, read_only: bool = False
    ) -> None:
        self._db, self._path, self._attempt, self._read_only = db, path, attempt, read_only
        self._commit_seconds, self._committed = commit_seconds, time.monotonic()
        self.append_seconds = 0.0
        self._digests = dict[int, bytes]()
        self.statements, self.participation = Statements(db, path, attempt), Participation(db, path)

    @classmethod
    def create(
        cls,
        path: Path,
        plan: Plan,
        initial: ServerState,
        versions: Mapping[str, str],
        attempt: Attempt = once,
        *,
        networked: bool = False,
    ) -> "Journal":
        """A new journal with its plan and snapshot 0, or nothing at all: one transaction."""
        db = attempt(lambda: connect(path))
        name = NETWORKED if networked else SIMULATED
        about = (name, plan.to_toml(), plan.trajectory_digest(), len(initial.weights), json.dumps(dict(versions)))

        def write() -> None:
            with writing(db, path):
                db.executescript(f"BEGIN; {SCHEMAS[name]}")
                db.execute("INSERT INTO run VALUES (?, ?, ?, ?, ?)", about)
                db.execute("INSERT INTO snapshots VALUES (0, ?)", (pack(initial),))
                db.commit()

        attempt(write)
        return cls(db, path, plan.run.commit_seconds, attempt)

    @classmethod
    def open(cls, path: Path, *, commit_seconds: float | None = None, attempt: Attempt = once) -> "Journal":
        """An existing journal. Without `commit_seconds` it is opened read-only."""

        def connected() -> sqlite3.Connection:
            require_journal(path)
            return connect(path, read_only=commit_seconds is None)

        return cls(attempt(connected), path, commit_seconds or 0.0, attempt, read_only=commit_seconds is None)

    begun = staticmethod(is_begun)

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_fault: object) -> None:
        self.close()

    def commit(self) -> None:
        with writing(self._db, self._path):
            self._db.commit()
            self._committed = time.monotonic()

    def close(self) -> None:
        """Commit and leave one plain file behind, without its write-ahead log."""
        with closing(self._db):
            if not self._read_only:
                self.commit()
                fold_log(self._db)

    def _rows(self, query: str, *values: object) -> list[Any]:
        return fetch(self._db, self._path, query, *values)

    def plan(self) -> Plan:
        ((text, stored),) = self._rows("SELECT plan, trajectory_digest FROM run")
        if not isinstance(text, str):
            raise JournalError(f"the plan in {self._path} is not text; the journal is damaged")
        plan = parse(text, source=f"the plan in {self._path}")
        if plan.trajectory_digest() != stored:
            raise ChainError(f"{self._path}: the plan was changed after the run began (before round 0)", 0)
        return plan

    def extend(self, plan: Plan) -> None:
        """Store a plan that changes how far or how the run goes, but not its trajectory."""

        def write() -> None:
            with writing(self._db, self._path):
                self._db.execute("UPDATE run SET plan = ?", (plan.to_toml(),))
                self._db.commit()

        self._attempt(write)

    def append(
        self,
        previous: bytes,
        outcome: Outcome,
        state: ServerState,
        *,
        snapshot: bool = False,
        metrics: Mapping[str, Any] | None = None,
        participation: Mapping[int, str] | None = None,
    ) -> bytes:
        """Record a round before anything builds on it, and return its hash.

        Its metrics and participation are outside the chain, but as durable as the round.
        """
        began = time.perf_counter()
        data = encode(outcome)
        digest = state.digest()
        chain = chain_over(previous, data, digest)
        record = json.dumps({"round": outcome.round, **(metrics or {})})
        rows = [(outcome.round, client, event) for client, event in (participation or {}).items()]

        def write() -> None:
            with writing(self._db, self._path):
                self._db.execute("INSERT INTO rounds VALUES (?, ?, ?)", (outcome.round, data, chain))
                self._db.execute("INSERT INTO metrics VALUES (?, ?)", (outcome.round, record))
                self._db.executemany("INSERT INTO participation VALUES (?, ?, ?)", rows)
                if snapshot:
                    self._write_snapshot(outcome.round + 1, state)
            if time.monotonic() - self._committed >= self._commit_seconds:
                self.commit()

        self._attempt(write)
        self._digests[outcome.round] = digest
        if len(self._digests) > KEPT_DIGESTS:
            del self._digests[next(iter(self._digests))]
        self.append_seconds += time.perf_counter() - began
        return chain

    def digest_after(self, number: int) -> bytes:
        """The hash of the state after a round, if this process has appended it not too long ago; else nothing."""
        return self._digests.get(number, b"")

    def _write_snapshot(self, number: int, state: ServerState) -> None:
        self._db.execute("INSERT INTO snapshots VALUES (?, ?)", (number, pack(state)))
        self._db.execute(
            "DELETE FROM snapshots WHERE round NOT IN (0, ?) AND round NOT IN "
            "(SELECT round FROM snapshots ORDER BY round DESC LIMIT ?)",
            (self.statements.epoch_began(), KEPT_SNAPSHOTS),  # clients that come to an epoch begin with its state
        )

    def add_epoch(self, record: EpochRecord, roster: bytes, state: ServerState) -> None:
        """Record an epoch before its salt is revealed, with its roster and the state that new clients begin with."""
        first = read_statement(record.statement).first

        def write() -> None:
            with writing(self._db, self._path):
                self.statements.insert_epoch(record, roster)
                if first not in self.snapshot_numbers():
                    self._write_snapshot(first, state)
            self.commit()

        self._attempt(write)

    def length(self) -> int:
        return int(self._rows("SELECT count(*) FROM rounds")[0][0])

    def entries(self, first: int = 0) -> Iterator[Entry]:
        """Rounds in order, from `first` on."""
        query = "SELECT round, outcome, chain FROM rounds WHERE round >= ? ORDER BY round"
        with reading(self._path):
            for row in self._db.execute(query, (first,)):
                yield self._checked(Entry(*row))

    def entry(self, round_number: int) -> Entry:
        rows = self._rows("SELECT round, outcome, chain FROM rounds WHERE round = ?", round_number)
        if not rows:
            raise ChainError(f"{self._path}: round {round_number} is missing", round_number)
        return self._checked(Entry(*rows[0]))

    def _checked(self, entry: Entry) -> Entry:
        """SQLite stores any type in any column."""
        if not (isinstance(entry.outcome_bytes, bytes) and isinstance(entry.chain, bytes)):
            raise ChainError(f"{self._path}: the outcome or hash of round {entry.round} is not bytes", entry.round)
        return entry

    def metrics(self) -> Iterator[dict[str, Any]]:
        with reading(self._path):
            for (record,) in self._db.execute("SELECT record FROM metrics ORDER BY round"):
                try:
                    metrics = json.loads(record)
                except (TypeError, ValueError, RecursionError) as fault:
                    raise JournalError(f"{self._path}: metrics cannot be read: {fault}") from None
                if not isinstance(metrics, dict):
                    raise JournalError(f"{self._path}: metrics are {type(metrics).__name__}, expected a table")
                yield metrics

    def snapshot_numbers(self) -> list[int]:
        numbers = [number for (number,) in self._rows("SELECT round FROM snapshots ORDER BY round")]
        if numbers and numbers[0] < 0:
            raise JournalError(f"{self._path} has a snapshot {numbers[0]}, expected 0 or more; it is damaged")
        return numbers

    def snapshot(self, rule: Rule, number: int) -> ServerState:
        """The state after `number` rounds."""
        rows = self._rows("SELECT state FROM snapshots WHERE round = ?", number)
        if not rows:
            raise JournalError(f"{self._path} has no snapshot {number}; it has {self.snapshot_numbers()[:9]}")
        ((packed,),) = rows
        if not isinstance(packed, bytes):
            raise JournalError(f"{self._path}: snapshot {number} is not bytes; it is damaged")
        state = unpack(rule, packed)
        if len(state.weights) != self.n_weights():
            raise JournalError(f"snapshot {number} holds {len(state.weights)} weights, the run has {self.n_weights()}")
        return state

    def n_weights(self) -> int:
        """The number of weights, which is believed only if some snapshot is long enough to hold them."""
        query = "SELECT n_weights, (SELECT max(length(state)) FROM snapshots) FROM run"
        ((number, size),) = self._rows(query)
        if not isinstance(number, int) or not 0 < number * FLOAT.itemsize <= (size or 0):
            claimed = str(number)[:80]
            raise JournalError(f"{self._path}: no snapshot holds {claimed!r} weights; the journal is damaged")
        return number

    def versions(self) -> dict[str, str]:
        """The versions of the libraries that the run was begun with, and the machine."""
        ((text,),) = self._rows("SELECT versions FROM run")
        try:
            return msgspec.json.decode(text, type=dict[str, str])
        except (msgspec.MsgspecError, TypeError):
            raise JournalError(f"{self._path}: the versions of libraries cannot be read; it is damaged") from None

    def require_sound(self) -> None:
        """Refuse a file whose pages do not form proper trees. A forged file can refer to one page again and again, so
        that a few kilobytes hold more rows than can ever be read."""
        ((fault,),) = self._rows("PRAGMA quick_check(1)")
        if fault != "ok":
            raise JournalError(f"{self._path} is damaged: {' '.join(str(fault).split())}")

    @contextmanager
    def one_view(self) -> Iterator[None]:
        """Everything read inside is as of one moment, even while the run goes on."""
        with reading(self._path):
            self._db.execute("BEGIN")
        yield
        with reading(self._path):
            self._db.rollback()
