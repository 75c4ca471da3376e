"""The server's half of one slot of a secure sum: message in, message out, no transport and no clock."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from baffle.aggregation.client_policy import Slot
from baffle.aggregation.context import (
    key_context,
    keys_digest,
    round_context,
    seed_commitment,
    share_digest,
    signed,
    state_text,
    survivors_text,
)
from baffle.aggregation.masks import agree, mask_key, pair_mask, self_mask
from baffle.aggregation.messages import (
    BOX_BYTES,
    DIGEST_BYTES,
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
from baffle.aggregation.server.recovery import Dealt, Recovery
from baffle.aggregation.shares import SHARE_BYTES
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
    commitments: dict[int, bytes] = field(default_factory=dict)  # to the self masks' seeds
    digests: dict[int, bytes] = field(default_factory=dict)  # dealer → those of all its shares, holder by holder
    participants: tuple[int, ...] = ()
    context: bytes = b""
    vectors: dict[int, RingVector] = field(default_factory=dict)
    alive: tuple[int, ...] = ()
    agreed: dict[int, bytes] = field(default_factory=dict)
    chain: bytes = b""
    states: dict[int, bytes] = field(default_factory=dict)  # signatures over the state before the round
    released: dict[int, dict[int, bytes]] = field(default_factory=dict)
    recovery: Recovery = field(init=False)
    _near: dict[int, list[int]] = field(default_factory=dict)
    _private_keys: dict[tuple[int, bytes], X25519PrivateKey] = field(default_factory=dict)

    def __post_init__(self) -> None:
        complete = self.slot.graph.k + 1 == len(self.slot.opening.members)
        self.recovery = Recovery(self.slot.number, self.slot.opening.threshold, same_holders=complete)

    def take_sealed(self, sender: int, sealed: Sealed) -> None:
        if sealed.slot != self.slot.number or sender not in self.slot.opening.members:
            raise RefusalError(f"boxes for slot {sealed.slot}, expected slot {self.slot.number}")
        boxes = cut(sealed.boxes, BOX_BYTES, len(self.slot.graph.neighbours[sender]), "boxes")
        known = self.sealed.setdefault(sender, boxes), self.commitments.setdefault(sender, sealed.commitment)
        if known != (boxes, sealed.commitment):
            raise RefusalError(f"client {sender} has sealed other shares before")
        self.digests[sender] = b"".join(box[-2 * DIGEST_BYTES :] for box in boxes)

    def leave_out(self, clients: Iterable[int]) -> None:
        """Go on as if these clients had sealed nothing. This is possible until the participants are fixed."""
        for client in clients:
            self.sealed.pop(client, None)

    def requests(self, about: Mapping[int, RoundRequest]) -> dict[int, MaskedRequest]:
        """Fix the participants: the clients that have sealed their shares. Each gets the boxes of its neighbours."""
        self.participants = tuple(sorted(self.sealed))
        keys = keys_digest(self.run, (self.advertisements[client] for client in self.participants), self.slot.number)
        self.chain = about[self.participants[0]].chain
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
        state = state_text(self.run, self.slot.number, self.chain)
        if not signed(identity, agreed.state, state):
            raise RefusalError(f"client {sender} has signed another state")
        self.agreed[sender] = agreed.signature
        self.states[sender] = agreed.state

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
        """The sum over the survivors. Aborts if the released shares do not give every participant's secret."""
        return add(chain(self.vectors.values(), self._corrections(self._recovered_secrets())))

    @property
    def lies(self) -> Mapping[int, str]:
        """Who was found to lie when the sum was made, and how."""
        return self.recovery.lies

    def _corrections(self, recovered: Mapping[int, bytes]) -> Iterable[RingVector]:
        """What must be added to the sum of the vectors to remove the masks left in it."""
        length = len(self.vectors[self.alive[0]])
        for client, secret in recovered.items():
            if client in self.vectors:
                yield np.negative(self_mask(secret, self.context, length))
                continue
            private = self._private_key(client, secret)
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

    def _recovered_secrets(self) -> dict[int, bytes]:
        """The survivors' self-mask seeds and the dropped clients' keys. All are tried before any failure counts, so
        that all lies come to light at once."""
        recovered: dict[int, bytes] = {}
        faults: list[AbortError] = []
        for client in self.participants:
            try:
                recovered[client] = self._recovered_secret(client)
            except AbortError as fault:
                faults.append(fault)
        if faults:
            raise faults[0]
        return recovered

    def _recovered_secret(self, client: int) -> bytes:
        holders = sorted((client, *self._neighbours(client)))
        shares = {peer: self.released[peer][client] for peer in holders if peer in self.released}
        complaints = list(shares.values()).count(NO_SHARE)
        if complaints:
            self.recovery.note_unopened(client, complaints, self.slot.graph.k + 1)
            shares = {peer: share for peer, share in shares.items() if share != NO_SHARE}
        return self.recovery.secret(shares, self._dealt(client))

    def _dealt(self, client: int) -> Dealt:
        """What a client has said about the secret of it that is needed."""
        return Dealt(
            client,
            self._is_seed(client) if client in self.vectors else self._is_key(client),
            lambda holder, share: holder == client or self._is_share(client, holder, share),
        )

    def _is_seed(self, client: int) -> Callable[[bytes], bool]:
        return lambda seed: seed_commitment(self.run, self.slot.number, client, seed) == self.commitments[client]

    def _is_key(self, client: int) -> Callable[[bytes], bool]:
        def matches(secret: bytes) -> bool:
            return self._private_key(client, secret).public_key().public_bytes_raw() == self._key_of(client)

        return matches

    def _private_key(self, client: int, secret: bytes) -> X25519PrivateKey:
        """The key that a secret would give a client. It is needed twice: to check the secret, and to use it."""
        if (client, secret) not in self._private_keys:
            context = key_context(self.run, self.advertisements[client].session, client, self.slot.number)
            self._private_keys[client, secret] = mask_key(secret, context)
        return self._private_keys[client, secret]

    def _is_share(self, dealer: int, holder: int, share: bytes) -> bool:
        place = 0 if dealer in self.vectors else 1
        number = 2 * self.slot.graph.neighbours[dealer].index(holder) + place
        digest = self.digests[dealer][number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
        return share_digest(self.run, self.slot.number, dealer, holder, place, share) == digest
