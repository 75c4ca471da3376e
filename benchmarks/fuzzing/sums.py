"""Both ends of a secure sum, in every phase of a round.

client   a real client before each phase, and after the last one
server   the server's half of a slot in each phase
decode   the reader of one type of message; what it accepts must read the same when written again
collect  a whole round in which one client sends it in one phase (one message in 500: it costs as much as a round)

After a share that was accepted, the sum is the plain one, or there is none.
"""

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, cast
from unittest.mock import patch

import msgspec
import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from baffle.aggregation.client.session import ClientSession
from baffle.aggregation.client_policy import ClientPolicy, checked_slot
from baffle.aggregation.messages import Advertisement, Agreed, Turn, Turned, decode_request, phase_of
from baffle.aggregation.server.crash_record import CrashFile
from baffle.aggregation.server.secure_sum import SecureSum
from baffle.aggregation.server.slot import ServerSlot
from baffle.client.client import Client
from baffle.client.replica import Replica
from baffle.client.worker import Worker
from baffle.core.messages import CatchUp, Message, RoundRequest, contribution_to, decode, encode
from baffle.core.ports import CONTRIBUTED
from baffle.core.ring import EXTRAS, Ring, RingVector, Sum, add
from baffle.errors import MessageError
from fuzzing.checks import Target, Tried, clone
from fuzzing.damage import KINDS, Mutations

N, SCALARS, HEAD, VICTIM, ROUND = 4, 3, 2, 0, 1
LENGTH = SCALARS + HEAD
KEYS_AT_ONCE = 4
"""Keys in one list. Short lists cost less."""


@dataclass(frozen=True)
class Fixed:
    """Stands in for a client's worker and replica: its vector is always the same."""

    number: int

    def held_for(self, _request: RoundRequest) -> tuple[None, None]:
        """No weights are needed."""
        return None, None

    def vector(self, _round: int, _weights: None, _optimizer: None) -> RingVector:
        return vector(self.number)


def vector(client: int) -> RingVector:
    scalars, head = (np.arange(count, dtype=np.float64) - client / 2 for count in (SCALARS, HEAD))
    return RING.encode(scalars, LENGTH, 1 + client, 0.5, head=head)


RING = Ring(clients=N, n_max=2 * N, clip=4.0, head=HEAD, head_clip=16.0)


class Federation:
    """A federation that records its round: every message, and the victim's client before each phase. `replaced` holds,
    by phase, what is sent instead of the victim's reply. With `like`, it is another federation after a restart."""

    def __init__(
        self,
        *,
        agreement: bool,
        replaced: Mapping[str, bytes] | None = None,
        crash_store: CrashFile | None = None,
        like: "Federation | None" = None,
    ) -> None:
        self._replaced = replaced or {}
        self.run: bytes = like.run if like else secrets.token_bytes(32)
        new = {client: Ed25519PrivateKey.generate() for client in range(N)}
        self.identities: dict[int, Ed25519PrivateKey] = like.identities if like else new
        identities = self.identities
        self.directory = {c: identity.public_key().public_bytes_raw() for c, identity in identities.items()}
        self.policy = ClientPolicy(agreement=agreement)
        sessions = {
            c: ClientSession(c, identity, self.directory, self.run, self.policy) for c, identity in identities.items()
        }
        self.clients = {
            c: Client(cast(Replica, Fixed(c)), cast(Worker, Fixed(c)), session) for c, session in sessions.items()
        }
        self.server = SecureSum(RING, LENGTH, self.run, self.directory, self.policy, crash_store)
        self.requests: dict[str, dict[int, bytes]] = {}
        self.replies: dict[str, dict[int, bytes]] = {}
        self.before: dict[str, Client] = {}
        self.request = RoundRequest(ROUND, bytes(32), bytes(32), bytes(32), CatchUp("weights", 0, (b"",)))
        self.collected = self.server.collect([dict.fromkeys(range(N), self.request)], self)
        self.before["nothing more"] = clone(self.clients[VICTIM])

    @property
    def contributors(self) -> list[int]:
        return [client for client, event in self.collected.events.items() if event == CONTRIBUTED]

    def exchange(self, requests: Mapping[int, bytes]) -> Mapping[int, bytes]:
        phase = phase_of(decode_request(next(iter(requests.values()))))
        self.before[phase] = clone(self.clients[VICTIM])
        self.requests[phase] = dict(requests)
        self.replies[phase] = {client: self.clients[client].answer(data) for client, data in requests.items()}
        if phase in self._replaced and VICTIM in requests:
            self.replies[phase][VICTIM] = self._replaced[phase]
        return self.replies[phase]

    def slots(self) -> dict[str, ServerSlot]:
        """For each phase, the server's half when all but the victim have answered."""
        asked = cast(Turn, decode_request(self.requests["share"][VICTIM]))
        lists = {client: decode(data, Advertisement) for client, data in self.replies["keys"].items()}
        slot = ServerSlot(self.run, checked_slot(cast(Any, asked.opening), self.policy), lists)
        by_phase: dict[str, ServerSlot] = {}

        def all_but_victim_then_victim(phase: str) -> None:
            for client in reversed(range(N)):
                if client == VICTIM:
                    by_phase[phase] = clone(slot)
                TAKE[phase](self, slot, client, self.replies[phase][client])

        all_but_victim_then_victim("share")
        slot.requests(dict.fromkeys(range(N), self.request))
        all_but_victim_then_victim("vector")
        slot.survivors()
        if self.policy.agreement:
            all_but_victim_then_victim("agree")
        all_but_victim_then_victim("unmask")
        return by_phase


def take_sealed(_: Federation, slot: ServerSlot, client: int, data: bytes) -> None:
    sealed = decode(data, Turned).sealed
    if sealed is None:
        raise MessageError("nothing sealed")
    slot.take_sealed(client, sealed)


def take_vector(federation: Federation, slot: ServerSlot, client: int, data: bytes) -> None:
    slot.take_vector(client, contribution_to(federation.request, data), LENGTH + EXTRAS)


def take_agreed(federation: Federation, slot: ServerSlot, client: int, data: bytes) -> None:
    slot.take_agreed(client, decode(data, Agreed), federation.directory[client])


def take_unmasked(_: Federation, slot: ServerSlot, client: int, data: bytes) -> None:
    unmasked = decode(data, Turned).unmasked
    if unmasked is None:
        raise MessageError("nothing released")
    slot.take_unmasked(client, unmasked)


TAKE: dict[str, Callable[[Federation, ServerSlot, int, bytes], None]] = {
    "share": take_sealed,
    "vector": take_vector,
    "agree": take_agreed,
    "unmask": take_unmasked,
}


def to_client(client: Client, data: bytes) -> bool:
    tag, *parts = msgspec.msgpack.decode(client.answer(data))
    return bool(tag == "abstention" or (tag == "turned" and parts[:2] == [None, None]))


def to_server(federation: Federation, phase: str) -> Callable[[ServerSlot, bytes], bool]:
    def feed(slot: ServerSlot, data: bytes) -> bool:
        TAKE[phase](federation, slot, VICTIM, data)
        if phase == "unmask":
            require_right_or_none(slot)
        return False

    return feed


def require_right_or_none(slot: ServerSlot) -> None:
    try:
        total = RING.decode(slot.total(), len(slot.alive))
    except MessageError:
        return
    require_plain(total, slot.alive)


def require_plain(total: Sum, contributors: Iterable[int]) -> None:
    vectors = [vector(client) for client in contributors]
    expected = RING.decode(add(vectors), len(vectors))
    if not np.array_equal(total.totals, expected.totals) or total[1:] != expected[1:]:
        raise AssertionError("A WRONG SUM")


def to_reader(kind: type[Message]) -> Callable[[None, bytes], bool]:
    def feed(_: None, data: bytes) -> bool:
        message = decode(data, kind)
        if encode(decode(encode(message), kind)) != encode(message):
            raise AssertionError("a message that reads otherwise when written again")
        return False

    return feed


def targets_of(federation: Federation) -> list[Target]:
    mode = "agreement" if federation.policy.agreement else "plain"
    requests = {phase: [sent[VICTIM]] for phase, sent in federation.requests.items()}
    everything = [sent[VICTIM] for sent in federation.requests.values()]
    targets = [
        Target(f"client before {phase} ({mode})", client, requests.get(phase, everything), to_client)
        for phase, client in federation.before.items()
    ]
    for phase, slot in federation.slots().items():
        reply = federation.replies[phase][VICTIM]
        targets.append(Target(f"server in {phase} ({mode})", slot, [reply], to_server(federation, phase)))
    return targets


def to_collect(agreement: bool, phase: str) -> Callable[[None, bytes], bool]:
    """A whole round in which the victim sends the message in one phase."""

    def feed(_: None, data: bytes) -> bool:
        federation = Federation(agreement=agreement, replaced={phase: data})
        total = federation.collected.sums[0]
        if total and phase != "vector":  # nobody can tell a damaged vector from a different one
            require_plain(total, federation.contributors)
        return False

    return feed


def sums(count: int, seed: int) -> Iterator[Tried]:
    """Malformed messages of secure sums."""
    with patch("baffle.aggregation.client.session.KEYS_AT_ONCE", KEYS_AT_ONCE):
        federations = [Federation(agreement=agreement) for agreement in (False, True)]
        exchanges = [messages for f in federations for part in (f.requests, f.replies) for messages in part.values()]
        corpus = [data for messages in exchanges for data in messages.values()]
        ends = [target for federation in federations for target in targets_of(federation)]
        readers = [Target(f"decode {kind.__name__}", None, corpus, to_reader(kind)) for kind in KINDS]
        rounds = [
            Target(f"collect, {phase}", None, [replies[VICTIM]], to_collect(f.policy.agreement, phase))
            for f in federations
            for phase, replies in f.replies.items()
        ]
        draw = Random(seed)
        mutations = Mutations(draw, corpus)
        for number in range(count):
            target = draw.choice(rounds if number % 500 == 499 else readers if number % 8 == 7 else ends)
            yield target.take(mutations.of(draw.choice(target.fitting if draw.random() < 0.8 else corpus)))
