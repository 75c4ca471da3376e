"""The lines of a client's file of marks. Each is one thing that the client must not forget."""

from typing import Annotated

import msgspec
from msgspec import Meta

Mark = Annotated[int, Meta(ge=-1)]
Hex = Annotated[str, Meta(pattern="^([0-9a-f]{2})*$", max_length=128)]


class Marks(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How far a client has gone in one run; −1 means not at all."""

    sealed: Mark = -1  # the newest slot that it has sealed shares for
    slot: Mark = -1  # the newest slot that it has computed a vector for
    round: Mark = -1  # the newest round that it has released shares for
    agreed: Mark = -1  # the newest slot whose survivors it has signed
    signed: Mark = -1  # the newest round before which it has signed the state


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="is"):
    pass


class Marked(_Line, frozen=True, tag="marks"):
    """How far the client has gone in a run; `released`: the weights about which it releases shares now."""

    run: Hex
    marks: Marks
    released: Hex = ""


class Entered(_Line, frozen=True, tag="entered"):
    """It takes part in this run, which has so many places for clients, and in no earlier one any more."""

    run: Hex
    places: Annotated[int, Meta(ge=0)] = 0


class Left(_Line, frozen=True, tag="left"):
    """The run is over for it."""

    run: Hex


class Committed(_Line, frozen=True, tag="committed"):
    """A nonce that it is about to commit to."""

    commitment: Hex
    nonce: Hex


class Opened(_Line, frozen=True, tag="opened"):
    """The run that it opens a commitment for, and when."""

    commitment: Hex
    run: Hex
    moment: float


class Charged(_Line, frozen=True, tag="charged"):
    """It is about to send so many vectors, with noise in their sum, that tell at most this much about it."""

    delta_2: Annotated[int, Meta(ge=0, le=2**31)]
    delta_1: Annotated[int, Meta(ge=0, le=2**62)]
    mu: Annotated[float, Meta(ge=1e-30, le=2.0**60)]
    count: Annotated[int, Meta(ge=1, le=2**62)] = 1


Line = Charged | Marked | Entered | Left | Committed | Opened
