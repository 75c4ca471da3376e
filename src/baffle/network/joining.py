"""How a connected client becomes a client of a run.

    server                            client
    Introduce(plan, epoch)    →
                              ←       Behind (only if the client does not know the server's roster yet)
    NewRoster(the roster)     →
                              ←       RosterTaken, and the question is asked again
                              ←       Introduction(a commitment to a nonce)
    Begin(the statement)      →
                              ←       Ready(the nonce)
    Openings(all nonces)      →
                              ←       Salted(the salt that follows)
    … rounds …
    Over(the last weights)    →
                              ←       Done(their hash)

The line has proved before who the client is. The statement names the clients that have committed to a nonce: they are
the clients of its epoch. Others introduce themselves, and wait for the next epoch. A client that was restarted answers
`Unready`, and begins again. A client that does not agree answers with an Abstention.
"""

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Annotated, Protocol, TypeVar, get_args

from msgspec import Meta

from baffle.aggregation.messages import Key, Signature
from baffle.core.messages import Abstention, Hash, Message, Number, RoundRequest, encode, read, tag_of
from baffle.errors import MessageError
from baffle.network.keys.rosters import Roster
from baffle.statement import Certificate, EpochRecord, PastEpoch, PlanText, Statement

MOST_EPOCHS = 10_000  # the most epochs that a run may have
NO_RUN = bytes(32)  # the run of messages to a client that has not been told about one


class Introduce(Message, frozen=True, tag="introduce"):
    """To a client: asks for a commitment to a nonce, for an epoch of this plan under the roster of this number and
    hash, and for the number of directions that the client affords."""

    plan: PlanText
    roster: Number
    roster_hash: Hash
    epoch: Number


class NewRoster(Message, frozen=True, tag="new-roster"):
    """To a client: the server's roster, as its file holds it. The authority must have signed it."""

    roster: bytes


class RosterTaken(Message, frozen=True, tag="roster-taken"):
    """From a client: it has that roster on its disk, and belongs to it."""


class Behind(Message, frozen=True, tag="behind"):
    """From a client: the question names a later roster than the client's."""


class Introduction(Message, frozen=True, tag="introduction"):
    """From a client: how many directions a round it affords (0: all), and a signed commitment to a nonce."""

    affords: Number
    commitment: Hash
    signature: Signature


class Begin(Message, frozen=True, tag="begin"):
    """To a client: the statement of an epoch, what it must know of the epochs before, the certificate of the state that
    it begins with, if there is one, and one more than the last round that this client contributed to (0: none)."""

    statement: bytes
    past: Annotated[tuple[PastEpoch, ...], Meta(max_length=MOST_EPOCHS)]
    certificate: Certificate | None = None
    answered: Number = 0


class Halt(Message, frozen=True, tag="halt"):
    """To a client: an epoch ends with the weights that this request names. Sign the state that they belong to."""

    request: RoundRequest


class Ready(Message, frozen=True, tag="ready"):
    """From a client: its nonce, its signature under the statement, the round whose weights it holds, and one more than
    the last round that it has answered by its marks (0: it has answered none)."""

    nonce: Hash
    signature: Signature
    held: Number
    answered: Number


class Openings(Message, frozen=True, tag="openings"):
    """To a client: the nonces that the statement has commitments to, in their order."""

    run: Key
    nonces: bytes


class Salted(Message, frozen=True, tag="salted"):
    """From a client: it takes part in the run, with this salt."""

    salt: Hash


class Over(Message, frozen=True, tag="over"):
    """To a client: the run has ended with the weights that this request names."""

    request: RoundRequest


class Done(Message, frozen=True, tag="done"):
    """From a client, at the end of an epoch or of the run: it holds these weights, and signs their state."""

    weights_hash: Hash
    signature: Signature


class Unready(Message, frozen=True, tag="unready"):
    """From a client that has not been told about the run, or has forgotten it."""


M = TypeVar("M", RosterTaken, Introduction, Ready, Salted, Done)

Asked = Introduce | NewRoster | Begin | Openings | Halt | Over
Answered = Behind | RosterTaken | Introduction | Ready | Salted | Done | Unready | Abstention
Reply = Future[bytes | None]  # what a client answers, or None if it does not answer in time


class Lines(Protocol):
    """Lines to clients, by their numbers. The client at the other end of a line has proved its identity."""

    def present(self) -> Mapping[int, object]:
        """The clients that are connected, each with a name for its process: a client that was restarted has another."""

    def carry(self, requests: Mapping[int, bytes], run: bytes, *, patient: bool = False) -> Mapping[int, bytes]:
        """Send each client its request and return the replies. A client that does not answer in time is missing. With
        `patient`, one that is away is asked when it comes back, also as another process, until the time is over."""

    def post(self, requests: Mapping[int, bytes], run: bytes) -> Mapping[int, Reply]:
        """Send each client its request without waiting for it: each reply, or None, comes in a future of its own."""

    def admit(self, roster: Roster) -> None:
        """Serve the clients of this roster from now on. Clients that are no longer on it are disconnected."""

    def expect(self, contribution: int) -> None:
        """Contributions to the run have at most this many bytes."""


@dataclass(frozen=True)
class EpochTerms:
    """What the clients of an epoch are told."""

    record: EpochRecord
    statement: Statement
    salt: bytes
    past: tuple[PastEpoch, ...]
    certificate: Certificate | None = None

    @property
    def run(self) -> bytes:
        return self.record.run

    @property
    def salters(self) -> frozenset[int]:
        return frozenset(self.statement.salters)

    def begin(self, answered: int) -> Begin:
        return Begin(self.record.statement, self.past, self.certificate, answered)

    def openings(self) -> Openings:
        return Openings(self.run, self.record.nonces)


UNREADY, BEHIND = encode(Unready()), encode(Behind())

ABSTAINED = "it abstained; its own log says why"

JOINING = {kind.__struct_config__.tag for kind in get_args(Asked)}  # how messages about joining begin


def decode_asked(data: bytes) -> Asked | None:
    """A message about joining; None if it is about anything else."""
    if tag_of(data) not in JOINING:
        return None
    asked: Asked = read(data, Asked, "Introduce, NewRoster, Begin, Openings, Halt or Over")
    return asked


def expect(kind: type[M], data: bytes | None) -> M:
    """The answer if it is of this kind; a MessageError if there is none, or if it is an abstention or anything else."""
    if data is None:
        raise MessageError("it did not answer")
    answer: Answered = read(data, Answered, "RosterTaken, Introduction, Ready, Salted or Done")
    if isinstance(answer, Abstention):
        raise MessageError(ABSTAINED)
    if not isinstance(answer, kind):
        raise MessageError(f"expected {kind.__name__}, got {type(answer).__name__}")
    return answer
