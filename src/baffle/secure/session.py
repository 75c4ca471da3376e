"""A secure sum as two state machines, client above server: message in, message out, no transport and no clock.

A *slot* is one use of the protocol: one mask key of every client, for one attempt at one round.

    client                                       server
    advertise   keys for many slots, signed  ->
                                             <-  opening: members of the next slot, their keys
    seal        shares of two secrets        ->
                                             <-  the round, its roster, the boxes for this client
    mask        vector + masks               ->
                                             <-  who is alive and who dropped
    unmask      one share per neighbour      ->  total
"""

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from baffle.core.messages import RoundRequest, decode
from baffle.core.ring import RingVector, add
from baffle.errors import AbortError, MessageError, RefusalError
from baffle.secure.context import (
    Slot,
    box_context,
    checked_slot,
    key_context,
    keys_digest,
    require_signature,
    round_context,
    sign,
)
from baffle.secure.masks import agree, derive, pair_mask, self_mask
from baffle.secure.messages import Advertisement, MaskedRequest, Opening, Sealed, Turn, Turned, Unmask, Unmasked
from baffle.secure.shares import SHARE_BYTES, combine, split, weights

A = TypeVar("A")
B = TypeVar("B")

KEYS_AT_ONCE = 64
"""Slots that one signed list of keys serves."""

MOST_QUERIES = 3
"""How often a client answers about the same weights: more often, differences of sums would single somebody out."""

NO_NONCE = bytes(12)
"""Every box has a key of its own, so its nonce is fixed."""


@dataclass(frozen=True)
class Marks:
    """What a client must remember beyond a restart, per run."""

    sealed: int = -1  # the newest slot that it shared its secrets for
    slot: int = -1  # the newest that it sent a vector in
    round: int = -1  # the newest that it released shares for
    released: Mapping[bytes, int] = field(default_factory=dict)  # how often, by the hash of the weights asked about


@dataclass
class _Secrets:
    """One slot from a client's side, until it is over."""

    slot: Slot
    private: X25519PrivateKey
    seed: bytes
    share: bytes  # its own, of its seed
    sealed: Sealed
    request: MaskedRequest | None = None
    masked: RingVector | None = None
    unmask: Unmask | None = None
    unmasked: Unmasked | None = None


class ClientSession:
    """The client's half, for one run and as long as the process lives.

    `directory` holds every client's public identity. `remember` makes marks durable before anything is sent that they
    guard. `tiers` tells how many directions each client evaluates; without it all evaluate the same.
    """

    def __init__(
        self,
        number: int,
        identity: Ed25519PrivateKey,
        directory: Mapping[int, bytes],
        run: bytes,
        *,
        least_floor: int = 2,
        tiers: Mapping[int, int] | None = None,
        marks: Marks | None = None,
        remember: Callable[[Marks], None] = lambda _: None,
    ) -> None:
        self._number, self._identity, self._directory, self._run = number, identity, directory, run
        self._least_floor, self._tiers = least_floor, tiers or {}
        self._marks, self._remember = marks or Marks(), remember
        self._session = secrets.token_bytes(16)
        self._channel = X25519PrivateKey.generate()
        self._keys: dict[int, X25519PrivateKey] = {}
        self._peers: dict[int, Advertisement] = {}
        self._channels: dict[tuple[int, bytes], bytes] = {}
        self._open: dict[int, _Secrets] = {}

    def advertise(self, first: int) -> Advertisement:
        """New keys for the slots from `first` on."""
        if first <= max(self._marks.slot, self._marks.sealed):
            raise RefusalError(f"keys for slot {first}, but slot {max(self._marks.slot, self._marks.sealed)} is over")
        fresh = {slot: X25519PrivateKey.generate() for slot in range(first, first + KEYS_AT_ONCE)}
        self._keys = fresh
        keys = tuple(key.public_key().public_bytes_raw() for key in fresh.values())
        channel = self._channel.public_key().public_bytes_raw()
        unsigned = Advertisement(self._number, self._session, channel, first, keys, bytes(64))
        advertisement = sign(self._identity, self._run, unsigned)
        self._peers[self._number] = advertisement
        return advertisement

    def seal(self, opening: Opening) -> Sealed:
        """Share this slot's secrets among the neighbours."""
        known = self._open.get(opening.slot)
        if known:
            if known.slot.opening.members != opening.members or known.slot.opening.graph_seed != opening.graph_seed:
                raise RefusalError(f"slot {opening.slot} was opened with other members before")
            return known.sealed
        if opening.slot <= max(self._marks.slot, self._marks.sealed):
            raise RefusalError(f"slot {opening.slot} is not after slot {max(self._marks.slot, self._marks.sealed)}")
        private = self._keys.get(opening.slot)
        if private is None:
            raise RefusalError(f"no key was advertised for slot {opening.slot}")
        slot = checked_slot(opening, self._least_floor)
        if self._number not in opening.members:
            raise RefusalError(f"slot {opening.slot} does not count this client among its members")
        self._take_advertisements(opening)
        neighbours = slot.graph.neighbours[self._number]
        self._require_distinct_keys(opening.slot, neighbours)
        seed = secrets.token_bytes(32)
        points = [holder + 1 for holder in (*neighbours, self._number)]
        *of_seed, own = split(seed, opening.threshold, points)
        *of_key, _ = split(private.private_bytes_raw(), opening.threshold, points)
        key = key_context(self._run, self._peers[self._number], opening.slot)
        boxes = [
            ChaCha20Poly1305(self._box_key(key, self._number, receiver, receiver)).encrypt(NO_NONCE, a + b, None)
            for receiver, a, b in zip(neighbours, of_seed, of_key, strict=True)
        ]
        sealed = Sealed(opening.slot, tuple(boxes))
        self._note(replace(self._marks, sealed=opening.slot))
        self._keys.pop(opening.slot)
        self._open = {number: one for number, one in self._open.items() if number >= opening.slot - 1}
        self._open[opening.slot] = _Secrets(slot, private, seed, own, sealed)
        return sealed

    def mask(self, asked: MaskedRequest, compute: Callable[[], RingVector]) -> RingVector:
        """Hide a vector, which is computed when nothing speaks against it. Asked again in the same words it gives the
        same bytes, and otherwise nothing."""
        own = self._slot(asked.request.key)
        if own.masked is not None:
            if own.request != asked:
                raise RefusalError(f"slot {own.slot.number} has been used for another request")
            return own.masked
        if asked.request.key <= self._marks.slot:
            raise RefusalError(f"slot {asked.request.key} is not after slot {self._marks.slot}")
        self._require_fresh(asked.request)
        roster = self._checked_roster(own.slot, asked)
        context = round_context(asked.keys, own.slot.opening, asked.request, asked.roster)
        vector = compute()
        parts = [vector, self_mask(own.seed, context, len(vector))]
        for peer in own.slot.graph.neighbours[self._number]:
            if peer in roster:
                secret = agree(own.private, self._key_of(peer, own.slot.number))
                parts.append(pair_mask(secret, context, len(vector), plus=self._number < peer))
        self._note(replace(self._marks, slot=own.slot.number))
        own.request, own.masked = asked, add(parts)
        return own.masked

    def unmask(self, asked: Unmask) -> Unmasked:
        """Release one share for every neighbour on the roster: of its self mask if it is alive, of its key if not; and
        this client's own share of its own self mask."""
        own = self._slot(asked.slot)
        if own.request is None:
            raise RefusalError(f"slot {asked.slot} has no vector of this client to unmask")
        if own.unmasked is not None:
            if own.unmask != asked:
                raise RefusalError(f"slot {asked.slot} was unmasked for other survivors before")
            return own.unmasked
        alive, request = self._checked_survivors(own, asked), own.request.request
        self._require_fresh(request)
        neighbours = [peer for peer in own.slot.graph.neighbours[self._number] if peer in own.request.roster]
        shares = tuple(
            self._opened(peer, own.slot.number, box)[0 if peer in alive else 1]
            for peer, box in zip(neighbours, own.request.boxes, strict=True)
        )
        released = {**self._marks.released, request.weights_hash: self._releases(request) + 1}
        self._note(replace(self._marks, round=request.round, released=released))
        own.unmask, own.unmasked = asked, Unmasked(asked.slot, shares, own.share)
        return own.unmasked

    def turn(self, asked: Turn) -> Turned:
        """End one slot and open the next; a refusal of one does not keep the other back."""
        refusals: list[str] = []

        def tried(act: Callable[[A], B], part: A | None) -> B | None:
            try:
                return act(part) if part is not None else None
            except MessageError as fault:
                refusals.append(str(fault))
                return None

        unmasked, sealed = tried(self.unmask, asked.unmask), tried(self.seal, asked.opening)
        return Turned(unmasked, sealed, "; ".join(refusals)[:1000])

    def _slot(self, number: int) -> _Secrets:
        if number not in self._open:
            raise RefusalError(f"slot {number} was not opened")
        return self._open[number]

    def _note(self, marks: Marks) -> None:
        self._remember(marks)
        self._marks = marks

    def _take_advertisements(self, opening: Opening) -> None:
        new: dict[int, Advertisement] = {}
        for data in opening.advertisements:
            advertisement = decode(data, Advertisement)
            sender = advertisement.sender
            if sender == self._number or sender not in opening.members or sender not in self._directory:
                raise RefusalError(f"keys of client {sender}, who is no peer of this client in slot {opening.slot}")
            require_signature(self._directory[sender], self._run, advertisement)
            new[sender] = advertisement
        self._peers |= new

    def _key_of(self, peer: int, slot: int) -> bytes:
        advertisement = self._peers.get(peer)
        if advertisement is None or not 0 <= slot - advertisement.first < len(advertisement.keys):
            raise RefusalError(f"no key of client {peer} for slot {slot}")
        return advertisement.keys[slot - advertisement.first]

    def _require_distinct_keys(self, slot: int, neighbours: list[int]) -> None:
        keys = [self._key_of(peer, slot) for peer in (self._number, *neighbours)]
        if len(set(keys)) != len(keys):
            raise RefusalError(f"two clients have the same key in slot {slot}")

    def _require_fresh(self, request: RoundRequest) -> None:
        if request.round <= self._marks.round:
            raise RefusalError(f"round {request.round} is not after round {self._marks.round}, which is over")
        if self._releases(request) >= MOST_QUERIES:
            raise RefusalError(f"these weights have been asked about {self._releases(request)} times")

    def _releases(self, request: RoundRequest) -> int:
        return self._marks.released.get(request.weights_hash, 0)

    def _checked_roster(self, slot: Slot, asked: MaskedRequest) -> set[int]:
        roster = set(asked.roster)
        if list(asked.roster) != sorted(roster) or not roster <= set(slot.opening.members):
            raise RefusalError("a roster must name members of its slot, once each and in order")
        if self._number not in roster or len(roster) < slot.opening.floor:
            raise RefusalError(
                f"a roster of {len(roster)}, expected this client and {slot.opening.floor} in all at least"
            )
        expected = sum(1 for peer in slot.graph.neighbours[self._number] if peer in roster)
        if len(asked.boxes) != expected or expected + 1 < slot.opening.threshold:
            raise RefusalError(f"{len(asked.boxes)} boxes, expected {expected}, at least {slot.opening.threshold - 1}")
        return roster

    def _checked_survivors(self, own: _Secrets, asked: Unmask) -> set[int]:
        assert own.request is not None
        alive, dropped, opening = set(asked.alive), set(asked.dropped), own.slot.opening
        if alive & dropped:
            raise RefusalError(f"client {min(alive & dropped)} is said to be alive and dropped")
        if len(asked.alive) + len(asked.dropped) != len(own.request.roster) or alive | dropped != set(
            own.request.roster
        ):
            raise RefusalError("the survivors and the dropped must make up the roster")
        if self._number not in alive or len(alive) < max(opening.floor, opening.threshold):
            raise RefusalError(f"{len(alive)} survivors, expected this client and {opening.floor} in all at least")
        for k in {self._tiers[client] for client in alive if client in self._tiers}:
            prefix = sum(1 for client in alive if self._tiers.get(client, k) >= k)
            if prefix < opening.floor:
                raise RefusalError(f"only {prefix} survivors answer {k} directions, expected {opening.floor} at least")
        return alive

    def _advertised(self, member: int) -> Advertisement:
        if member not in self._peers:
            raise RefusalError(f"no keys of client {member}")
        return self._peers[member]

    def _box_key(self, key: bytes, sender: int, receiver: int, peer: int) -> bytes:
        advertisement = self._advertised(peer)
        pair = (peer, advertisement.channel)
        if pair not in self._channels:
            self._channels[pair] = agree(self._channel, advertisement.channel)
        return derive(self._channels[pair], box_context(key, sender, receiver), "box")

    def _opened(self, sender: int, slot: int, box: bytes) -> tuple[bytes, bytes]:
        """The two shares in a box, or nothing where the sender did not seal it for this client and slot."""
        key = key_context(self._run, self._advertised(sender), slot)
        try:
            both = ChaCha20Poly1305(self._box_key(key, sender, self._number, sender)).decrypt(NO_NONCE, box, None)
        except InvalidTag:
            return b"", b""
        return both[:SHARE_BYTES], both[SHARE_BYTES:]


@dataclass
class ServerSlot:
    """The server's half of one slot."""

    run: bytes
    slot: Slot
    advertisements: Mapping[int, Advertisement]
    sealed: dict[int, Sealed] = field(default_factory=dict)
    roster: tuple[int, ...] = ()
    neighbours: dict[int, list[int]] = field(default_factory=dict)
    vectors: dict[int, RingVector] = field(default_factory=dict)
    alive: tuple[int, ...] = ()
    unmasked: dict[int, Unmasked] = field(default_factory=dict)
    released: dict[int, dict[int, bytes]] = field(default_factory=dict)
    coefficients: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    def take_sealed(self, sender: int, sealed: Sealed) -> None:
        expected = len(self.slot.graph.neighbours.get(sender, []))
        if sealed.slot != self.slot.number or sender not in self.slot.graph.neighbours or len(sealed.boxes) != expected:
            raise RefusalError(f"{len(sealed.boxes)} boxes for slot {sealed.slot}, expected {expected}")
        if self.sealed.setdefault(sender, sealed) != sealed:
            raise RefusalError(f"client {sender} has sealed other shares before")

    def requests(self, about: Mapping[int, RoundRequest]) -> dict[int, MaskedRequest]:
        """Fix the roster: those who have sealed their shares. Each gets the boxes of its neighbours there."""
        self.roster = tuple(sorted(self.sealed))
        self.neighbours = {
            client: [peer for peer in self.slot.graph.neighbours[client] if peer in self.sealed]
            for client in self.roster
        }
        boxes = {
            sender: dict(zip(self.slot.graph.neighbours[sender], self.sealed[sender].boxes, strict=True))
            for sender in self.roster
        }
        keys = self._keys()
        return {
            receiver: MaskedRequest(
                about[receiver],
                self.roster,
                keys,
                tuple(boxes[sender][receiver] for sender in self.neighbours[receiver]),
            )
            for receiver in self.roster
        }

    def take_vector(self, sender: int, vector: RingVector, length: int) -> None:
        if sender not in self.roster or len(vector) != length:
            raise RefusalError(f"a vector of {len(vector)} elements from client {sender}, expected {length}")
        first = self.vectors.setdefault(sender, vector)
        if not np.array_equal(first, vector):
            raise RefusalError(f"client {sender} has sent another vector before")

    def survivors(self) -> Unmask:
        """Fix who is in the sum: those whose vectors have come."""
        self.alive = tuple(sorted(self.vectors))
        if len(self.alive) < max(self.slot.opening.floor, self.slot.opening.threshold):
            raise AbortError(f"{len(self.alive)} of {len(self.roster)} clients sent a vector, too few for a sum")
        dropped = tuple(client for client in self.roster if client not in self.vectors)
        return Unmask(self.slot.number, self.alive, dropped)

    def take_unmasked(self, sender: int, unmasked: Unmasked) -> None:
        expected = len(self.neighbours[sender]) if sender in self.alive else 0
        if unmasked.slot != self.slot.number or sender not in self.alive or len(unmasked.shares) != expected:
            raise RefusalError(f"{len(unmasked.shares)} shares for slot {unmasked.slot}, expected {expected}")
        if self.unmasked.setdefault(sender, unmasked) != unmasked:
            raise RefusalError(f"client {sender} has released other shares before")
        self.released[sender] = dict(zip(self.neighbours[sender], unmasked.shares, strict=True))
        self.released[sender][sender] = unmasked.own

    def total(self, request: RoundRequest) -> RingVector:
        """The sum over the survivors, or an abort where some secret has too few answering neighbours."""
        context = round_context(self._keys(), self.slot.opening, request, self.roster)
        length = len(self.vectors[self.alive[0]])
        parts = [self.vectors[client] for client in self.alive]
        for client in self.roster:
            secret = self._recovered(client)
            if client in self.vectors:
                parts.append(np.negative(self_mask(secret, context, length)))
                continue
            private = X25519PrivateKey.from_private_bytes(secret)
            if private.public_key().public_bytes_raw() != self._key_of(client):
                raise AbortError(f"the shares of client {client} give another key than it advertised")
            for peer in self.neighbours[client]:
                if peer in self.vectors:  # what the peer added for the client who dropped
                    mask = pair_mask(agree(private, self._key_of(peer)), context, length, plus=client < peer)
                    parts.append(mask)
        return add(parts)

    def _keys(self) -> bytes:
        return keys_digest(self.run, (self.advertisements[client] for client in self.roster), self.slot.number)

    def _key_of(self, client: int) -> bytes:
        advertisement = self.advertisements[client]
        return advertisement.keys[self.slot.number - advertisement.first]

    def _recovered(self, client: int) -> bytes:
        """A client's self-mask seed, or its key where it dropped, from as many shares as are needed."""
        threshold = self.slot.opening.threshold
        held: dict[int, bytes] = {}
        for peer in sorted((client, *self.neighbours[client])):
            share = self.released.get(peer, {}).get(client)
            if share and len(held) < threshold:
                held[peer] = share
        if len(held) < threshold:
            raise AbortError(f"{len(held)} neighbours of client {client} answered, {threshold} are needed")
        holders = tuple(peer + 1 for peer in held)
        if holders not in self.coefficients:  # in the complete graph the same holders serve every secret
            self.coefficients[holders] = weights(holders)
        secret = combine(self.coefficients[holders], list(held.values()))
        if secret is None:
            raise AbortError(f"the shares of client {client} do not belong together")
        return secret
