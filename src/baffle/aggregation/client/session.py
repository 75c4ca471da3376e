"""The client's half of a secure sum: messages in, messages out, without transport or clock. `ServerSlot` is the other.

A *slot* is one use of the protocol: one mask key of every client, for one attempt at one round.

    client                                       server
    advertise   keys for many slots, signed  ->
                                             <-  opening: members of the next slot, their keys
    seal        shares of two secrets        ->
                                             <-  the round, its participants, the boxes for this client
    mask        vector + masks               ->
                                             <-  which participants are alive and which dropped
    agree       signature over that          ->        (only where the server may lie)
                                             <-  the same, with the signatures
    unmask      one share per neighbour      ->  total
"""

import secrets
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import NamedTuple, TypeVar

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from baffle.aggregation.client.marks import Line, Marks, Memory
from baffle.aggregation.client.peers import FrozenPeers, Peers, ReadKeys, reader
from baffle.aggregation.client.slot import (
    FrozenSlot,
    OpenSlot,
    checked_participants,
    checked_request,
    freeze,
    require_agreement,
    require_fresh,
    require_unused,
    thaw,
)
from baffle.aggregation.client_policy import ClientPolicy, checked_slot
from baffle.aggregation.context import key_context, round_context, seed_commitment, sign, state_text, survivors_text
from baffle.aggregation.masks import agree, mask_key, pair_mask, self_mask
from baffle.aggregation.messages import (
    BOX_BYTES,
    MOST_KEYS,
    NO_SHARE,
    Advertisement,
    Agree,
    Agreed,
    MaskedRequest,
    Opening,
    Sealed,
    Secret,
    Session,
    Turn,
    Turned,
    Unmask,
    Unmasked,
    cut,
)
from baffle.aggregation.shares import SHARE_BYTES, new_secret, split
from baffle.core.messages import Message, Number, RoundRequest, decode, encode, read
from baffle.core.ring import RingVector, add
from baffle.errors import BaffleError, RefusalError
from baffle.privacy.accounting import Charge

A = TypeVar("A")
B = TypeVar("B")

KEYS_AT_ONCE = 128  # how many slots one signed list of keys serves


class MaskKey(NamedTuple):
    """A slot's key, and the secret that it is derived from. The secret is what this client shares."""

    secret: bytes
    private: X25519PrivateKey


class FrozenSession(Message, frozen=True, tag="frozen-session"):
    """A session between two messages. Keep it in memory only: a reader of it can unmask what this client sends."""

    session: Session
    peers: FrozenPeers
    keys: tuple[tuple[Number, Secret], ...]
    open: tuple[FrozenSlot, ...]
    memory: bytes


class ClientSession:
    """The client's half of one run's secure sums. It lives as long as the process; to live longer, a new session is
    made from what `frozen()` returned.

    `directory` holds every client's public identity. `memory` makes marks durable before anything that they guard is
    sent. Durable marks take precedence over frozen ones, so that an old frozen session gives nothing away. `charge` is
    what this client pays for each vector of a private run. Simulated clients share `read_keys`, so that each list of
    keys is read once.
    """

    def __init__(
        self,
        number: int,
        identity: Ed25519PrivateKey,
        directory: Mapping[int, bytes],
        run: bytes,
        policy: ClientPolicy,
        *,
        memory: Memory | None = None,
        charge: Charge | None = None,
        read_keys: ReadKeys | None = None,
        frozen: bytes | None = None,
    ) -> None:
        self._number, self._identity, self._directory = number, identity, directory
        self._run, self._policy, self._charge = run, policy, charge
        self._memory = memory or Memory()
        known = None if frozen is None else decode(frozen, FrozenSession)
        self._session = known.session if known else secrets.token_bytes(16)
        self._peers = Peers(number, run, read_keys or reader(directory, run), known.peers if known else None)
        self._keys = {slot: self._key(slot, secret) for slot, secret in known.keys} if known else {}
        self._open = {slot.opening.slot: thaw(slot, policy) for slot in known.open} if known else {}
        if known:
            self._memory.take_over(read(known.memory, list[Line], "marks"))

    def frozen(self) -> bytes:
        """Everything that another session needs to continue in place of this one."""
        return encode(
            FrozenSession(
                self._session,
                self._peers.frozen(),
                tuple((slot, key.secret) for slot, key in self._keys.items()),
                tuple(freeze(slot) for slot in self._open.values()),
                msgspec.msgpack.encode(self._memory.lines()),
            )
        )

    @property
    def marks(self) -> Marks:
        """How far this client has gone in this run."""
        return self._memory.marks(self._run)

    def advertise(self, first: int) -> Advertisement:
        """Keys for the slots from `first` on. A slot keeps its key, however often it is advertised."""
        require_unused(first, self.marks)
        slots = range(first, first + KEYS_AT_ONCE)
        own = {slot: self._keys.get(slot) or self._key(slot, new_secret()) for slot in slots}
        self._keys = dict([*self._keys.items(), *own.items()][-MOST_KEYS:])
        keys = tuple(key.private.public_key().public_bytes_raw() for key in own.values())
        unsigned = Advertisement(self._number, self._session, self._peers.channel_key, first, keys, bytes(64))
        advertisement = sign(self._identity, self._run, unsigned)
        self._peers.take_own(advertisement)
        return advertisement

    def seal(self, opening: Opening) -> Sealed:
        """Share this slot's secrets among the neighbours."""
        known = self._open.get(opening.slot)
        if known:
            if msgspec.structs.replace(opening, advertisements=()) != known.slot.opening:
                raise RefusalError(f"slot {opening.slot} was opened with other members or terms before")
            return known.sealed
        require_unused(opening.slot, self.marks)
        key = self._keys.get(opening.slot)
        if key is None:
            raise RefusalError(f"no key was advertised for slot {opening.slot}")
        slot = checked_slot(msgspec.structs.replace(opening, advertisements=()), self._policy)
        if self._number not in opening.members:
            raise RefusalError(f"slot {opening.slot} does not count this client among its members")
        neighbours = slot.graph.neighbours[self._number]
        self._peers.take(opening, neighbours, key.private.public_key().public_bytes_raw())
        seed = new_secret()
        points = [holder + 1 for holder in (*neighbours, self._number)]
        *shares, (own, _) = split(seed, key.secret, opening.threshold, points)
        texts = {receiver: of_seed + of_key for receiver, (of_seed, of_key) in zip(neighbours, shares, strict=True)}
        commitment = seed_commitment(self._run, opening.slot, self._number, seed)
        sealed = Sealed(opening.slot, self._peers.seal(opening.slot, texts), commitment)
        self._note(sealed=opening.slot)
        self._keys = {number: key for number, key in self._keys.items() if number > opening.slot}
        self._open = {number: earlier for number, earlier in self._open.items() if number >= opening.slot - 1}
        self._open[opening.slot] = OpenSlot(slot, key.private, seed, own, sealed)
        self._peers.forget_keys_before(min(self._open))
        return sealed

    def mask(self, asked: MaskedRequest, compute: Callable[[], RingVector]) -> RingVector:
        """Mask a vector. It is computed only after all checks have passed and the slot is marked as used, so no request
        is answered twice, even if the reply is lost. The same request again gets the same bytes; another request for
        the slot is refused."""
        own = self._slot(asked.request.round)
        if own.masked is not None:
            if own.request != asked:
                raise RefusalError(f"slot {own.slot.number} has been used for another request")
            return own.masked
        if own.slot.number <= self.marks.slot:
            raise RefusalError(f"slot {own.slot.number} is not after slot {self.marks.slot}")
        self._require_fresh(asked.request)
        participants = checked_participants(self._number, own.slot, asked)
        context = round_context(asked.keys, own.slot.opening, asked.request, asked.participants)
        if self._charge:
            self._memory.charge(self._charge)
        self._note(slot=own.slot.number)
        vector = compute()
        peers = [peer for peer in own.slot.graph.neighbours[self._number] if peer in participants]
        masked = add(chain([vector], self._masks(own, context, peers, len(vector))))
        own.request, own.context, own.masked = asked, context, masked
        return masked

    def _masks(self, own: OpenSlot, context: bytes, peers: list[int], length: int) -> Iterable[RingVector]:
        yield self_mask(own.seed, context, length)
        for peer in peers:
            secret = agree(own.private, self._peers.key(peer, own.slot.number))
            yield pair_mask(secret, context, length, plus=self._number < peer)

    def agree(self, asked: Agree) -> Agreed:
        """Sign one list of survivors, and the state before the round. Clients release shares only when enough of them
        have signed the same list."""
        own = self._slot(asked.slot)
        about = checked_request(self._number, own, asked, self._policy).request
        if not own.survivors:
            if asked.slot <= self.marks.agreed:
                raise RefusalError(f"survivors were signed for in slot {self.marks.agreed} before")
            if about.round <= self.marks.signed:
                raise RefusalError(f"the state before round {self.marks.signed} was signed before")
            self._note(agreed=asked.slot, signed=about.round)
        own.survivors = asked.alive
        survivors = survivors_text(self._run, own.context, asked.alive)
        state = state_text(self._run, about.round, about.chain)
        return Agreed(asked.slot, self._identity.sign(survivors), self._identity.sign(state))

    def unmask(self, asked: Unmask) -> Unmasked:
        """Release one share for every participating neighbour, of its self mask if it is alive and of its key if it
        dropped, and this client's own share of its own self mask."""
        own = self._slot(asked.slot)
        request = checked_request(self._number, own, asked, self._policy)
        if own.unmasked is not None:
            return own.unmasked
        if self._policy.agreement:
            require_agreement(own, asked, self._run, self._directory)
        self._require_fresh(request.request)
        participants, alive = set(request.participants), set(asked.alive)
        neighbours = [peer for peer in own.slot.graph.neighbours[self._number] if peer in participants]
        boxes = cut(request.boxes, BOX_BYTES, len(neighbours), "boxes")
        shares = [
            self._share(peer, own.slot.number, box, alive=peer in alive)
            for peer, box in zip(neighbours, boxes, strict=True)
        ]
        self._note(released=request.request.weights_hash, round=request.request.round)
        own.survivors = asked.alive
        own.unmasked = Unmasked(asked.slot, b"".join(shares), own.share)
        return own.unmasked

    def turn(self, asked: Turn, tell: Callable[[str], None] = lambda _words: None) -> Turned:
        """End one slot and open the next. If one part is refused, the other is still answered. `tell` hears why."""
        refusals: list[str] = []

        def tried(act: Callable[[A], B], part: A | None) -> B | None:
            try:
                return act(part) if part is not None else None
            except (BaffleError, OSError) as fault:
                refusals.append(str(fault))
                return None

        unmasked = tried(self.unmask, asked.unmask)
        sealed = tried(self.seal, asked.opening)
        if refusals:
            tell(f"abstained: {'; '.join(dict.fromkeys(refusals))}")
        return Turned(unmasked, sealed)

    def _slot(self, number: int) -> OpenSlot:
        if number not in self._open:
            raise RefusalError(f"slot {number} was not opened")
        return self._open[number]

    def _key(self, slot: int, secret: bytes) -> MaskKey:
        return MaskKey(secret, mask_key(secret, key_context(self._run, self._session, self._number, slot)))

    def _require_fresh(self, request: RoundRequest) -> None:
        released = 0 if self._charge else self._memory.released(request.weights_hash)  # a charge bounds them otherwise
        require_fresh(request, self.marks, released)

    def _note(self, released: bytes = b"", **marks: int) -> None:
        self._memory.remember(self._run, msgspec.structs.replace(self.marks, **marks), released)

    def _share(self, sender: int, slot: int, box: bytes, *, alive: bool) -> bytes:
        """A sender's share, of its self mask if it is alive and of its key if it dropped."""
        both = self._peers.open(slot, sender, box)
        return NO_SHARE if both is None else both[:SHARE_BYTES] if alive else both[SHARE_BYTES:]
