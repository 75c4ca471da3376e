"""The messages of a secure sum between clients and server, beyond those of the round itself."""

from typing import Annotated, cast

from msgspec import Meta

from baffle.aggregation.shares import SHARE_BYTES
from baffle.core.messages import Message, Number, RoundRequest, read
from baffle.errors import RefusalError

MOST_MEMBERS = 100_000
MOST_KEYS = 1024

Key = Annotated[bytes, Meta(min_length=32, max_length=32)]
Session = Annotated[bytes, Meta(min_length=16, max_length=16)]
Signature = Annotated[bytes, Meta(min_length=64, max_length=64)]
Packed = bytes  # items of one size, concatenated, so that none costs more than its own bytes
Share = Annotated[bytes, Meta(min_length=SHARE_BYTES, max_length=SHARE_BYTES)]
Secret = Annotated[bytes, Meta(min_length=SHARE_BYTES, max_length=SHARE_BYTES)]

DIGEST_BYTES = 8  # long enough that no other share with the same digest can be found within a round
BOX_BYTES = 2 * SHARE_BYTES + 16 + 2 * DIGEST_BYTES
"""Two shares and an authentication tag, followed by an unencrypted digest of each share."""
SIGNATURE_BYTES = 64
NO_SHARE = b"\xff" * SHARE_BYTES
"""Sent in place of a share whose box could not be opened. It is above the prime, so no real share has this value."""
Members = Annotated[tuple[Number, ...], Meta(max_length=MOST_MEMBERS)]


class Hello(Message, frozen=True, tag="hello"):
    """To a client: advertise keys from this slot on."""

    slot: Number


class Advertisement(Message, frozen=True, tag="advertisement"):
    """From a client: a key for its channels in this session, and a mask key for each of the next slots, signed."""

    sender: Number
    session: Session
    channel: Key
    first: Number
    keys: Annotated[tuple[Key, ...], Meta(min_length=1, max_length=MOST_KEYS)]
    signature: Signature


class Opening(Message, frozen=True, tag="opening"):
    """To a client: share your secrets for a slot among these members."""

    slot: Number
    members: Members
    threshold: Number
    floor: Number
    advertisements: Annotated[tuple[bytes, ...], Meta(max_length=MOST_MEMBERS)]


class Sealed(Message, frozen=True, tag="sealed"):
    """From a client: for each of its neighbours, in order, a box that only that neighbour can open, and a commitment to
    the seed whose shares are in the boxes."""

    slot: Number
    boxes: Packed
    commitment: Key


class MaskedRequest(Message, frozen=True, tag="masked-request"):
    """To a client: the round, its participants, a digest of the keys of all participants, and the boxes from the
    client's neighbours among them. A client knows only its neighbours' keys. The digest goes into every mask, so that
    masks cancel only among clients that were sent the same."""

    request: RoundRequest
    participants: Members
    keys: Key
    boxes: Packed


class Agree(Message, frozen=True, tag="agree"):
    """To a client, where the server may lie: sign which participants have sent a vector and which have not."""

    slot: Number
    alive: Members
    dropped: Members


class Agreed(Message, frozen=True, tag="agreed"):
    """From a client: its signatures over the survivors and the round's context, and over the state before the round."""

    slot: Number
    signature: Signature
    state: Signature


class Unmask(Message, frozen=True, tag="unmask"):
    """To a client: which participants have sent a vector and which have not, with signatures where clients agree."""

    slot: Number
    alive: Members
    dropped: Members
    signers: Members = ()
    signatures: Packed = b""


class Unmasked(Message, frozen=True, tag="unmasked"):
    """From a client: one share for each of its participating neighbours, of that neighbour's self mask or mask key, and
    the client's own share of its own self mask."""

    slot: Number
    shares: Packed
    own: Share


class Turn(Message, frozen=True, tag="turn"):
    """To a client: end one slot and open the next, in one exchange."""

    unmask: Unmask | None
    opening: Opening | None


PHASES = ("keys", "share", "vector", "agree", "unmask")

Request = RoundRequest | MaskedRequest | Hello | Agree | Turn


def cut(packed: Packed, size: int, count: int, what: str) -> list[bytes]:
    """Cut packed bytes into `count` items of `size` bytes."""
    if len(packed) != size * count:
        raise RefusalError(f"{len(packed)} bytes of {what}, expected {count} of {size} bytes")
    return [packed[i : i + size] for i in range(0, len(packed), size)]


def decode_request(data: bytes) -> Request:
    """Any request that a server may send to a client."""
    return cast(Request, read(data, Request, "Request"))


class Turned(Message, frozen=True, tag="turned"):
    """From a client: its replies to both parts of a turn; None for a part that was not asked or is refused."""

    unmasked: Unmasked | None
    sealed: Sealed | None


def phase_of(message: Message) -> str:
    """The phase of a round that a message to a client belongs to."""
    if isinstance(message, Turn):
        return "unmask" if message.unmask else "share"
    return "keys" if isinstance(message, Hello) else "agree" if isinstance(message, Agree) else "vector"
