"""A network in memory: members in threads, which may vanish, come back, be late or lie."""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from baffle.client.replica import read_saved
from baffle.core.state import unpack
from baffle.journal.audit import verify
from baffle.network.authority import make_keys
from baffle.network.equipment import count_samples, with_plan
from baffle.network.joining import Reply
from baffle.network.keys import ClientKeys
from baffle.network.member import Member
from baffle.network.policy import Policy
from baffle.network.rosters import Reread, Roster
from baffle.network.serve import serve
from baffle.plan import Plan, load
from baffle.server.recorder import Summary
from baffle.task.load import load_task
from baffle.trajectory import trajectory_of

Answer = Callable[[bytes], bytes | None]
"""A client: message → reply, or None if it stays silent."""


def new_keys(folder: Path, clients: int) -> list[ClientKeys]:
    make_keys(folder / "keys", clients, ["localhost"])
    return [ClientKeys.load(folder / "keys" / f"client-{number}") for number in range(clients)]


class StoppedError(Exception):
    """The server was stopped."""


@dataclass
class LinesInMemory:
    """Lines to clients in this process, by number. `before` is called with the number of each exchange; it may add or
    remove clients, or stop the server. A client that is replaced counts as restarted."""

    clients: dict[int, Answer] = field(default_factory=dict)
    before: Callable[[int], None] = lambda _exchange: None
    exchanges: int = 0
    runs: list[bytes] = field(default_factory=list)
    contribution: int = 0

    def present(self) -> Mapping[int, object]:
        return dict(self.clients)

    def carry(self, requests: Mapping[int, bytes], run: bytes) -> Mapping[int, bytes]:
        self.exchanges += 1
        self.runs.append(run)
        self.before(self.exchanges)
        present = {client: data for client, data in requests.items() if client in self.clients}
        with ThreadPoolExecutor(8) as pool:
            answers = pool.map(lambda client: self.clients[client](present[client]), present)
            replies = dict(zip(present, answers, strict=True))
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
            count_samples(number, None, part=True),
            with_plan(number, None, part=True),
            **{"policy": self.policy, **settings},  # type: ignore[arg-type]
        )
        self.members[number] = member
        return member

    def lines(self, clients: int) -> LinesInMemory:
        return LinesInMemory({number: self.member(number).answer for number in range(clients)})

    def serve(self, lines: LinesInMemory, least: int = 0, reread: Reread = lambda: None) -> Summary:
        return serve(self.plan, self.run, lines, self.roster, least=least, reread=reread, tell=self.told.append)

    def said(self, words: str) -> bool:
        """Whether the server has reported this."""
        return any(words in line for line in self.told)

    def require_agreement(self, clients: Iterable[int]) -> str:
        """The hash of the run's weights, which the journal and the folders of these clients must agree on."""
        expected = verify(self.run).weights_sha256
        assert all((self.folder / f"client-{number}" / "replica").exists() for number in clients), self.told
        assert {self.held(number) for number in clients} == {expected}
        return expected

    def held(self, number: int) -> str:
        """The hash of the weights that a client has on its disk."""
        task = load_task(load(str(self.run / "plan.toml")))
        trajectory = trajectory_of(task.plan, len(task.initial_weights()))
        saved = read_saved(self.folder / f"client-{number}" / "replica", trajectory)
        return unpack(trajectory.rule, saved.state).weights_hash().hex()
