"""What the journal of a networked run keeps besides its rounds: the statements of its epochs, and certificates."""

import sqlite3
from dataclasses import dataclass
from pathlib import Path

from baffle.core.messages import decode, encode
from baffle.errors import JournalError, MessageError
from baffle.files import Attempt
from baffle.journal.database import NETWORKED, reading, writing
from baffle.statement import Certificate, EpochRecord, read_statement


@dataclass(frozen=True)
class Statements:
    """The tables `epochs` and `certificates`, which a simulation's journal does not have."""

    db: sqlite3.Connection
    path: Path
    attempt: Attempt

    @property
    def networked(self) -> bool:
        """Whether this is the journal of a networked run."""
        with reading(self.path):
            return bool(self.db.execute("SELECT format FROM run").fetchone()[0] == NETWORKED)

    def insert_epoch(self, record: EpochRecord, roster: bytes) -> None:
        row = (read_statement(record.statement).epoch, record.statement, record.nonces, record.signatures, roster)
        self.db.execute("INSERT INTO epochs VALUES (?, ?, ?, ?, ?)", row)

    def epochs(self) -> list[EpochRecord]:
        """The epochs of a networked run, in order; none in a simulation."""
        return [record for record, _ in self.epochs_with_rosters()]

    def epochs_with_rosters(self) -> list[tuple[EpochRecord, bytes]]:
        """The same, each with the text of the roster that its statement names."""
        if not self.networked:
            return []
        with reading(self.path):
            rows = self.db.execute("SELECT statement, nonces, signatures, roster FROM epochs ORDER BY epoch").fetchall()
        if not all(isinstance(value, bytes) for row in rows for value in row):
            raise JournalError(f"{self.path}: an epoch is not bytes; the journal is damaged")
        return [(EpochRecord(*record), roster) for *record, roster in rows]

    def epoch_began(self) -> int:
        """The first round of the present epoch; 0 in a simulation."""
        newest = self.epochs()[-1:]
        return read_statement(newest[0].statement).first if newest else 0

    def add_certificate(self, certificate: Certificate) -> None:
        """Keep what more than two thirds of the clients have signed about the state before a round."""

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
        with reading(self.path):
            rows = self.db.execute("SELECT record FROM certificates ORDER BY round").fetchall()
        try:
            return [decode(record, Certificate) for (record,) in rows]
        except (MessageError, TypeError) as fault:
            raise JournalError(f"{self.path}: a certificate cannot be read: {fault}") from None
