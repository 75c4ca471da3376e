"""The server's half of one slot of a secure sum: message in, message out, no transport and no clock."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from baffle.aggregation.client_policy import Slot
from baffle.aggregation.context import keys_digest, round_context, signed, survivors_text
from baffle.aggregation.masks import agree, pair_mask, self_mask
from baffle.aggregation.messages import (
    BOX_BYTES,
    NO_SHARE,
    Advertisement,
    Agree,
    Agreed,
    MaskedRequest,
    Sealed,
    Unmask,
    Unmasked,
    cut,
)
from baffle.aggregation.shares import SHARE_BYTES, combine, weights
from baffle.core.messages import RoundRequest
from baffle.core.ring import RingVector, add
from baffle.errors import AbortError, RefusalError


@dataclass
class ServerSlot:
    """Takes what clients send, in any order, and ends with the sum over the clients whose vectors came."""

    run: bytes
    slot: Slot
    advertisements: Mapping[int, Advertisement]
    sealed: dict[int, list[bytes]] = field(default_factory=dict)
    participants: tuple[int, ...] = ()
    context: bytes = b""
    vectors: dict[int, RingVector] = field(default_factory=dict)
    alive: tuple[int, ...] = ()
    agreed: dict[int, bytes] = field(default_factory=dict)
    released: dict[int, dict[int, bytes]] = field(default_factory=dict)
    coefficients: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    _near: dict[int, list[int]] = field(default_factory=dict)

    def take_sealed(self, sender: int, sealed: Sealed) -> None:
        if sealed.slot != self.slot.number or sender not in self.slot.opening.members:
            raise RefusalError(f"boxes for slot {sealed.slot}, expected slot {self.slot.number}")
        boxes = cut(sealed.boxes, BOX_BYTES, len(self.slot.graph.neighbours[sender]), "boxes")
        if self.sealed.setdefault(sender, boxes) != boxes:
            raise RefusalError(f"client {sender} has sealed other shares before")

    def requests(self, about: Mapping[int, RoundRequest]) -> dict[int, MaskedRequest]:
        """Fix the participants: the clients that have sealed their shares. Each gets the boxes of its neighbours."""
        self.participants = tuple(sorted(self.sealed))
        keys = keys_digest(self.run, (self.advertisements[client] for client in self.participants), self.slot.number)
        self.context = round_context(keys, self.slot.opening, about[self.participants[0]], self.participants)
        boxes = {
            sender: dict(zip(self.slot.graph.neighbours[sender], self.sealed[sender], strict=True))
            for sender in self.participants
        }
        return {
            receiver: MaskedRequest(
                about[receiver],
                self.participants,
                keys,
                b"".join(boxes[sender][receiver] for sender in self._neighbours(receiver)),
            )
            for receiver in self.participants
        }

    def take_vector(self, sender: int, vector: RingVector, length: int) -> None:
        if sender not in self.participants or len(vector) != length:
            raise RefusalError(f"a vector of {len(vector)} elements from client {sender}, expected {length}")
        first = self.vectors.setdefault(sender, vector)
        if not np.array_equal(first, vector):
            raise RefusalError(f"client {sender} has sent another vector before")

    def survivors(self) -> Agree:
        """Fix the survivors: the clients whose vectors have come."""
        self.alive = tuple(sorted(self.vectors))
        if len(self.alive) < max(self.slot.opening.floor, self.slot.opening.threshold):
            raise AbortError(f"{len(self.alive)} of {len(self.participants)} clients sent a vector, too few for a sum")
        dropped = tuple(client for client in self.participants if client not in self.vectors)
        return Agree(self.slot.number, self.alive, dropped)

    def take_agreed(self, sender: int, agreed: Agreed, identity: bytes) -> None:
        text = survivors_text(self.run, self.context, self.alive)
        if agreed.slot != self.slot.number or sender not in self.alive or not signed(identity, agreed.signature, text):
            raise RefusalError(f"client {sender} has signed other survivors")
        self.agreed[sender] = agreed.signature

    def unmask(self) -> Unmask:
        """The request to release shares, with the signatures of the clients that agreed on the survivors."""
        survivors = self.survivors()
        signers = tuple(sorted(self.agreed))
        signatures = b"".join(self.agreed[signer] for signer in signers)
        return Unmask(survivors.slot, survivors.alive, survivors.dropped, signers, signatures)

    def take_unmasked(self, sender: int, unmasked: Unmasked) -> None:
        if unmasked.slot != self.slot.number or sender not in self.alive:
            raise RefusalError(f"shares for slot {unmasked.slot}, expected slot {self.slot.number}")
        neighbours = self._neighbours(sender)
        shares = cut(unmasked.shares, SHARE_BYTES, len(neighbours), "shares")
        released = dict(zip((*neighbours, sender), (*shares, unmasked.own), strict=True))
        if self.released.setdefault(sender, released) != released:
            raise RefusalError(f"client {sender} has released other shares before")

    def total(self) -> RingVector:
        """The sum over the survivors. Aborts if too few shares of any participant's secret were released."""
        return add(chain(self.vectors.values(), self._corrections()))

    def _corrections(self) -> Iterable[RingVector]:
        """What must be added to the sum of the vectors to remove the masks left in it."""
        length = len(self.vectors[self.alive[0]])
        for client in self.participants:
            secret = self._recovered_secret(client)
            if client in self.vectors:
                yield np.negative(self_mask(secret, self.context, length))
                continue
            private = X25519PrivateKey.from_private_bytes(secret)
            if private.public_key().public_bytes_raw() != self._key_of(client):
                raise AbortError(f"the shares of client {client} give another key than it advertised")
            for peer in self._neighbours(client):
                if peer in self.vectors:  # cancels what the peer added for the dropped client
                    yield pair_mask(agree(private, self._key_of(peer)), self.context, length, plus=client < peer)

    def _neighbours(self, client: int) -> list[int]:
        """A client's neighbours among the participants."""
        if client not in self._near:
            participants = set(self.participants)
            self._near[client] = [peer for peer in self.slot.graph.neighbours[client] if peer in participants]
        return self._near[client]

    def _key_of(self, client: int) -> bytes:
        advertisement = self.advertisements[client]
        return advertisement.keys[self.slot.number - advertisement.first]

    def _recovered_secret(self, client: int) -> bytes:
        """A survivor's self-mask seed, or a dropped client's key, from a threshold of released shares."""
        threshold = self.slot.opening.threshold
        shares: dict[int, bytes] = {}
        for peer in sorted((client, *self._neighbours(client))):
            if len(shares) == threshold:
                break
            share = self.released[peer][client] if peer in self.released else NO_SHARE
            if share != NO_SHARE:
                shares[peer] = share
        if len(shares) < threshold:
            raise AbortError(f"{len(shares)} neighbours of client {client} answered, {threshold} are needed")
        holders = tuple(peer + 1 for peer in shares)
        if holders not in self.coefficients:  # in the complete graph the same holders serve every secret
            self.coefficients[holders] = weights(holders)
        secret = combine(self.coefficients[holders], list(shares.values()))
        if secret is None:
            raise AbortError(f"the shares of client {client} do not belong together")
        return secret
