"""Journals that tests write by hand, read and change behind the back of their run."""

import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baffle.core.messages import Group, Outcome
from baffle.core.state import Present, apply
from baffle.errors import JournalError
from baffle.journal.audit import verify
from baffle.journal.store import Journal
from baffle.lineage import Lineage
from baffle.plan import Plan
from baffle.trajectory import Trajectory, trajectory_of

N = 5  # weights of the model whose run is journalled


def database(run: Path) -> "closing[sqlite3.Connection]":
    db = sqlite3.connect(run / "journal.sqlite", isolation_level=None)
    db.execute("PRAGMA synchronous = OFF")  # hundreds of changes need not survive a power cut
    return closing(db)


def change(run: Path, statement: str, *values: object) -> None:
    with database(run) as db:
        db.execute(statement, values)


def read(run: Path, query: str) -> Any:
    """The first value of the first row."""
    with database(run) as db:
        return db.execute(query).fetchone()[0]


def refused(run: Path, why: str) -> JournalError:
    """An audit must refuse the run, in these words."""
    with pytest.raises(JournalError, match=why) as caught:
        verify(run)
    return caught.value


def with_bit_flipped(data: bytes, place: int, mask: int = 1) -> bytes:
    changed = bytearray(data)
    changed[place] ^= mask
    return bytes(changed)


def outcome_of(number: int) -> Outcome:
    totals = np.random.default_rng(number).integers(-1000, 1000, 4).astype("<i4").tobytes()
    return Outcome(number, "scalars", (Group(number, totals, 30),))


@dataclass
class Written:
    """A simulation's folder whose rounds a test appends by hand."""

    folder: Path
    trajectory: Trajectory
    journal: Journal
    present: Present

    @classmethod
    def begin(cls, folder: Path, plan: Plan) -> "Written":
        folder.mkdir(exist_ok=True)
        (folder / "plan.toml").write_text(plan.to_toml())
        trajectory = trajectory_of(plan, N)
        present = Lineage(trajectory).beginning(trajectory.rule.start(np.ones(N, np.float32)))
        journal = Journal.create(folder / "journal.sqlite", plan, present.state, {"numpy": "2"})
        return cls(folder, trajectory, journal, present)

    @property
    def path(self) -> Path:
        return self.folder / "journal.sqlite"

    def append(self, outcome: Outcome | None = None, *, snapshot: bool = False) -> Present:
        """Append a round. Client 1 never takes part, and client 2 is missing in round 0."""
        number = self.present.round
        outcome = outcome or outcome_of(number)
        state = apply(self.trajectory.rule, self.present.state, outcome)
        who = {0: "contributed", 2: "contributed" if number else "missing"}
        chain = self.journal.append(
            self.present.chain, outcome, state, snapshot=snapshot, metrics={"loss": 1.5}, participation=who
        )
        self.present = Present(number + 1, state, chain)
        return self.present

    def skip(self, *, snapshot: bool = False) -> Present:
        return self.append(Outcome(self.present.round, "skipped", ()), snapshot=snapshot)

    def seen(self) -> int:
        """How many rounds another process sees."""
        with Journal.open(self.path) as reader:
            return reader.length()
