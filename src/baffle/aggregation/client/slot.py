"""One slot from a client's side, until it is over; and the same as bytes, for a client whose process ends before."""

from dataclasses import dataclass

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from baffle.aggregation.client_policy import ClientPolicy, Slot, checked_slot
from baffle.aggregation.messages import Key, MaskedRequest, Members, Opening, Sealed, Share, Unmasked
from baffle.core.messages import Message
from baffle.core.ring import ELEMENT, RingVector


@dataclass
class OpenSlot:
    slot: Slot
    private: X25519PrivateKey
    seed: bytes
    share: bytes  # its own, of its seed
    sealed: Sealed
    request: MaskedRequest | None = None
    context: bytes = b""
    masked: RingVector | None = None
    survivors: tuple[int, ...] = ()  # whom it has signed for, or released shares for
    unmasked: Unmasked | None = None


class FrozenSlot(Message, frozen=True, tag="frozen-slot"):
    """An open slot. Its graph follows from the opening."""

    opening: Opening
    private: Key
    seed: Key
    share: Share
    sealed: Sealed
    request: MaskedRequest | None
    context: bytes
    masked: bytes | None
    survivors: Members
    unmasked: Unmasked | None


def freeze(one: OpenSlot) -> FrozenSlot:
    return FrozenSlot(
        one.slot.opening,
        one.private.private_bytes_raw(),
        one.seed,
        one.share,
        one.sealed,
        one.request,
        one.context,
        None if one.masked is None else one.masked.astype(ELEMENT, copy=False).tobytes(),
        one.survivors,
        one.unmasked,
    )


def thaw(frozen: FrozenSlot, policy: ClientPolicy) -> OpenSlot:
    return OpenSlot(
        checked_slot(frozen.opening, policy),
        X25519PrivateKey.from_private_bytes(frozen.private),
        frozen.seed,
        frozen.share,
        frozen.sealed,
        frozen.request,
        frozen.context,
        None if frozen.masked is None else np.frombuffer(frozen.masked, dtype=ELEMENT),
        frozen.survivors,
        frozen.unmasked,
    )
