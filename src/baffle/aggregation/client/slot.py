"""One open slot on the client's side, and checks of a server's requests about it. Unsafe requests are refused."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from baffle.aggregation.client.marks import Marks
from baffle.aggregation.client_policy import ClientPolicy, Slot, checked_slot
from baffle.aggregation.context import signed, survivors_text
from baffle.aggregation.messages import (
    BOX_BYTES,
    SIGNATURE_BYTES,
    Agree,
    Key,
    MaskedRequest,
    Members,
    Opening,
    Sealed,
    Secret,
    Share,
    Unmask,
    Unmasked,
    cut,
)
from baffle.core.messages import Message, RoundRequest
from baffle.core.ring import ELEMENT, RingVector
from baffle.errors import RefusalError


@dataclass
class OpenSlot:
    slot: Slot
    private: X25519PrivateKey
    seed: bytes
    share: bytes  # this client's own share of `seed`
    sealed: Sealed
    request: MaskedRequest | None = None
    context: bytes = b""
    masked: RingVector | None = None
    survivors: tuple[int, ...] = ()  # those that it has signed for or released shares for
    unmasked: Unmasked | None = None


class FrozenSlot(Message, frozen=True, tag="frozen-slot"):
    """An open slot without its graph, which follows from the opening."""

    opening: Opening
    private: Key
    seed: Secret
    share: Share
    sealed: Sealed
    request: MaskedRequest | None
    context: bytes
    masked: bytes | None
    survivors: Members
    unmasked: Unmasked | None


ALIKE = ("seed", "share", "sealed", "request", "context", "survivors", "unmasked")
"""What a slot and its frozen form hold in the same way."""


def freeze(slot: OpenSlot) -> FrozenSlot:
    masked = None if slot.masked is None else slot.masked.astype(ELEMENT, copy=False).tobytes()
    alike = {name: getattr(slot, name) for name in ALIKE}
    return FrozenSlot(opening=slot.slot.opening, private=slot.private.private_bytes_raw(), masked=masked, **alike)


def thaw(frozen: FrozenSlot, policy: ClientPolicy) -> OpenSlot:
    slot, private = checked_slot(frozen.opening, policy), X25519PrivateKey.from_private_bytes(frozen.private)
    masked = None if frozen.masked is None else np.frombuffer(frozen.masked, dtype=ELEMENT)
    return OpenSlot(slot, private, masked=masked, **{name: getattr(frozen, name) for name in ALIKE})


MOST_QUERIES = 3
"""How often a client answers about the same weights, in all runs together, whether or not the sums succeed. With more,
differences of sums would reveal single clients. In a private run each answer has noise of its own, and is paid for."""


def require_unused(slot: int, marks: Marks) -> None:
    """Refuse a slot that is not after every slot in which this client has shared secrets or sent a vector."""
    over = max(marks.slot, marks.sealed)
    if slot <= over:
        raise RefusalError(f"slot {slot} is not after slot {over}")


def require_fresh(request: RoundRequest, marks: Marks, released: int) -> None:
    """Refuse a round that is over, and weights that sums were unmasked about too often, in this run or another."""
    if request.round <= marks.round:
        raise RefusalError(f"round {request.round} is not after round {marks.round}, which is over")
    if released >= MOST_QUERIES:
        raise RefusalError(
            f"these weights have been asked about {released} times; begin with other weights, such as another seed's"
        )


def checked_participants(client: int, slot: Slot, asked: MaskedRequest) -> set[int]:
    """The participants of a request, if they are members of the slot, this client and enough neighbours among them."""
    participants = set(asked.participants)
    whole = asked.participants == slot.opening.members
    if not whole and (
        list(asked.participants) != sorted(participants) or not participants <= set(slot.opening.members)
    ):
        raise RefusalError("the participants must be members of the slot, once each and in order")
    if client not in participants or len(participants) < slot.opening.floor:
        raise RefusalError(
            f"{len(participants)} participants, expected this client and at least {slot.opening.floor} in all"
        )
    expected = sum(1 for peer in slot.graph.neighbours[client] if peer in participants)
    cut(asked.boxes, BOX_BYTES, expected, "boxes")
    if expected + 1 < slot.opening.threshold:
        raise RefusalError(f"{expected} neighbours, expected at least {slot.opening.threshold - 1}")
    return participants


def checked_request(client: int, own: OpenSlot, asked: Agree | Unmask, policy: ClientPolicy) -> MaskedRequest:
    """The request that this client sent a vector for, if it may sign or release shares for these survivors."""
    if own.request is None:
        raise RefusalError(f"slot {asked.slot} has no vector of this client to unmask")
    _check_survivors(client, own.slot.opening, own.request.participants, asked, policy.tiers)
    if own.survivors and own.survivors != asked.alive:
        raise RefusalError(f"slot {asked.slot} was settled for other survivors before")
    return own.request


def _check_survivors(
    client: int, opening: Opening, participants: tuple[int, ...], asked: Agree | Unmask, tiers: Mapping[int, int]
) -> None:
    alive = set(asked.alive)
    dropped = set(asked.dropped)
    if alive & dropped:
        raise RefusalError(f"client {min(alive & dropped)} is said to be alive and dropped")
    if len(asked.alive) + len(asked.dropped) != len(participants) or alive | dropped != set(participants):
        raise RefusalError("the survivors and the dropped must be the participants")
    if list(asked.alive) != sorted(alive):
        raise RefusalError("the survivors must be named in order")
    if client not in alive or len(alive) < max(opening.floor, opening.threshold):
        raise RefusalError(f"{len(alive)} survivors, expected this client and at least {opening.floor} in all")
    for k in {tiers[survivor] for survivor in alive if survivor in tiers}:
        prefix = sum(1 for survivor in alive if tiers.get(survivor, k) >= k)
        if prefix < opening.floor:
            raise RefusalError(f"{prefix} survivors evaluate {k} directions, expected at least {opening.floor}")


def require_agreement(own: OpenSlot, asked: Unmask, run: bytes, directory: Mapping[int, bytes]) -> None:
    """Refuse to release shares before a threshold of the survivors have signed this list of survivors."""
    signatures = cut(asked.signatures, SIGNATURE_BYTES, len(asked.signers), "signatures")
    text = survivors_text(run, own.context, asked.alive)
    for signer, signature in zip(asked.signers, signatures, strict=True):
        if signer not in asked.alive or not signed(directory[signer], signature, text):
            raise RefusalError(f"client {signer} has not signed these survivors")
    threshold = own.slot.opening.threshold
    if len(set(asked.signers)) != len(asked.signers) or len(asked.signers) < threshold:
        raise RefusalError(f"{len(asked.signers)} clients agreed on the survivors, expected at least {threshold}")
