"""Clients of the roster that lie, over real lines to a real link, with and without TLS.

Two clients are honest. The others send damaged replies: bodies with valid signatures, which reach the code that reads
them, and envelopes or frames that are damaged themselves. The server uses the code of a real run: it meets the clients,
forms epochs, ends epochs and the run, and exchanges the requests of rounds. Nothing may be raised, and the two honest
clients must come through each time.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from unittest.mock import patch

from baffle.aggregation.messages import Agree, Hello, Turn
from baffle.core.messages import CatchUp, Contribution, Message, RoundRequest, contribution_to, encode, tag_of
from baffle.errors import BaffleError
from baffle.journal.folder import RunFolder
from baffle.network.joining import Done, EpochTerms, Introduce, Introduction, Ready, Salted
from baffle.network.keys.authority import ServerKeys
from baffle.network.link.client import client_tls
from baffle.network.link.server import Link
from baffle.network.server.assembly import Assembly
from baffle.network.server.connected import ConnectedClients
from baffle.network.server.epochs import Epochs
from baffle.network.settling import tiers_for, with_places
from baffle.plan import parse
from baffle.server.run import Running, opened
from baffle.task.load import Runtimes, load_server_task
from baffle.trajectory import trajectory_of
from fuzzing import liars
from fuzzing.checks import ACCEPTED, REFUSED, Tried, fault_at, violation
from fuzzing.damage import Mutations
from fuzzing.liars import SECONDS, Crowd, Peer
from fuzzing.members import PLAN
from tests.support.clocks import FakeClock
from tests.support.links import Keys, linked, new_keys

HONEST, LIARS = 2, 14
CLIENTS = HONEST + LIARS
EVERYBODY = range(CLIENTS)
ROUND = RoundRequest(liars.ROUND, bytes(32), bytes(32), bytes(32), CatchUp("outcomes", 0, ()))
QUESTIONS: tuple[Message, ...] = (ROUND, Hello(3), Turn(None, None), Agree(1, (0, 1), ()))


@dataclass
class Server:
    """What a server asks clients with. Everything that a question changes is restored before the next."""

    link: Link
    running: Running
    keys: ServerKeys
    told: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._fresh = self.running.lineage, self.running.present
        self.terms: EpochTerms | None = None

    def clients(self, epoch: EpochTerms | None = None) -> tuple[ConnectedClients, Assembly]:
        self.running.lineage, self.running.present = self._fresh
        self.running.downlink.lineage = self.running.lineage
        epochs = Epochs(self.running, self.keys.roster, self.told.append)
        epochs.epoch = epoch
        clients = ConnectedClients(self.link, epochs, self.told.append, FakeClock())  # nobody is asked again
        return clients, Assembly(epochs, clients, HONEST)

    def introduce(self, _lie: str) -> set[int]:
        """Meet clients that are not in a run yet."""
        clients, _ = self.clients()
        self._meet(clients)
        return set(clients.introduced)

    def begin(self, _lie: str) -> set[int]:
        """Meet clients of the epoch, up to the salt."""
        clients, _ = self.clients(self.terms)
        self._meet(clients)
        return set(clients.ready)

    def form(self, _lie: str) -> set[int]:
        """Form an epoch, and another one after it, for which the first must be certified."""
        clients, assembly = self.clients()
        self._meet(clients)
        assembly.form()
        assembly.form()
        return set(clients.ready)

    def end(self, _lie: str) -> set[int]:
        clients, _ = self.clients(self.terms)
        clients.ready = set(self.link.present())
        return set(clients.end_run(dict.fromkeys(sorted(clients.ready), ROUND)))

    def exchange(self, lie: str) -> set[int]:
        """Ask what is asked in rounds."""
        clients, _ = self.clients(self.terms)
        clients.ready = set(self.link.present())
        question = next(encode(one) for one in QUESTIONS if tag_of(encode(one)) == lie)
        answered = set()
        for client, data in clients.exchange(dict.fromkeys(sorted(clients.ready), question)).items():
            with suppress(BaffleError):
                contribution_to(ROUND, data)
                answered.add(client)
        return answered

    @staticmethod
    def _meet(clients: ConnectedClients) -> None:
        clients.meet()
        while replies := [one.reply for one in clients._processes.values() if one.reply]:
            wait(replies)
            clients.meet()


def lines(count: int, seed: int) -> Iterator[Tried]:
    """What clients of the roster send instead of their answers."""
    draw = Random(seed)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as patches:
        patches.enter_context(patch("baffle.network.link.door.FAILURES", 1 << 60))
        keys = new_keys(Path(folder) / "keys", CLIENTS)
        for tls in (False, True):
            share = count // 4 if tls else count - count // 4
            yield from _over_a_link(draw, keys, Path(folder) / f"run-{tls}", share, tls=tls)


@contextmanager
def _running(folder: Path) -> Iterator[Running]:
    """A run that has not begun. Nothing is written to its journal any more."""
    plan = parse(PLAN, [f"federation.clients={CLIENTS}", 'secure.mode="malicious-server"', "ring.n_max=20"])
    task = load_server_task(with_places(plan, CLIENTS), None, 20)
    trajectory = trajectory_of(task.plan, len(task.initial_weights()))
    with (
        RunFolder.new(folder) as run,
        opened(
            run, task, trajectory, Runtimes(task, 1), tiers_for(task.plan, {}), {}, lambda _: None, networked=True
        ) as running,
        patch.object(running.journal, "add_epoch"),
    ):
        yield running


def _over_a_link(draw: Random, keys: Keys, folder: Path, count: int, *, tls: bool) -> Iterator[Tried]:
    with _running(folder) as running, linked(keys, seconds=SECONDS, tls=tls) as at:
        mutations = Mutations(draw, [encode(one) for one in _corpus()])
        context = client_tls(keys.clients[0]) if tls else None
        peers = [Peer(own, at.address, mutations, context) for own in keys.clients]
        at.until_present(*EVERYBODY)
        server = Server(at.link, running, keys.server)
        with Crowd(peers) as crowd:
            clients, assembly = server.clients()
            server._meet(clients)
            assembly.form()
            server.terms = assembly.epochs.epoch
            done, turns = 0, _turns(draw)
            while done < count:
                at.until_present(*EVERYBODY)
                for result in _one_turn(*next(turns), crowd, server, at.told):
                    done += 1
                    yield result


def _corpus() -> list[Message]:
    return [
        Introduction(0, bytes(32), bytes(64)),
        Ready(bytes(32), bytes(64), 0, 0),
        Salted(bytes(32)),
        Done(bytes(32), bytes(64)),
        Contribution(1, bytes(28)),
        Introduce("rounds = 1\n", 1, bytes(32), 0),
    ]


def _turns(draw: Random) -> Iterator[tuple[str, str]]:
    """For ever, in random order: what the server does, and the question that liars lie about. Quick turns are
    frequent, and each comes up again soon."""
    deck = [
        *4 * [("introduce", "introduce")],
        *3 * [("begin", "begin"), ("begin", "openings"), ("end", "over")],
        *(("form", tag) for tag in ("introduce", "begin", "openings", "halt")),
        *(("exchange", tag_of(encode(one))) for one in QUESTIONS),
    ]
    while True:
        yield from draw.sample(deck, len(deck))


def _one_turn(name: str, tag: str, crowd: Crowd, server: Server, told: list[str]) -> Iterator[Tried]:
    """Have all liars lie about one kind of question, and ask it."""
    ask: Callable[[str], set[int]] = getattr(server, name)
    where = f"line, {tag}{' while an epoch is formed' if name == 'form' else ''}"
    for liar in crowd.peers[HONEST:]:
        liar.lies_about = tag
    began = time.monotonic()
    try:
        came_through = ask(tag)
    except Exception as fault:
        yield Tried(where, fault_at(where, fault), b"")
        return
    faults = []
    if crowd.fault:
        raise crowd.fault
    if not set(range(HONEST)) <= came_through:
        faults.append("an honest client did not come through")
    if time.monotonic() - began > SECONDS:
        faults.append("an exchange took its whole deadline")
    faults += [f"the link tells: {words}" for words in told if "mistake" in words or "led to" in words]
    del told[:], server.told[:]
    for liar in crowd.peers[HONEST:]:
        liar.lies_about = ""
        for lie in liar.lied:
            outcome = ACCEPTED if liar.keys.number in came_through else REFUSED
            yield Tried(where, violation(where, faults[0]) if faults else outcome, lie)
        liar.lied.clear()
