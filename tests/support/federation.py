"""A federation in memory: real sessions on both sides, driven by hand or over a network that fails on purpose."""

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from baffle.aggregation.client.marks import Marks
from baffle.aggregation.client.session import ClientSession
from baffle.aggregation.client_policy import ClientPolicy, checked_slot
from baffle.aggregation.messages import (
    Advertisement,
    Agree,
    Hello,
    MaskedRequest,
    Opening,
    Request,
    Turn,
    Unmask,
    decode_request,
)
from baffle.aggregation.server.secure_sum import SecureSum
from baffle.aggregation.server.slot import ServerSlot
from baffle.core.messages import Abstention, CatchUp, Contribution, Message, RoundRequest, encode
from baffle.core.ports import Collected
from baffle.core.ring import EXTRAS, Ring, RingVector, Sum, add
from baffle.errors import BaffleError, RefusalError

LENGTH = 5
GRAPH_SEED = bytes(range(32))


def weights_after(round_number: int) -> bytes:
    return sha256(b"weights" + round_number.to_bytes(8, "big")).digest()


def about(round_number: int, *, weights_hash: bytes | None = None, skipped: Iterable[int] = ()) -> RoundRequest:
    """The request of a round, by default about weights that belong to this round alone."""
    catch_up = CatchUp("weights", 0, ())
    weights = weights_hash or weights_after(round_number)
    return RoundRequest(round_number, round_number, bytes(32), weights, catch_up, tuple(skipped))


def random_vector(length: int = LENGTH) -> RingVector:
    return np.frombuffer(secrets.token_bytes(4 * length), dtype="<u4")


class Federation:
    """Clients with identities and sessions, and what a server would know about them."""

    def __init__(
        self,
        n: int,
        *,
        least_floor: int = 2,
        tiers: Mapping[int, int] | None = None,
        policy: ClientPolicy | None = None,
    ) -> None:
        self.run = secrets.token_bytes(32)
        self.policy = policy or ClientPolicy(floor=least_floor, tiers=tiers or {})
        self.identities = {client: Ed25519PrivateKey.generate() for client in range(n)}
        self.directory = {c: identity.public_key().public_bytes_raw() for c, identity in self.identities.items()}
        self.everybody = tuple(range(n))
        self.sessions = {client: self.new_session(client) for client in range(n)}
        self.advertised: dict[int, Advertisement] = {}

    def new_session(
        self, client: int, marks: Marks | None = None, remember: Callable[[Marks], None] = lambda _: None
    ) -> ClientSession:
        return ClientSession(
            client,
            self.identities[client],
            self.directory,
            self.run,
            self.policy,
            marks=marks,
            remember=remember,
        )

    def advertise(self, slot: int = 0) -> None:
        self.advertised = {client: session.advertise(slot) for client, session in self.sessions.items()}

    def opening(
        self,
        slot: int,
        client: int,
        members: Sequence[int] | None = None,
        *,
        threshold: int | None = None,
        floor: int = 2,
        seed: bytes = GRAPH_SEED,
        advertisements: Sequence[Advertisement] | None = None,
    ) -> Opening:
        """The opening for a client, with everybody's keys."""
        members = self.everybody if members is None else tuple(members)
        if advertisements is None:
            advertisements = [self.advertised[peer] for peer in members if peer != client]
        company = self.policy.company_of(min(members, default=0), slot, members)
        least = self.policy.least_threshold(self.policy.graph(members, seed), len(company))
        t = least if threshold is None else threshold
        return Opening(slot, members, t, floor, seed, tuple(encode(advertisement) for advertisement in advertisements))

    def server(self, slot: int = 0, members: Sequence[int] | None = None, floor: int = 2) -> ServerSlot:
        return ServerSlot(
            self.run,
            checked_slot(self.opening(slot, -1, members, floor=floor), replace(self.policy, floor=floor)),
            dict(self.advertised),
        )

    def sealed(
        self,
        slot: int = 0,
        members: Sequence[int] | None = None,
        *,
        sealing: Sequence[int] | None = None,
        floor: int = 2,
    ) -> ServerSlot:
        """An open slot, with the shares of the clients in `sealing`."""
        server = self.server(slot, members, floor)
        members = self.everybody if members is None else members
        for client in members if sealing is None else sealing:
            opening = self.opening(slot, client, members, floor=floor)
            server.take_sealed(client, self.sessions[client].seal(opening))
        return server

    def masked(
        self,
        server: ServerSlot,
        requests: Mapping[int, MaskedRequest],
        sending: Sequence[int],
        length: int = LENGTH,
    ) -> dict[int, RingVector]:
        """Send the masked vectors of the clients in `sending`, and return them as they were before masking."""
        plain = {client: random_vector(length) for client in sending}
        for client in sending:
            masked = self.sessions[client].mask(requests[client], lambda client=client: plain[client])  # type: ignore[misc]
            server.take_vector(client, masked, length)
        return plain

    def until_masked(
        self, request: RoundRequest, *, members: Sequence[int] | None = None, sending: Sequence[int] | None = None
    ) -> tuple[ServerSlot, dict[int, RingVector]]:
        """A slot in which all vectors have come, and the vectors before masking."""
        server = self.sealed(request.round, members)
        asked = server.requests(dict.fromkeys(server.sealed, request))
        return server, self.masked(server, asked, tuple(asked) if sending is None else sending)

    def whole(self, request: RoundRequest) -> Unmask:
        """Play a whole slot in which nobody fails, and return the last request."""
        server, plain = self.until_masked(request)
        unmask = server.unmask()
        for client in server.alive:
            server.take_unmasked(client, self.sessions[client].unmask(unmask))
        assert np.array_equal(server.total(), add(list(plain.values())))
        return unmask


Spoil = Callable[[int, str, bytes], bytes | None]


def phase_of(asked: Request) -> str:
    match asked:
        case Hello():
            return "hello"
        case MaskedRequest():
            return "vector"
        case Turn(unmask=None):
            return "seal"
        case Agree():
            return "agree"
        case _:
            return "unmask"


class Network:
    """Carries messages to sessions. `deaf` loses requests; `spoil` changes replies, or with none loses them."""

    def __init__(
        self,
        federation: Federation,
        ring: Ring,
        *,
        deaf: Callable[[int, str], bool] = lambda _client, _phase: False,
        spoil: Spoil = lambda _client, _phase, data: data,
    ) -> None:
        self.federation = federation
        self.ring = ring
        self.deaf = deaf
        self.spoil = spoil
        self.exchanges: list[dict[int, str]] = []
        self.plain: dict[tuple[int, int], RingVector] = {}
        self.up: dict[int, int] = {}
        self.down: dict[int, int] = {}

    def exchange(self, requests: Mapping[int, bytes]) -> Mapping[int, bytes]:
        self.exchanges.append({client: phase_of(decode_request(data)) for client, data in requests.items()})
        replies: dict[int, bytes] = {}
        for client, data in requests.items():
            self.down[client] = self.down.get(client, 0) + len(data)
            phase = phase_of(decode_request(data))
            if self.deaf(client, phase):
                continue
            reply = self.spoil(client, phase, self._answer(client, decode_request(data)))
            if reply is not None:
                replies[client] = reply
                self.up[client] = self.up.get(client, 0) + len(reply)
        return replies

    def _answer(self, client: int, asked: Request) -> bytes:
        number = asked.request.round if isinstance(asked, MaskedRequest) else 0
        try:
            return encode(self._reply(client, asked))
        except BaffleError as fault:
            return encode(Abstention(number, str(fault)))

    def _reply(self, client: int, asked: Request) -> Message:
        session = self.federation.sessions[client]
        match asked:
            case Hello():
                return session.advertise(asked.slot)
            case Agree():
                return session.agree(asked)
            case Turn():
                return session.turn(asked)
            case MaskedRequest():
                vector = session.mask(asked, lambda: self._vector(client, asked.request.round))
                return Contribution(asked.request.round, vector.tobytes())
            case _:
                raise RefusalError("a request without masks")

    def _vector(self, client: int, round_number: int) -> RingVector:
        values = np.random.default_rng([client, round_number]).normal(size=LENGTH)
        vector = self.ring.encode(values, LENGTH, 1 + client, 0.5)
        self.plain[round_number, client] = vector
        return vector


class MemoryStore:
    """A crash store that outlives its server."""

    def __init__(self) -> None:
        self.data: bytes | None = None

    def write(self, record: bytes) -> None:
        self.data = record

    def read(self) -> bytes | None:
        return self.data


class Rounds:
    """Secure sums over a network, round after round."""

    def __init__(
        self,
        n: int,
        *,
        participants: Callable[[int], Sequence[int]] | None = None,
        groups: Callable[[int], Sequence[Sequence[int]]] | None = None,
        floor: int = 2,
        threshold: int = 0,
        agreement: bool = False,
        crash_store: MemoryStore | None = None,
    ) -> None:
        self.participants = participants or (lambda _: range(n))
        self.groups = groups or (lambda number: [list(self.participants(number))])
        self.policy = ClientPolicy(floor, threshold, agreement, groups_of=lambda number: self.groups(number))
        self.federation = Federation(n, policy=self.policy)
        self.ring = Ring(clients=n, n_max=2 * n, clip=4.0)
        self.network = Network(self.federation, self.ring)
        self.crash_store = crash_store
        self.sum = self.new_server()

    def new_server(self) -> SecureSum:
        """A server that has just been started: only the crash store outlives it."""
        federation = self.federation
        return SecureSum(self.ring, LENGTH, federation.run, federation.directory, self.policy, self.crash_store)

    def play(self, number: int, request: RoundRequest | None = None) -> tuple[Sum | None, dict[int, str]]:
        """One round of one group."""
        collected = self.play_groups(number, request)
        (total,) = collected.sums
        return total, dict(collected.events)

    def play_groups(self, number: int, request: RoundRequest | None = None) -> Collected:
        """Play one round, and require every sum to be the plain sum over exactly the clients that contributed."""
        before = len(self.network.exchanges)
        self.network.up = {}
        self.network.down = {}
        groups = self.groups(number)
        asked = request or about(number)
        collected = self.sum.collect([dict.fromkeys(group, asked) for group in groups], self.network)
        self.exchanges = self.network.exchanges[before:]
        assert collected.events.keys() == {client for group in groups for client in group}
        assert dict(collected.uplink) == self.network.up
        assert dict(collected.downlink) == self.network.down
        assert len(collected.sums) == len(groups)
        for group, total in zip(groups, collected.sums, strict=True):
            contributed = [client for client in group if collected.events[client] == "contributed"]
            if total is None:
                assert not contributed
                continue
            plain = add([self.network.plain[number, client] for client in contributed])
            self.require_same(total, self.ring.decode(plain, len(contributed)))
            assert len(plain) == LENGTH + EXTRAS
        return collected

    @staticmethod
    def require_same(one: Sum, other: Sum) -> None:
        assert np.array_equal(one.totals, other.totals)
        assert one[1:] == other[1:]
