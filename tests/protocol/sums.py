"""The client's half of a secure sum."""

import hmac
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from math import comb
from typing import Any

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from numpy.typing import NDArray

from tests.protocol.learning import permutation
from tests.protocol.marks import Marks
from tests.protocol.wire import Message, RefusedError, counted, cut, decode, encode, is_signed, prefixed, require, u64

Vector = NDArray[np.uint32]

PRIME, BOX, NO_SHARE = 2**128 - 159, 64, b"\xff" * 16
KEYS_AT_ONCE = 32


def derive(secret: bytes, context: bytes, purpose: str) -> bytes:
    return expand(hmac.digest(context, secret, "sha256"), b"", purpose)


def expand(key: bytes, context: bytes, purpose: str) -> bytes:
    return hmac.digest(key, f"baffle/{purpose}/1".encode() + context + b"\x01", "sha256")


def agreed(private: X25519PrivateKey, public: bytes) -> bytes:
    try:
        return private.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        raise RefusedError("a public key that nobody can agree with") from None


def key_context(run: bytes, session: bytes, owner: int, slot: int) -> bytes:
    return sha256(b"baffle/key-context/1" + run + session + u64(slot, owner)).digest()


def mask_key(secret: bytes, context: bytes) -> X25519PrivateKey:
    return X25519PrivateKey.from_private_bytes(derive(secret, context, "mask-key"))


def round_context(keys: bytes, opening: Any, request: Any, participants: Sequence[int]) -> bytes:
    fixed = keys + request.trajectory + request.chain + request.weights_hash
    about = (request.round, opening.slot, opening.threshold, opening.floor)
    lists = counted(about) + counted(participants) + counted(opening.members)
    return sha256(b"baffle/round-context/2" + fixed + lists).digest()


def mask(secret: bytes, context: bytes, purpose: str, length: int) -> Vector:
    encryptor = Cipher(ChaCha20(derive(secret, context, purpose), bytes(16)), mode=None).encryptor()
    return np.frombuffer(encryptor.update(bytes(4 * length)), "<u4")


def new_secret() -> bytes:
    return secrets.randbelow(PRIME).to_bytes(16, "big")


def share_at(point: int, coefficients: Sequence[int]) -> bytes:
    """The value of a polynomial, whose constant comes first."""
    return (sum(c * pow(point, i, PRIME) for i, c in enumerate(coefficients)) % PRIME).to_bytes(16, "big")


def shares_of(secret: bytes, t: int, holders: Sequence[int]) -> list[bytes]:
    coefficients = [int.from_bytes(secret, "big"), *(secrets.randbelow(PRIME) for _ in range(t - 1))]
    return [share_at(holder + 1, coefficients) for holder in holders]


def seed_commitment(run: bytes, slot: int, sender: int, seed: bytes) -> bytes:
    return sha256(b"baffle/seed/2" + prefixed(run, u64(slot), u64(sender), seed)).digest()


def digests(run: bytes, slot: int, dealer: int, holder: int, text: bytes) -> bytes:
    """What stands behind a box: a digest of each of its two shares."""
    both = ((0, text[:16]), (1, text[16:]))
    texts = (prefixed(run, u64(slot, dealer, holder, place), share) for place, share in both)
    return b"".join(sha256(b"baffle/share/2" + one).digest()[:8] for one in texts)


def box_key(channel: bytes, context: bytes, sender: int, receiver: int) -> ChaCha20Poly1305:
    return ChaCha20Poly1305(expand(channel, context + u64(sender, receiver), "box"))


def degree(n: int) -> int:
    """How many neighbours a client has among more than 200 members."""
    stay = n - round(0.3 * n)

    def risk(k: int) -> float:
        few = sum(comb(stay, a) * comb(n - 1 - stay, k - a) for a in range(k // 2 + 1))
        return n * (few / comb(n - 1, k))

    return next((k for k in range(2, n - 1, 2) if risk(k) <= 2.0**-20), (n - 1) // 2 * 2)


def neighbours(members: Sequence[int], client: int, salt: bytes, slot: int, *, complete: bool) -> list[int]:
    n = len(members)
    if complete or n <= 200:
        return [member for member in members if member != client]
    k = degree(n)
    circle = [members[i] for i in permutation(sha256(b"baffle/graph/2" + salt + u64(slot)).digest(), n)]
    here = circle.index(client)
    return sorted({circle[(here + step) % n] for step in range(-(k // 2), k // 2 + 1)} - {client})


def quorum(clients: int, liars: int) -> int:
    return (clients + min(liars, -(-clients // 3) - 1)) // 2 + 1 if liars else 2 * clients // 3 + 1


def least_threshold(company: int, k: int, liars: int, *, may_lie: bool) -> int:
    return quorum(company, liars) if may_lie else (k + 1) // 2 + 1


def advertisement_text(run: bytes, unsigned: Sequence[Any]) -> bytes:
    return b"baffle/advertisement/1" + run + encode(Message("advertisement", *unsigned, bytes(64)))


def survivors_text(run: bytes, context: bytes, alive: Sequence[int]) -> bytes:
    return b"baffle/survivors/1" + run + context + counted(alive)


def state_text(run: bytes, number: int, chain: bytes) -> bytes:
    return b"baffle/state/2" + prefixed(run, u64(number), chain)


@dataclass
class Slot:
    """A slot that is open: what this client has said in it."""

    opening: Any
    near: list[int]
    private: X25519PrivateKey
    seed: bytes
    own: bytes
    sealed: Message
    request: Any = None
    context: bytes = b""
    masked: Vector | None = None
    alive: list[int] = field(default_factory=list)
    unmasked: Message | None = None


@dataclass
class Terms:
    """What the plan and the statement fix about sums. `groups`: round → who is summed together."""

    floor: int
    threshold: int
    may_lie: bool
    liars: int
    salt: bytes
    tiers: Sequence[int]
    groups: Callable[[int], list[list[int]]]


@dataclass
class Session:
    number: int
    identity: Ed25519PrivateKey
    directory: Mapping[int, bytes]
    run: bytes
    terms: Terms
    marks: Marks

    def __post_init__(self) -> None:
        self.session, self.channel = secrets.token_bytes(16), X25519PrivateKey.generate()
        self._secrets: dict[int, bytes] = {}
        self._peers: dict[int, Any] = {}
        self._open: dict[int, Slot] = {}

    @property
    def done(self) -> dict[str, int]:
        return self.marks.of(self.run)

    def advertise(self, first: int) -> Message:
        require(first > max(self.done["slot"], self.done["sealed"]), "a slot that was used before")
        slots = range(first, first + KEYS_AT_ONCE)
        for slot in slots:
            self._secrets.setdefault(slot, new_secret())
        public = [self._mask_key(slot).public_key().public_bytes_raw() for slot in slots]
        unsigned = (self.number, self.session, self.channel.public_key().public_bytes_raw(), first, public)
        own = Message("advertisement", *unsigned, self.identity.sign(advertisement_text(self.run, unsigned)))
        self._peers[self.number] = own
        return own

    def seal(self, opening: Any) -> Message:
        number, terms = opening.slot, self.terms
        if number in self._open:
            known = self._open[number]
            require(_terms_of(opening) == _terms_of(known.opening), "a slot that was opened otherwise")
            return known.sealed
        require(number > max(self.done["slot"], self.done["sealed"]), "a slot that was used before")
        require(number in self._secrets, "a slot without a key")
        company = next((group for group in terms.groups(number) if self.number in group), [])
        members = opening.members
        require(self.number in members and members == sorted(set(members)) and set(members) <= set(company), "members")
        near = neighbours(members, self.number, terms.salt, number, complete=terms.may_lie)
        least = least_threshold(len(company), len(near), terms.liars, may_lie=terms.may_lie)
        require(max(least, terms.threshold) <= opening.threshold <= len(near) + 1, "a threshold that is not safe")
        require(terms.floor <= opening.floor <= len(members), "a floor that is not safe")
        self._take_keys(opening, near)
        seed = new_secret()
        both = (seed, self._secrets[number])
        of_seed, of_key = (shares_of(secret, opening.threshold, [*near, self.number]) for secret in both)
        own_context = key_context(self.run, self.session, self.number, number)
        boxes = b""
        for peer, first, second in zip(near, of_seed[:-1], of_key[:-1], strict=True):
            key, text = box_key(self._channel(peer), own_context, self.number, peer), first + second
            boxes += key.encrypt(bytes(12), text, None) + digests(self.run, number, self.number, peer, text)
        answer = Message("sealed", number, boxes, seed_commitment(self.run, number, self.number, seed))
        self.marks.note(self.run, sealed=number)
        slot = Slot(opening, near, self._mask_key(number), seed, of_seed[-1], answer)
        self._secrets = {later: secret for later, secret in self._secrets.items() if later > number}
        self._open = {known: slot for known, slot in self._open.items() if known >= number - 1} | {number: slot}
        return answer

    def mask(self, asked: Any, compute: Callable[[], Vector]) -> Vector:
        slot, about, members = self._slot(asked.request.round), asked.request, asked.participants
        if slot.masked is not None:
            require(slot.request == asked, "a second question in one slot")
            return slot.masked
        require(about.round > self.done["slot"], "a slot that was used before")
        self.marks.require_fresh(self.run, about)
        require(members == sorted(set(members)) and set(members) <= set(slot.opening.members), "participants")
        require(self.number in members and len(members) >= slot.opening.floor, "too few participants")
        near = self._near(slot, members)
        cut(asked.boxes, BOX, len(near))
        require(len(near) + 1 >= slot.opening.threshold, "too few neighbours")
        context = round_context(asked.keys, slot.opening, about, members)
        self.marks.note(self.run, slot=about.round)
        vector = compute()
        total = vector + mask(slot.seed, context, "self-mask", len(vector))
        for peer in near:
            secret = agreed(slot.private, self._peer_key(peer, about.round))
            pair = mask(secret, context, "pair-mask", len(vector))
            total = total + pair if self.number < peer else total - pair
        slot.request, slot.context, slot.masked = asked, context, total
        return total

    def agree(self, asked: Any) -> Message:
        slot = self._slot(asked.slot)
        about = self._survivors_checked(slot, asked)
        if not slot.alive:
            require(asked.slot > self.done["agreed"] and about.round > self.done["signed"], "signed before")
            self.marks.note(self.run, agreed=asked.slot, signed=about.round)
        slot.alive = asked.alive
        texts = survivors_text(self.run, slot.context, asked.alive), state_text(self.run, about.round, about.chain)
        return Message("agreed", asked.slot, *map(self.identity.sign, texts))

    def unmask(self, asked: Any) -> Message:
        slot = self._slot(asked.slot)
        about = self._survivors_checked(slot, asked)
        if slot.unmasked:
            return slot.unmasked
        if self.terms.may_lie:
            self._require_agreement(slot, asked)
        self.marks.require_fresh(self.run, about)
        near = self._near(slot, slot.request.participants)
        shares = b""
        for peer, box in zip(near, cut(slot.request.boxes, BOX, len(near)), strict=True):
            both = self._opened(asked.slot, peer, box)
            shares += NO_SHARE if both is None else both[:16] if peer in asked.alive else both[16:]
        self.marks.note(self.run, about.weights_hash, round=about.round)
        slot.alive, slot.unmasked = asked.alive, Message("unmasked", asked.slot, shares, slot.own)
        return slot.unmasked

    def _survivors_checked(self, slot: Slot, asked: Any) -> Any:
        """The request that this client has sent a vector for, if it may settle it for these survivors."""
        require(slot.request is not None, "a slot without a vector")
        alive, dropped, floor = set(asked.alive), set(asked.dropped), slot.opening.floor
        require(asked.alive == sorted(alive) and not alive & dropped, "survivors out of order, or dropped, too")
        require(sorted([*asked.alive, *asked.dropped]) == slot.request.participants, "not the participants")
        require(self.number in alive and len(alive) >= max(floor, slot.opening.threshold), "too few survivors")
        ks = [self.terms.tiers[client] for client in alive]
        require(all(sum(other >= k for other in ks) >= floor for k in ks), "a tier that would be exposed")
        require(slot.alive in ([], asked.alive), "a slot that was settled for others")
        return slot.request.request

    def _require_agreement(self, slot: Slot, asked: Any) -> None:
        text = survivors_text(self.run, slot.context, asked.alive)
        require(len(set(asked.signers)) == len(asked.signers) >= slot.opening.threshold, "too few signatures")
        for signer, signature in zip(asked.signers, cut(asked.signatures, 64, len(asked.signers)), strict=True):
            require(signer in asked.alive and is_signed(self.directory[signer], signature, text), "not signed")

    def _take_keys(self, opening: Any, near: list[int]) -> None:
        known = dict(self._peers)
        for data in opening.advertisements:
            keys = decode(data, "advertisement")
            sender, unsigned = keys.sender, list(keys.values.values())[:-1]
            require(sender in opening.members and sender in self.directory and sender != self.number, "no peer's keys")
            text = advertisement_text(self.run, unsigned)
            require(is_signed(self.directory[sender], keys.signature, text), "keys that are not signed")
            require(sender not in known or keys.first >= known[sender].first, "keys that are older")
            known[sender] = keys
        self._peers = known
        keys_of_slot = [self._peer_key(peer, opening.slot) for peer in (self.number, *near)]
        require(len(set(keys_of_slot)) == len(keys_of_slot), "two clients with one key")

    def _peer_key(self, peer: int, slot: int) -> bytes:
        keys = self._peers.get(peer)
        if keys is None or not 0 <= slot - keys.first < len(keys.keys):
            raise RefusedError(f"no key of client {peer}")
        return bytes(keys.keys[slot - keys.first])

    def _channel(self, peer: int) -> bytes:
        return derive(agreed(self.channel, self._peers[peer].channel), b"", "channel")

    def _opened(self, slot: int, sender: int, box: bytes) -> bytes | None:
        context = key_context(self.run, self._peers[sender].session, sender, slot)
        try:
            text = box_key(self._channel(sender), context, sender, self.number).decrypt(bytes(12), box[:48], None)
        except InvalidTag:
            return None
        return text if digests(self.run, slot, sender, self.number, text) == box[48:] else None

    def _mask_key(self, slot: int) -> X25519PrivateKey:
        return mask_key(self._secrets[slot], key_context(self.run, self.session, self.number, slot))

    def _slot(self, number: int) -> Slot:
        if number not in self._open:
            raise RefusedError(f"slot {number} is not open")
        return self._open[number]

    @staticmethod
    def _near(slot: Slot, participants: Sequence[int]) -> list[int]:
        return [peer for peer in slot.near if peer in set(participants)]


def _terms_of(opening: Any) -> tuple[Any, ...]:
    return opening.slot, opening.members, opening.threshold, opening.floor
