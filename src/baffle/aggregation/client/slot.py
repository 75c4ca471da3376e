"""One open slot on the client's side, and its frozen form for a client whose process ends before the slot does."""

from dataclasses import dataclass

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from baffle.aggregation.client_policy import ClientPolicy, Slot, checked_slot
from baffle.aggregation.messages import Key, MaskedRequest, Members, Opening, Sealed, Secret, Share, Unmasked
from baffle.core.messages import Message
from baffle.core.ring import ELEMENT, RingVector


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


def freeze(slot: OpenSlot) -> FrozenSlot:
    return FrozenSlot(
        slot.slot.opening,
        slot.private.private_bytes_raw(),
        slot.seed,
        slot.share,
        slot.sealed,
        slot.request,
        slot.context,
        None if slot.masked is None else slot.masked.astype(ELEMENT, copy=False).tobytes(),
        slot.survivors,
        slot.unmasked,
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
