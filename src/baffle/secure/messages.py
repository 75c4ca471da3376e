"""What clients and server tell each other for a secure sum, beside the round itself."""

from typing import Annotated, cast

from msgspec import Meta

from baffle.core.messages import Message, Number, RoundRequest, read

MOST_MEMBERS = 100_000
MOST_KEYS = 1024

Key = Annotated[bytes, Meta(min_length=32, max_length=32)]
Session = Annotated[bytes, Meta(min_length=16, max_length=16)]
Signature = Annotated[bytes, Meta(min_length=64, max_length=64)]
Box = Annotated[bytes, Meta(min_length=82, max_length=82)]
"""Two shares of 33 bytes and an authentication tag of 16."""
Share = Annotated[bytes, Meta(max_length=33)]
"""A share, or nothing where its box could not be opened."""
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
    graph_seed: Key
    advertisements: Annotated[tuple[bytes, ...], Meta(max_length=MOST_MEMBERS)]


class Sealed(Message, frozen=True, tag="sealed"):
    """From a client: for each of its neighbours in turn, a box that only that neighbour can open."""

    slot: Number
    boxes: Annotated[tuple[Box, ...], Meta(max_length=MOST_MEMBERS)]


class MaskedRequest(Message, frozen=True, tag="masked-request"):
    """To a client: the round, who is on its roster, a digest of the keys of all of them, and the boxes of its
    neighbours there. A client knows its neighbours' keys only; the digest goes into every mask, so that masks cancel
    only among clients who were told the same."""

    request: RoundRequest
    roster: Members
    keys: Key
    boxes: Annotated[tuple[Box, ...], Meta(max_length=MOST_MEMBERS)]


class Unmask(Message, frozen=True, tag="unmask"):
    """To a client: who of the roster has sent a vector and who has not."""

    slot: Number
    alive: Members
    dropped: Members


class Unmasked(Message, frozen=True, tag="unmasked"):
    """From a client: for each of its neighbours on the roster, one share: of its self mask, or of its mask key; and its
    own share of its own self mask."""

    slot: Number
    shares: Annotated[tuple[Share, ...], Meta(max_length=MOST_MEMBERS)]
    own: Share


class Turn(Message, frozen=True, tag="turn"):
    """To a client: end one slot and open the next, in one exchange."""

    unmask: Unmask | None
    opening: Opening | None


Request = RoundRequest | MaskedRequest | Hello | Turn


def decode_request(data: bytes) -> Request:
    """Whatever a server may ask of a client."""
    return cast(Request, read(data, Request, "Request"))


class Turned(Message, frozen=True, tag="turned"):
    """From a client: its answers to both parts of a turn, and why where it gives none."""

    unmasked: Unmasked | None
    sealed: Sealed | None
    refusal: Annotated[str, Meta(max_length=1000)]
