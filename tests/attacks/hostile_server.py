"""A server that lies. It has the server's key and every public message, and talks to real clients; it may tell each of
them something else."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest

from baffle.aggregation.client_policy import checked_slot
from baffle.aggregation.messages import Advertisement, Agreed, Hello, MaskedRequest, Opening, Turn, Turned
from baffle.aggregation.server.slot import ServerSlot
from baffle.core.arrays import F32
from baffle.core.messages import Abstention, CatchUp, Contribution, Message, RoundRequest, decode, encode, tag_of
from baffle.core.ring import EXTRAS, RingVector, Sum
from baffle.core.state import Present
from baffle.lineage import Lineage
from baffle.network.joining import Begin, Introduce, Introduction, Openings, Ready
from baffle.network.keys.authority import make_keys
from baffle.network.keys.folders import ClientKeys
from baffle.network.member.equipment import Equip, with_plan
from baffle.network.member.member import Member
from baffle.network.member.policy import Policy
from baffle.network.settling import tiers_for
from baffle.plan import Plan
from baffle.schedule import policy_of
from baffle.statement import NOTHING, PROTOCOL, Commitment, Statement, run_of, salt_of, shared_plan
from baffle.task.load import load_server_task
from baffle.trajectory import Epoch, Trajectory, trajectory_of

SAMPLES = 1000
PLANS_OWN = partial(with_plan, data=None, part=True)  # equips a client, by its number, with the plan's own model


def keys_of(folder: Path, clients: int) -> list[ClientKeys]:
    make_keys(folder / "keys", clients, ["localhost"])
    return [ClientKeys.load(folder / "keys" / f"client-{number}") for number in range(clients)]


class RefusedError(Exception):
    """A client abstained. What it tells its own log is in `Victims.logs`."""


@dataclass
class Victims:
    """Real clients, each with its own keys, folder and log, on a part of digits each."""

    folder: Path
    keys: list[ClientKeys]
    plan: Plan
    policy: Policy | None = None
    equip: Callable[[int], Equip] = PLANS_OWN
    members: dict[int, Member] = field(default_factory=dict)
    logs: dict[int, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for number in range(len(self.keys)):
            self.start(number)

    def allow(self, policy: Policy, *, pinned: bool = True) -> None:
        """Give every client this policy, without bounds on how far outcomes move its weights."""
        far = msgspec.structs.replace(policy, most_step=math.inf, most_distance=math.inf)
        for member in self.members.values():
            member.consent.pinned, member.consent.policy = self.plan if pinned else None, far

    def start(self, number: int) -> Member:
        """Start a client, or start it again."""
        log = self.logs.setdefault(number, [])
        member = Member(
            self.keys[number],
            self.folder / f"client-{number}",
            self.equip(number),
            pinned=self.plan,
            tell=log.append,
            policy=self.policy,
        )
        self.members[number] = member
        return member

    def ask(self, client: int, message: Message) -> bytes:
        """What a client answers. Raises a RefusedError if it abstains."""
        reply = self.members[client].answer(encode(message))
        if tag_of(reply) in (Abstention.__struct_config__.tag, "unready", "behind"):
            raise RefusedError(f"client {client}: {self.logs[client][-1:]}")
        return reply


@dataclass
class View:
    """What some clients have been told: a statement, the salt that follows, and the run up to now."""

    statement: Statement
    data: bytes
    lineage: Lineage
    salt: bytes
    present: Present

    @property
    def run(self) -> bytes:
        return run_of(self.data)

    @property
    def trajectory(self) -> Trajectory:
        return self.lineage.trajectory


class HostileServer:
    """Follows the protocol except where a test makes it lie."""

    def __init__(self, victims: Victims) -> None:
        self.victims = victims
        self.roster = victims.keys[0].roster
        task = load_server_task(victims.plan, None, SAMPLES)
        self.plan = shared_plan(task.plan)
        self.bare = trajectory_of(self.plan, len(task.initial_weights()))
        self.state = self.bare.rule.start(task.initial_weights())
        self.everybody = tuple(range(len(victims.keys)))

    # Joining

    def introductions(self, clients: Iterable[int], epoch: int = 0) -> dict[int, Introduction]:
        question = Introduce(self.plan.to_toml(), self.roster.number, self.roster.hash(), epoch)
        return {client: decode(self.victims.ask(client, question), Introduction) for client in clients}

    def statement(self, introductions: Mapping[int, Introduction]) -> Statement:
        """The statement of a first epoch."""
        chain = Lineage(self.bare).beginning(self.state).chain
        commitments = tuple(
            Commitment(client, known.commitment, known.signature) for client, known in sorted(introductions.items())
        )
        tiers, roster = tiers_for(self.plan, {}), self.roster
        plan, initial = self.plan.to_toml(), self.state.digest()
        return Statement(
            PROTOCOL, plan, initial, roster.number, roster.hash(), tiers, 0, NOTHING, 0, chain, commitments, ()
        )

    def nonce(self, client: int, statement: Statement) -> bytes:
        """Tell a client a statement, and get its nonce for it."""
        return decode(self.victims.ask(client, Begin(encode(statement), ())), Ready).nonce

    def enter(self, client: int, statement: Statement, nonces: bytes) -> None:
        self.victims.ask(client, Openings(run_of(encode(statement)), nonces))

    def view(self, statement: Statement, nonces: bytes) -> View:
        data = encode(statement)
        run = run_of(data)
        salt = salt_of(run, statement, nonces)
        lineage = Lineage(self.bare).in_epoch(Epoch(0, salt, run, statement.chain))
        return View(statement, data, lineage, salt, lineage.beginning(self.state))

    def begin(self, clients: Sequence[int] | None = None) -> View:
        """An honest beginning with these clients."""
        clients = self.everybody if clients is None else clients
        statement = self.statement(self.introductions(clients))
        nonces = b"".join(self.nonce(client, statement) for client in sorted(clients))
        for client in clients:
            self.enter(client, statement, nonces)
        return self.view(statement, nonces)

    # Rounds

    def request(self, view: View, catch_up: CatchUp | None = None) -> RoundRequest:
        present = view.present
        digest, weights = view.trajectory.digest, present.state.weights_hash()
        return RoundRequest(present.round, digest, present.chain, weights, catch_up or CatchUp("outcomes", 0, ()))

    def opened(self, view: View, clients: Sequence[int], slot: int) -> ServerSlot:
        """Collect keys and sealed shares for a slot."""
        policy = policy_of(view.trajectory, dict(enumerate(view.statement.tiers)), view.salt)
        lists = {c: decode(self.victims.ask(c, Hello(slot)), Advertisement) for c in clients}
        members = tuple(sorted(clients))
        threshold = policy.least_threshold(policy.graph(members, slot), len(self.everybody))
        bare = Opening(slot, members, threshold, policy.floor, ())
        server = ServerSlot(view.run, checked_slot(bare, policy), lists)
        for client in members:
            others = tuple(encode(lists[peer]) for peer in members if peer != client)
            turned = self.turned(client, Turn(None, Opening(slot, members, threshold, policy.floor, others)))
            if turned.sealed is None:
                raise RefusedError(f"client {client}: {self.victims.logs[client][-1:]}")
            server.take_sealed(client, turned.sealed)
        return server

    def turned(self, client: int, turn: Turn) -> Turned:
        return decode(self.victims.ask(client, turn), Turned)

    def vectors(self, server: ServerSlot, requests: Mapping[int, MaskedRequest]) -> None:
        for client, request in requests.items():
            contribution = decode(self.victims.ask(client, request), Contribution)
            server.take_vector(client, contribution.elements(), self.bare.length + EXTRAS)

    def unmasked(self, server: ServerSlot, clients: Iterable[int]) -> RingVector:
        """Collect the shares of the survivors and remove the masks."""
        if self.plan.secure.mode == "malicious-server":
            directory = self.roster.directory()
            for client in clients:
                agreed = decode(self.victims.ask(client, server.survivors()), Agreed)
                server.take_agreed(client, agreed, directory[client])
        for client in clients:
            turned = self.turned(client, Turn(server.unmask(), None))
            if turned.unmasked is None:
                raise RefusedError(f"client {client}: {self.victims.logs[client][-1:]}")
            server.take_unmasked(client, turned.unmasked)
        return server.total()

    def play(self, view: View, clients: Sequence[int] | None = None, request: RoundRequest | None = None) -> RingVector:
        """A whole round with these clients; returns the sum of their vectors."""
        clients = self.everybody if clients is None else clients
        request = request or self.request(view)
        server = self.opened(view, clients, request.round)
        self.vectors(server, server.requests(dict.fromkeys(clients, request)))
        return self.unmasked(server, clients)

    def decoded(self, total: RingVector, contributors: int) -> Sum:
        return self.bare.ring.decode(total.astype(np.uint32), contributors)

    def own_vector(self, client: int, view: View, number: int, weights: F32) -> RingVector:
        """What a client really computes for a round: what no server may learn."""
        worker = self.victims.equip(client)(self.plan).worker
        mine = replace(worker, k=view.statement.tiers[client], trajectory=view.trajectory)
        return mine.vector(number, weights)


@contextmanager
def refused(server: HostileServer, client: int, words: str) -> Iterator[None]:
    """The client abstains, and its own log says why."""
    with pytest.raises(RefusedError):
        yield
    assert any(words in line for line in server.victims.logs[client]), server.victims.logs[client]
