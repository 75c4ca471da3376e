"""Clients that lie: what a session would have sent, with other shares, other secrets or other keys."""

import secrets
from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import replace

from baffle.aggregation.client.session import ClientSession
from baffle.aggregation.messages import BOX_BYTES, Sealed, Turned, cut
from baffle.aggregation.shares import PRIME, SHARE_BYTES, new_secret, split
from baffle.core.messages import decode, encode

Change = Callable[[bytes], bytes]


def flipped(bit: int) -> Change:
    """A share with one wrong bit."""
    return lambda share: (int.from_bytes(share, "big") ^ 1 << bit).to_bytes(len(share), "big")


def made_up(_: bytes) -> bytes:
    return new_secret()


def beyond_the_prime(excess: int) -> Change:
    """A number that is no share, but fits into as many bytes."""
    return lambda _: (PRIME + excess).to_bytes(SHARE_BYTES, "big")


def with_other_shares(session: ClientSession, reply: bytes, changes: Mapping[int, Change]) -> bytes:
    """The reply to a turn, with other shares of the secrets of some dealers (also of the client's own)."""
    turned = decode(reply, Turned)
    if turned.unmasked is None:
        return reply
    own = session._open[turned.unmasked.slot]
    assert own.request is not None
    neighbours = [p for p in own.slot.graph.neighbours[session._number] if p in own.request.participants]
    released = cut(turned.unmasked.shares, SHARE_BYTES, len(neighbours), "shares")
    shares = dict(zip((*neighbours, session._number), (*released, turned.unmasked.own), strict=True))
    for dealer, change in changes.items():
        shares[dealer] = change(shares[dealer])
    *others, last = shares.values()
    return encode(replace(turned, unmasked=replace(turned.unmasked, shares=b"".join(others), own=last)))


def _resealed(reply: bytes, change: Callable[[int, Sealed], Sealed]) -> bytes:
    """The reply to a turn, if it opens the first slot, with something else sealed."""
    turned = decode(reply, Turned)
    if turned.sealed is None or turned.sealed.slot != 0:
        return reply
    return encode(replace(turned, sealed=change(turned.sealed.slot, turned.sealed)))


def dealing_other_secrets(session: ClientSession, reply: bytes) -> bytes:
    """The reply to a turn, in which the shares are of a seed and a key that the client does not use."""

    def change(slot: int, sealed: Sealed) -> Sealed:
        own = session._open[slot]
        neighbours = own.slot.graph.neighbours[session._number]
        points = [holder + 1 for holder in (*neighbours, session._number)]
        *shares, (own.share, _) = split(new_secret(), new_secret(), own.slot.opening.threshold, points)
        texts = {holder: b"".join(pair) for holder, pair in zip(neighbours, shares, strict=True)}
        return replace(sealed, boxes=session._peers.seal(slot, texts))

    return _resealed(reply, change)


def dealing_wrong_shares(session: ClientSession, reply: bytes, holders: Sequence[int]) -> bytes:
    """The reply to a turn, in which some holders are dealt shares that do not belong to the others, under true
    digests."""

    def change(slot: int, sealed: Sealed) -> Sealed:
        neighbours = session._open[slot].slot.graph.neighbours[session._number]
        boxes = dict(zip(neighbours, cut(sealed.boxes, BOX_BYTES, len(neighbours), "boxes"), strict=True))
        for holder in holders:
            boxes[holder] = session._peers.seal(slot, {holder: made_up(b"") + made_up(b"")})
        return replace(sealed, boxes=b"".join(boxes.values()))

    return _resealed(reply, change)


def dealing_bad_boxes(session: ClientSession, reply: bytes, holders: Sequence[int], byte: int) -> bytes:
    """The reply to a turn, with a wrong bit in one byte of the boxes of some holders: in the sealed shares, or in the
    digests."""

    def change(slot: int, sealed: Sealed) -> Sealed:
        neighbours = session._open[slot].slot.graph.neighbours[session._number]
        boxes = bytearray(sealed.boxes)
        for holder in holders:
            boxes[neighbours.index(holder) * BOX_BYTES + byte % BOX_BYTES] ^= 1
        return replace(sealed, boxes=bytes(boxes))

    return _resealed(reply, change)


def committing_otherwise(reply: bytes) -> bytes:
    """The reply to a turn, with a commitment to another seed."""
    return _resealed(reply, lambda _, sealed: replace(sealed, commitment=secrets.token_bytes(32)))
