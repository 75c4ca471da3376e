"""How each client ended each round, as the journal keeps it. It is outside the chain, but as durable as the rounds."""

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from baffle.core.ports import CONTRIBUTED
from baffle.errors import JournalError
from baffle.journal.database import reading
from baffle.plan.setting import LARGEST


@dataclass(frozen=True)
class Participation:
    """The table `participation`: a round, a client, and how it ended the round."""

    db: sqlite3.Connection
    path: Path

    def contributors(self, round_number: int) -> set[int]:
        """The clients that contributed to a round."""
        query = "SELECT client FROM participation WHERE round = ? AND event = ?"
        with reading(self.path):
            return {int(client) for (client,) in self.db.execute(query, (round_number, CONTRIBUTED))}

    def contributions(self, clients: int) -> dict[int, int]:
        """How many rounds each of the run's clients contributed to."""
        return self._of_contributions("count(*)", clients)

    def last_contributions(self, clients: int) -> dict[int, int]:
        """The last round that each of the run's clients contributed to; a client that never did is not in it."""
        return self._of_contributions("max(round)", clients)

    def _of_contributions(self, number: str, clients: int) -> dict[int, int]:
        query = f"SELECT client, {number} FROM participation WHERE event = ? GROUP BY client"
        with reading(self.path):
            numbers = dict(self.db.execute(query, (CONTRIBUTED,)).fetchall())
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
                    raise JournalError(f"{self.path} tells of a {column} that the run does not have; it is damaged")
                yield number, event, count

    def count(self, event: str) -> int:
        """How often clients ended a round in this way."""
        with reading(self.path):
            return int(self.db.execute("SELECT count(*) FROM participation WHERE event = ?", (event,)).fetchone()[0])
