"""Slots driven by hand: a federation whose keys are advertised, and what passes between it and a server."""

from baffle.aggregation.messages import (
    BOX_BYTES,
    MaskedRequest,
    Unmasked,
    cut,
)
from baffle.aggregation.server.slot import ServerSlot
from baffle.aggregation.shares import SHARE_BYTES
from baffle.core.ring import RingVector
from tests.support.federation import Federation, about


def new_federation(n: int = 4, **settings: object) -> Federation:
    federation = Federation(n, **settings)  # type: ignore[arg-type]
    federation.advertise()
    return federation


def never() -> RingVector:
    raise AssertionError("a vector was computed for a request that must be refused")


def unmasked_by(federation: Federation, server: ServerSlot, answering: tuple[int, ...]) -> None:
    unmask = server.unmask()
    for client in answering:
        server.take_unmasked(client, federation.sessions[client].unmask(unmask))


def asked_of(server: ServerSlot) -> dict[int, MaskedRequest]:
    return server.requests(dict.fromkeys(server.sealed, about(server.slot.number)))


def boxes_of(asked: MaskedRequest) -> list[bytes]:
    return cut(asked.boxes, BOX_BYTES, len(asked.boxes) // BOX_BYTES, "boxes")


def shares_of(released: Unmasked) -> list[bytes]:
    return cut(released.shares, SHARE_BYTES, len(released.shares) // SHARE_BYTES, "shares")
