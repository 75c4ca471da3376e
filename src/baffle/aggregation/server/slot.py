"""The server's half of one slot of a secure sum: messages in, messages out, without transport or clock."""

import secrets
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
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
from baffle.aggregation.shares import SHARE_BYTES, combine, correct, weights
from baffle.core.messages import RoundRequest
from baffle.core.ring import RingVector, add
from baffle.errors import AbortError, RefusalError

Shares = Mapping[int, bytes]  # holder → its share of one secret


@dataclass(frozen=True)
class Dealt:
    """A dealer's commitments to one of its secrets. They check the secret, and the share dealt to a holder."""

    dealer: int
    secret: Callable[[bytes], bool]
    share: Callable[[int, bytes], bool]


@dataclass
class Recovery:
    """Recovers secrets whose shares have a common threshold. `lies` maps each client that lied in the slot to how.

    If all secrets have the same holders (`same_holders`), one set of weights serves them all, and every share is used,
    so that any wrong one is noticed. Otherwise computing the weights costs more than everything else, so only a
    threshold of the shares is used. They are drawn at random, so that no holder can rely on being left out.
    """

    slot: int
    threshold: int
    same_holders: bool
    lies: dict[int, str] = field(default_factory=dict)
    _weights: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    _ranks: dict[int, int] = field(default_factory=lambda: defaultdict(lambda: secrets.randbits(64)))

    def secret(self, shares: Shares, dealt: Dealt) -> bytes:
        """The secret that the dealer committed to. Aborts if these shares do not give it."""
        self._require_enough(shares, dealt.dealer, "answered")
        secret = self._combined(shares)
        return self._contested(shares, dealt) if not dealt.secret(secret) else secret

    def note_unopened(self, dealer: int, complaints: int, holders: int) -> None:
        """Note that `complaints` of the holders could not open the dealer's box. Any of them may lie, and their shares
        count as missing. If so many complain that the secret cannot be recovered, either the dealer lies or more
        holders do than a sum can tolerate."""
        if complaints > holders - self.threshold:
            self._note(dealer, f"its boxes could not be opened by {complaints} of {holders} holders")

    def _contested(self, shares: Shares, dealt: Dealt) -> bytes:
        """The secret from the shares that were really dealt. If these do not fit together or give another secret, the
        dealer has lied: in what it dealt, or in its own share of its own secret, which no other client can check. A few
        such shares can be corrected."""
        right = {holder: share for holder, share in shares.items() if dealt.share(holder, share)}
        for holder in shares.keys() - right.keys():
            self._note(holder, f"it released a share that client {dealt.dealer} had not dealt to it")
        self._require_enough(right, dealt.dealer, "gave the shares they were dealt")
        for secret in self._attempts(right, dealt.dealer):
            if secret is not None and dealt.secret(secret):
                return secret
        raise AbortError(f"client {dealt.dealer} dealt shares that do not give what it had committed to")

    def _attempts(self, right: Shares, dealer: int) -> Iterator[bytes | None]:
        yield self._combined(right)
        self._note(dealer, "it dealt shares that do not give what it had committed to")
        others = {holder: share for holder, share in right.items() if holder != dealer}
        if len(others) >= self.threshold:
            yield self._combined(others)
        yield correct(_points(right), list(right.values()), self.threshold)

    def _require_enough(self, shares: Shares, dealer: int, what: str) -> None:
        if len(shares) < self.threshold:
            raise AbortError(f"{len(shares)} neighbours of client {dealer} {what}, {self.threshold} are needed")

    def _combined(self, shares: Shares) -> bytes:
        looked_at = tuple(shares)
        if not self.same_holders:
            looked_at = tuple(sorted(shares, key=self._ranks.__getitem__)[: self.threshold])
        if looked_at not in self._weights:
            self._weights[looked_at] = weights(_points(looked_at))
        return combine(self._weights[looked_at], [shares[holder] for holder in looked_at])

    def _note(self, client: int, how: str) -> None:
        self.lies.setdefault(client, f"in round {self.slot} {how}")


def _points(holders: Iterable[int]) -> list[int]:
    return [holder + 1 for holder in holders]


@dataclass
class ServerSlot:
    """Takes clients' messages, in any order, and computes the sum over the clients whose vectors arrived."""

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
        own = {
            receiver: b"".join(boxes[sender][receiver] for sender in self._neighbours(receiver))
            for receiver in self.participants
        }
        return {one: MaskedRequest(about[one], self.participants, keys, own[one]) for one in self.participants}

    def take_vector(self, sender: int, vector: RingVector, length: int) -> None:
        if sender not in self.participants or len(vector) != length:
            raise RefusalError(f"a vector of {len(vector)} elements from client {sender}, expected {length}")
        first = self.vectors.setdefault(sender, vector)
        if not np.array_equal(first, vector):
            raise RefusalError(f"client {sender} has sent another vector before")

    def survivors(self) -> Agree:
        """Fix the survivors: the clients whose vectors have arrived."""
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
        """The clients that were found to lie when the sum was computed, and how."""
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
        """The survivors' self-mask seeds and the dropped clients' keys. All of them are tried before a failure is
        reported, so that all lies are found at once."""
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
        """A client's commitments to the one of its secrets that is needed."""

        def matches(secret: bytes) -> bool:
            if client in self.vectors:
                return seed_commitment(self.run, self.slot.number, client, secret) == self.commitments[client]
            return self._private_key(client, secret).public_key().public_bytes_raw() == self._key_of(client)

        return Dealt(client, matches, lambda holder, share: holder == client or self._is_share(client, holder, share))

    def _private_key(self, client: int, secret: bytes) -> X25519PrivateKey:
        """The key that follows from a client's secret. It is kept: it is needed to check the secret, and to use it."""
        if (client, secret) not in self._private_keys:
            context = key_context(self.run, self.advertisements[client].session, client, self.slot.number)
            self._private_keys[client, secret] = mask_key(secret, context)
        return self._private_keys[client, secret]

    def _is_share(self, dealer: int, holder: int, share: bytes) -> bool:
        place = 0 if dealer in self.vectors else 1
        number = 2 * self.slot.graph.neighbours[dealer].index(holder) + place
        digest = self.digests[dealer][number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
        return share_digest(self.run, self.slot.number, dealer, holder, place, share) == digest
