"""A federation in memory: real sessions on both sides, driven by hand."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import sha256

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from baffle.aggregation.client.marks import Memory
from baffle.aggregation.client.session import ClientSession
from baffle.aggregation.client_policy import ClientPolicy, checked_slot
from baffle.aggregation.messages import BOX_BYTES, Advertisement, MaskedRequest, Opening, Unmask, Unmasked, cut
from baffle.aggregation.server.slot import ServerSlot
from baffle.aggregation.shares import SHARE_BYTES
from baffle.core.messages import CatchUp, RoundRequest, encode
from baffle.core.ring import RingVector, add

LENGTH = 5


def weights_after(round_number: int) -> bytes:
    return sha256(b"weights" + round_number.to_bytes(8, "big")).digest()


def about(round_number: int, *, weights_hash: bytes | None = None, chain: bytes = bytes(32)) -> RoundRequest:
    """The request of a round, by default about weights that belong to this round alone."""
    catch_up = CatchUp("weights", 0, ())
    return RoundRequest(round_number, bytes(32), chain, weights_hash or weights_after(round_number), catch_up)


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

    def new_session(self, client: int, memory: Memory | None = None) -> ClientSession:
        return ClientSession(client, self.identities[client], self.directory, self.run, self.policy, memory=memory)

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
        advertisements: Sequence[Advertisement] | None = None,
    ) -> Opening:
        """The opening for a client, with everybody's keys."""
        members = self.everybody if members is None else tuple(members)
        if advertisements is None:
            advertisements = [self.advertised[peer] for peer in members if peer != client]
        company = self.policy.company_of(min(members, default=0), slot, members)
        least = self.policy.least_threshold(self.policy.graph(members, slot), len(company))
        t = least if threshold is None else threshold
        return Opening(slot, members, t, floor, tuple(encode(advertisement) for advertisement in advertisements))

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
        self, server: ServerSlot, requests: Mapping[int, MaskedRequest], sending: Sequence[int], length: int = LENGTH
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


def new_federation(n: int = 4, **settings: object) -> Federation:
    federation = Federation(n, **settings)  # type: ignore[arg-type]
    federation.advertise()
    return federation


def never() -> RingVector:
    raise AssertionError("a vector was computed for a request that must be refused")


def unmasked_by(federation: Federation, server: ServerSlot, answering: tuple[int, ...]) -> None:
    unmask = server.unmask()
    for client in answering:
        server.take_unmasked(client, federation.sessions[client].unmask(unmask))


def asked_of(server: ServerSlot) -> dict[int, MaskedRequest]:
    return server.requests(dict.fromkeys(server.sealed, about(server.slot.number)))


def boxes_of(asked: MaskedRequest) -> list[bytes]:
    return cut(asked.boxes, BOX_BYTES, len(asked.boxes) // BOX_BYTES, "boxes")


def shares_of(released: Unmasked) -> list[bytes]:
    return cut(released.shares, SHARE_BYTES, len(released.shares) // SHARE_BYTES, "shares")
