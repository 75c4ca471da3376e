"""A network in memory: members that may vanish, come back, be late or lie."""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from baffle.client.abstaining import Tell
from baffle.client.replica import read_saved
from baffle.core.state import unpack
from baffle.journal.audit import Verified, verify
from baffle.journal.store import Journal
from baffle.network.joining import Reply
from baffle.network.keys.authority import make_keys
from baffle.network.keys.folders import ClientKeys
from baffle.network.keys.rosters import Reread, Roster
from baffle.network.member.equipment import with_plan
from baffle.network.member.member import Member
from baffle.network.member.policy import Policy
from baffle.network.server.board import Board
from baffle.network.server.serve import EPOCH_SECONDS, serve
from baffle.plan import Plan, load
from baffle.server.recorder import Summary
from baffle.simulation import repeat
from baffle.statement import NOTHING, Statement, read_statement
from baffle.task.load import load_task
from baffle.trajectory import trajectory_of
from tests.support.clocks import FakeClock

Answer = Callable[[bytes], bytes | None]  # a client: message → reply, or None if it stays silent


def new_keys(folder: Path, clients: int) -> list[ClientKeys]:
    make_keys(folder / "keys", clients, ["localhost"])
    return [ClientKeys.load(folder / "keys" / f"client-{number}") for number in range(clients)]


class StoppedError(Exception):
    """The server was killed."""


def kill() -> None:
    """Kills the server."""
    raise StoppedError


@dataclass
class LinesInMemory:
    """Lines to clients in this process, by number. What is in `at` is done before the exchange of that number, from 1
    on, and `before` is called with the number of each exchange: they may add or remove clients, or kill the server. A
    client that is replaced counts as restarted.

    Clients in `returning` that do not answer a patient exchange connect again meanwhile, each as another process.

    An exchange takes so many `seconds` of the clock: by default longer than an epoch must last, and than the server
    waits until it asks a client again."""

    clients: dict[int, Answer] = field(default_factory=dict)
    before: Callable[[int], None] = lambda _exchange: None
    at: dict[int, Callable[[], object]] = field(default_factory=dict)
    returning: dict[int, Callable[[], Answer]] = field(default_factory=dict)
    exchanges: int = 0
    runs: list[bytes] = field(default_factory=list)
    contribution: int = 0
    clock: FakeClock = field(default_factory=lambda: FakeClock(longest=20_000.0))
    seconds: float = EPOCH_SECONDS + 1

    def present(self) -> Mapping[int, object]:
        return dict(self.clients)

    def carry(self, requests: Mapping[int, bytes], run: bytes, *, patient: bool = False) -> Mapping[int, bytes]:
        self.exchanges += 1
        self.runs.append(run)
        self.clock.sleep(self.seconds)
        self.before(self.exchanges)
        self.at.get(self.exchanges, lambda: None)()
        asked = [(client, self.clients[client], data) for client, data in requests.items() if client in self.clients]
        replies = {client: answer(data) for client, answer, data in asked}
        for client in (one for one, reply in replies.items() if patient and reply is None and one in self.returning):
            self.clients[client] = self.returning.pop(client)()
            replies[client] = self.clients[client](requests[client])
        return {client: reply for client, reply in replies.items() if reply is not None}

    def post(self, requests: Mapping[int, bytes], run: bytes) -> Mapping[int, Reply]:
        """The replies, for which everybody waits."""
        replies = self.carry(requests, run)
        futures: dict[int, Reply] = {client: Future() for client in requests}
        for client, future in futures.items():
            future.set_result(replies.get(client))
        return futures

    def admit(self, roster: Roster) -> None:
        """Whoever has no place any more is disconnected. Who has another's place is for the test to say."""
        self.clients = {number: answer for number, answer in self.clients.items() if number in roster.directory()}

    def expect(self, contribution: int) -> None:
        self.contribution = contribution


@dataclass
class Federation:
    """A server's folder and its clients, each with its own keys and folder."""

    keys: list[ClientKeys]
    folder: Path
    plan: Plan
    told: list[str] = field(default_factory=list)
    members: dict[int, Member] = field(default_factory=dict)
    policy: Policy | None = None

    def __post_init__(self) -> None:
        self.run = self.folder / "run"

    @property
    def roster(self) -> Roster:
        return self.keys[0].roster

    def member(self, number: int, **settings: object) -> Member:
        """Start a client, or start it again: it then knows what its folder holds."""
        member = Member(
            self.keys[number],
            self.folder / f"client-{number}",
            with_plan(number, None, part=True),
            **{"policy": self.policy, **settings},  # type: ignore[arg-type]
        )
        self.members[number] = member
        return member

    def come(self, lines: LinesInMemory, number: int) -> None:
        """A client connects; one that is connected is started again."""
        lines.clients[number] = self.member(number).answer

    def lines(self, clients: int) -> LinesInMemory:
        return LinesInMemory({number: self.member(number).answer for number in range(clients)})

    def serve(
        self,
        lines: LinesInMemory,
        least: int = 0,
        reread: Reread = lambda: None,
        board: Board | None = None,
        tell: Tell | None = None,
        roster: Roster | None = None,
    ) -> Summary:
        """Serve the plan. What the server says is in `told`, if it has no other log."""
        settings: dict[str, Any] = {"least": least, "reread": reread, "board": board, "clock": lines.clock}
        return serve(self.plan, self.run, lines, roster or self.roster, tell=tell or self.told.append, **settings)

    def serve_until_killed(self, lines: LinesInMemory, before: int = 0, **settings: Any) -> None:
        """Serve until the server is killed: before the exchange of this number, or when the test does it."""
        if before:
            lines.at[before] = kill
        with pytest.raises(StoppedError):
            self.serve(lines, **settings)

    def said(self, words: str) -> bool:
        """Whether the server has reported this."""
        return any(words in line for line in self.told)

    def statements(self) -> list[Statement]:
        """The statements of the run's epochs."""
        with Journal.open(self.run / "journal.sqlite") as journal:
            return [read_statement(record.statement) for record in journal.statements.epochs()]

    def contributors(self) -> list[set[int]]:
        """The clients that contributed to each round."""
        with Journal.open(self.run / "journal.sqlite") as journal:
            return [journal.participation.contributors(number) for number in range(journal.length())]

    def require_sound(self, clients: Iterable[int]) -> None:
        """The statements follow each other, the journal verifies, these clients hold its weights, and the run can be
        repeated."""
        statements = self.statements()
        assert [one.epoch for one in statements] == list(range(len(statements)))
        assert statements[0].previous == NOTHING
        assert len({one.chain for one in statements}) == len(statements)
        verified, repeated = self._agreed(clients), self.folder / "repeated"
        assert repeat(self.run, repeated)["weights_sha256"] == verified.weights_sha256
        assert verify(repeated).chain == verified.chain

    def require_agreement(self, clients: Iterable[int]) -> str:
        """The hash of the run's weights, which the journal and the folders of these clients must agree on."""
        return self._agreed(clients).weights_sha256

    def _agreed(self, clients: Iterable[int]) -> Verified:
        verified, replicas = verify(self.run), [self.folder / f"client-{number}" / "replica" for number in clients]
        assert all(replica.exists() for replica in replicas), self.told
        task = load_task(load(str(self.run / "plan.toml")))
        trajectory = trajectory_of(task.plan, len(task.initial_weights()))
        states = [unpack(trajectory.rule, read_saved(replica, trajectory).state) for replica in replicas]
        assert {state.weights_hash().hex() for state in states} == {verified.weights_sha256}
        return verified
