"""A network in memory: members in threads, and nodes that vanish, come back, are late or lie."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from baffle.client.replica import Replica
from baffle.core.state import FLOAT
from baffle.network.authority import make_keys
from baffle.network.equipment import count_samples, with_torch
from baffle.network.keys import ClientKeys, Roster
from baffle.network.member import Member
from baffle.network.serve import serve
from baffle.plan import Plan, load
from baffle.server.recorder import Summary
from baffle.task.load import load_task
from baffle.trajectory import trajectory_of

Answer = Callable[[bytes], bytes | None]
"""A node: message in, reply out; none is silence."""


def new_keys(folder: Path, clients: int) -> list[ClientKeys]:
    make_keys(folder / "keys", clients, ["localhost"])
    return [ClientKeys.load(folder / "keys" / f"client-{number}") for number in range(clients)]


class StoppedError(Exception):
    """The server is no more."""


@dataclass
class Nodes:
    """Computers by number. `before` is called with the number of each exchange and may change who is there, or end the
    server."""

    computers: dict[int, Answer] = field(default_factory=dict)
    before: Callable[[int], None] = lambda _exchange: None
    exchanges: int = 0

    def present(self) -> set[int]:
        return set(self.computers)

    def exchange(self, requests: Mapping[int, bytes]) -> Mapping[int, bytes]:
        self.exchanges += 1
        self.before(self.exchanges)
        there = {node: data for node, data in requests.items() if node in self.computers}
        with ThreadPoolExecutor(8) as pool:
            replies = dict(zip(there, pool.map(lambda node: self.computers[node](there[node]), there), strict=True))
        return {node: reply for node, reply in replies.items() if reply is not None}


@dataclass
class Federation:
    """A server's folder and its clients, each with keys and a folder of its own."""

    keys: list[ClientKeys]
    folder: Path
    plan: Plan
    told: list[str] = field(default_factory=list)
    members: dict[int, Member] = field(default_factory=dict)

    @property
    def roster(self) -> Roster:
        return self.keys[0].roster

    @property
    def run(self) -> Path:
        return self.folder / "run"

    def member(self, number: int, **settings: object) -> Member:
        """A client that is started, perhaps again: it knows what its folder holds."""
        made = Member(
            self.keys[number],
            self.folder / f"client-{number}",
            count_samples(number, None, part=True),
            with_torch(number, None, part=True),
            **settings,  # type: ignore[arg-type]
        )
        self.members[number] = made
        return made

    def nodes(self, clients: int) -> Nodes:
        return Nodes({100 + number: self.member(number).answer for number in range(clients)})

    def serve(self, nodes: Nodes, least: int = 0) -> Summary:
        return serve(self.plan, self.run, nodes, self.roster, least=least, tell=self.told.append)

    def said(self, words: str) -> bool:
        return any(words in line for line in self.told)

    def held(self, number: int) -> str:
        """The hash of the weights that a client has on its disk."""
        task = load_task(load(str(self.run / "plan.toml")))
        trajectory = trajectory_of(task.plan, len(task.initial_weights()))
        (file,) = (self.folder / f"client-{number}").glob("*/replica")
        weights = Replica(trajectory, file)._held.weights
        return sha256(weights.astype(FLOAT).tobytes()).hexdigest()
