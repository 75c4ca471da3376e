"""How a node of a network becomes a client of a run: it says who it is, and is told what the run is about.

    server                                      client
    Introduce(run, challenge, plan)   →
                                      ←         Introduction(number, samples, …, signed)
    Begin(run, plan, tiers)           →
                                      ←         Ready(trajectory)
    … rounds …
    Over(the last weights)            →
                                      ←         Done(their hash)

Who it is follows from a key that everybody has seen before the run, in the roster; which computer speaks for it does
not matter. A client that will not take part answers with an Abstention that says why; one that was started anew, or
has lost its way, answers `Unready`, and is met again.
"""

import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Protocol, TypeVar

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec import Meta

from baffle.aggregation.context import signed
from baffle.aggregation.messages import Key, Signature
from baffle.core.messages import Abstention, Hash, Message, Number, RoundRequest, encode, read
from baffle.errors import MessageError, RefusalError

AGAIN = 5.0
"""Seconds after which a node is asked again that was silent or was turned away: asking costs the others' time."""

MOST_PLAN = 1 << 20
"""A plan is no longer than so many characters."""


PlanText = Annotated[str, Meta(max_length=MOST_PLAN)]


class Introduce(Message, frozen=True, tag="introduce"):
    """To a node: who are you in a run of this plan? The challenge makes an old answer worthless."""

    run: Key
    challenge: Key
    plan: PlanText


class Introduction(Message, frozen=True, tag="introduction"):
    """From a node: this client, so many samples, so many directions a round at most (0: all), and the weights of how
    many rounds it holds (0: none)."""

    client: Number
    samples: Number
    affords: Number
    held: Number
    signature: Signature


class Begin(Message, frozen=True, tag="begin"):
    """To a node: the run's plan with nothing left open, and how many directions each client evaluates."""

    run: Key
    plan: PlanText
    tiers: tuple[Number, ...]


class Ready(Message, frozen=True, tag="ready"):
    """From a client: it takes part in this trajectory."""

    trajectory: Hash


class Over(Message, frozen=True, tag="over"):
    """To a client: the run has ended with the weights that this request is about."""

    request: RoundRequest


class Done(Message, frozen=True, tag="done"):
    """From a client: it holds these weights."""

    weights_hash: Hash


class Unready(Message, frozen=True, tag="unready"):
    """From a node that has not been told about the run yet, or no longer knows."""


M = TypeVar("M", Introduction, Ready, Done)

Asked = Introduce | Begin | Over
Answered = Introduction | Ready | Done | Unready | Abstention


def introduce_oneself(
    identity: Ed25519PrivateKey, asked: Introduce, client: int, samples: int, affords: int, held: int
) -> Introduction:
    unsigned = Introduction(client, samples, affords, held, bytes(64))
    return Introduction(client, samples, affords, held, identity.sign(_signed_text(asked, unsigned)))


def require_known(directory: Mapping[int, bytes], asked: Introduce, found: Introduction) -> None:
    """Whether the one who answers is the client that it says it is."""
    if found.client not in directory:
        raise RefusalError(f"client {found.client} is not on the roster")
    unsigned = Introduction(found.client, found.samples, found.affords, found.held, bytes(64))
    if not signed(directory[found.client], found.signature, _signed_text(asked, unsigned)):
        raise RefusalError(f"an answer in the name of client {found.client} that its key has not signed")
    if not found.samples:
        raise RefusalError(f"client {found.client} has no samples")


class Nodes(Protocol):
    """Computers in a network, by numbers that mean nothing, and a way to exchange messages with them. Who does not
    answer in time is not in the result."""

    def present(self) -> set[int]: ...

    def exchange(self, requests: Mapping[int, bytes]) -> Mapping[int, bytes]: ...


@dataclass
class Roll:
    """Which node speaks for which client. A transport to clients for the rounds of one run."""

    nodes: Nodes
    directory: Mapping[int, bytes]
    run: bytes
    plan: str
    tell: Callable[[str], None]
    met: dict[int, int] = field(default_factory=dict)
    """Client → the node that has introduced itself as this client."""
    ready: set[int] = field(default_factory=set)
    seen: set[int] = field(default_factory=set)
    """Who has been ready at some time."""
    _later: dict[int, float] = field(default_factory=dict)
    _turned_away: dict[int, str] = field(default_factory=dict)

    def meet(self) -> dict[int, Introduction]:
        """Ask those who they are whom nobody has met yet. An unknown one is named and left alone."""
        here = self.nodes.present()
        for client, node in list(self.met.items()):
            if node not in here:
                self._lose(client, "has left")
        now = time.monotonic()
        strangers = {node for node in here - set(self.met.values()) if self._later.get(node, now) <= now}
        if not strangers:
            return {}
        asked = {node: Introduce(self.run, secrets.token_bytes(32), self.plan) for node in strangers}
        found: dict[int, Introduction] = {}
        replies = self._exchange(asked)
        self._later |= dict.fromkeys(strangers, time.monotonic() + AGAIN)
        for node, reply in replies.items():
            try:
                answer = _as(Introduction, reply)
                require_known(self.directory, asked[node], answer)
            except MessageError as fault:
                self._turn_away(node, str(fault))
                continue
            self.met[answer.client] = node
            self.ready.discard(answer.client)
            del self._later[node]
            found[answer.client] = answer
        return found

    def begin(self, clients: Iterable[int], about: Begin, trajectory: bytes) -> set[int]:
        """Tell some clients about the run; those who take part in it."""
        asked = {self.met[client]: about for client in clients}
        replies = self._exchange(asked)
        begun: set[int] = set()
        for client in clients:
            node = self.met[client]
            try:
                if node not in replies:
                    raise MessageError("it did not answer")
                if _as(Ready, replies[node]).trajectory != trajectory:
                    raise MessageError("it follows another plan")
            except MessageError as fault:
                self._lose(client)
                self._later[node] = time.monotonic() + AGAIN
                self._turn_away(node, f"client {client} does not take part: {fault}")
                continue
            begun.add(client)
        self.ready |= begun
        self.seen |= begun
        return begun

    def end(self, last: Mapping[int, RoundRequest]) -> set[int]:
        """Tell the clients that the run is over; those who hold its last weights."""
        asked = {self.met[client]: Over(request) for client, request in last.items() if client in self.ready}
        replies, hold = self._exchange(asked), set[int]()
        for client, request in last.items():
            reply = replies.get(self.met.get(client, -1))
            if isinstance(reply, Done) and reply.weights_hash == request.weights_hash:
                hold.add(client)
            elif isinstance(reply, Unready):
                self._lose(client, "must be told about the run again")
            elif isinstance(reply, Abstention):
                self.tell(f"client {client} does not hold the last weights: {reply.reason}")
        return hold

    def exchange(self, requests: Mapping[int, bytes]) -> Mapping[int, bytes]:
        """Messages to clients and their replies. Who has forgotten the run is met again before the next round."""
        asked = {self.met[client]: data for client, data in requests.items() if client in self.ready}
        replies = self.nodes.exchange(asked)
        found: dict[int, bytes] = {}
        for client in requests:
            data = replies.get(self.met.get(client, -1))
            if data is None:
                continue
            if data == UNREADY:
                self._lose(client, "must be told about the run again")
                continue
            found[client] = data
        return found

    def _exchange(self, asked: Mapping[int, Message]) -> dict[int, Answered]:
        replies = self.nodes.exchange({node: encode(message) for node, message in asked.items()})
        found: dict[int, Answered] = {}
        for node, data in replies.items():
            try:
                found[node] = read(data, Answered, "Introduction, Ready or Done")
            except MessageError as fault:
                self._turn_away(node, str(fault))
        return found

    def _lose(self, client: int, why: str = "") -> None:
        del self.met[client]
        if client in self.ready:
            self.ready.discard(client)
            self.tell(f"client {client} {why}")

    def _turn_away(self, node: int, why: str) -> None:
        """Said once for each node and reason: it is asked again and again."""
        if self._turned_away.get(node) != why:
            self._turned_away[node] = why
            self.tell(f"turned away: {why}")


UNREADY = encode(Unready())


def decode_asked(data: bytes) -> Asked | None:
    """A message about joining; none where it is about something else."""
    try:
        found: Asked = read(data, Asked, "Introduce, Begin or Over")
    except MessageError:
        return None
    return found


def _as(kind: type[M], answer: Answered) -> M:
    if isinstance(answer, Abstention):
        raise MessageError(answer.reason)
    if not isinstance(answer, kind):
        raise MessageError(f"expected {kind.__name__}, got {type(answer).__name__}")
    return answer


def _signed_text(asked: Introduce, unsigned: Introduction) -> bytes:
    return b"baffle/introduction/1" + asked.run + asked.challenge + encode(unsigned)
