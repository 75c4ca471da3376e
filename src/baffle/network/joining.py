"""How a node of a network becomes a client of a run: it introduces itself, and the server sends it the plan.

    server                                      client
    Introduce(run, challenge, plan)   →
                                      ←         Introduction(number, samples, …, signed)
    Begin(run, plan, tiers)           →
                                      ←         Ready(trajectory)
    … rounds …
    Over(the last weights)            →
                                      ←         Done(their hash)

A client proves who it is with its key in the roster, which everybody had before the run; it does not matter which
computer it runs on. A client that will not take part answers with an Abstention that says why. One that was restarted,
or whose weights went wrong, answers `Unready`, and has to introduce itself again.
"""

import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Protocol, TypeVar

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec import Meta

from baffle.aggregation.context import signed
from baffle.aggregation.messages import Key, Signature
from baffle.core.messages import Abstention, Hash, Message, Number, RoundRequest, encode, read
from baffle.errors import MessageError, RefusalError

AGAIN = 5.0
"""Seconds until a node that was silent or turned away is asked again: while the server asks, the others wait."""

MOST_PLAN = 1 << 20
"""The most characters that a plan may have."""

PlanText = Annotated[str, Meta(max_length=MOST_PLAN)]


class Introduce(Message, frozen=True, tag="introduce"):
    """To a node: which client are you in a run of this plan? The challenge makes replayed answers worthless."""

    run: Key
    challenge: Key
    plan: PlanText


class Introduction(Message, frozen=True, tag="introduction"):
    """From a node: which client it is, how many samples it has, how many directions a round it affords (0: all), and
    one more than the round whose weights it holds (0: it holds none)."""

    client: Number
    samples: Number
    affords: Number
    held: Number
    signature: Signature


class Begin(Message, frozen=True, tag="begin"):
    """To a client: the run's plan with every setting decided, and how many directions each client evaluates."""

    run: Key
    plan: PlanText
    tiers: tuple[Number, ...]


class Ready(Message, frozen=True, tag="ready"):
    """From a client: it takes part in the run with this trajectory digest."""

    trajectory: Hash


class Over(Message, frozen=True, tag="over"):
    """To a client: the run has ended with the weights that this request names."""

    request: RoundRequest


class Done(Message, frozen=True, tag="done"):
    """From a client: it holds these weights."""

    weights_hash: Hash


class Unready(Message, frozen=True, tag="unready"):
    """From a node that has not been told about the run, or has forgotten it."""


M = TypeVar("M", Introduction, Ready, Done)

Asked = Introduce | Begin | Over
Answered = Introduction | Ready | Done | Unready | Abstention


def introduce_oneself(
    identity: Ed25519PrivateKey, asked: Introduce, client: int, samples: int, affords: int, held: int
) -> Introduction:
    unsigned = Introduction(client, samples, affords, held, bytes(64))
    return Introduction(client, samples, affords, held, identity.sign(_signed_text(asked, unsigned)))


def require_known(directory: Mapping[int, bytes], asked: Introduce, introduction: Introduction) -> None:
    """Refuse an introduction by a client that is not on the roster, is not the one it claims to be, or has no
    samples."""
    client = introduction.client
    if client not in directory:
        raise RefusalError(f"client {client} is not on the roster")
    unsigned = msgspec.structs.replace(introduction, signature=bytes(64))
    if not signed(directory[client], introduction.signature, _signed_text(asked, unsigned)):
        raise RefusalError(f"an answer in the name of client {client} is not signed with its key")
    if not introduction.samples:
        raise RefusalError(f"client {client} has no samples")


class Nodes(Protocol):
    """The nodes of a network, by arbitrary numbers, and a way to exchange messages with them. A node that does not
    answer in time is missing from the result."""

    def present(self) -> set[int]: ...

    def exchange(self, requests: Mapping[int, bytes]) -> Mapping[int, bytes]: ...


@dataclass
class ConnectedClients:
    """Which node speaks for which client. For the rounds of one run it is the transport to the clients."""

    nodes: Nodes
    directory: Mapping[int, bytes]
    run: bytes
    plan: str
    tell: Callable[[str], None]
    met: dict[int, int] = field(default_factory=dict)
    """Client → the node that introduced itself as this client."""
    ready: set[int] = field(default_factory=set)
    """Clients that have been told about the run and take part in it."""
    ever_ready: set[int] = field(default_factory=set)
    """Clients that have been ready at least once."""
    _ask_after: dict[int, float] = field(default_factory=dict)
    _turned_away: dict[int, str] = field(default_factory=dict)

    def meet_new_nodes(self) -> dict[int, Introduction]:
        """Ask every node that we have not met to introduce itself. A node that is not one of our clients is reported
        and left alone."""
        present = self.nodes.present()
        for client, node in list(self.met.items()):
            if node not in present:
                self._drop(client, "has left")
        now = time.monotonic()
        strangers = {node for node in present - set(self.met.values()) if self._ask_after.get(node, now) <= now}
        if not strangers:
            return {}
        questions = {node: Introduce(self.run, secrets.token_bytes(32), self.plan) for node in strangers}
        replies = self._ask(questions)
        self._ask_after |= dict.fromkeys(strangers, time.monotonic() + AGAIN)
        introductions: dict[int, Introduction] = {}
        for node, reply in replies.items():
            try:
                introduction = _expect(Introduction, reply)
                require_known(self.directory, questions[node], introduction)
            except MessageError as fault:
                self._turn_away(node, str(fault))
                continue
            client = introduction.client
            self.met[client] = node
            self.ready.discard(client)
            del self._ask_after[node]
            introductions[client] = introduction
        return introductions

    def start_run(self, clients: Iterable[int], begin: Begin, trajectory_digest: bytes) -> set[int]:
        """Tell these clients about the run. Returns those that take part in it."""
        replies = self._ask({self.met[client]: begin for client in clients})
        started: set[int] = set()
        for client in clients:
            node = self.met[client]
            try:
                if node not in replies:
                    raise MessageError("it did not answer")
                if _expect(Ready, replies[node]).trajectory != trajectory_digest:
                    raise MessageError("it follows another plan")
            except MessageError as fault:
                self._drop(client, "does not take part")
                self._ask_after[node] = time.monotonic() + AGAIN
                self._turn_away(node, f"client {client} does not take part: {fault}")
                continue
            started.add(client)
        self.ready |= started
        self.ever_ready |= started
        return started

    def end_run(self, last: Mapping[int, RoundRequest]) -> set[int]:
        """Tell the clients that the run is over, each with the request that brings it to the last weights. Returns
        those that now hold them."""
        replies = self._ask(
            {self.met[client]: Over(request) for client, request in last.items() if client in self.ready}
        )
        holders: set[int] = set()
        for client, request in last.items():
            reply = replies.get(self.met.get(client, -1))
            if isinstance(reply, Done) and reply.weights_hash == request.weights_hash:
                holders.add(client)
            elif isinstance(reply, Unready):
                self._drop(client, "must be told about the run again")
            elif isinstance(reply, Abstention):
                self.tell(f"client {client} does not hold the last weights: {reply.reason}")
        return holders

    def exchange(self, requests: Mapping[int, bytes]) -> Mapping[int, bytes]:
        """Send requests to clients and return their replies. A client that has forgotten the run introduces itself
        again before the next round."""
        by_node = self.nodes.exchange(
            {self.met[client]: data for client, data in requests.items() if client in self.ready}
        )
        replies: dict[int, bytes] = {}
        for client in requests:
            data = by_node.get(self.met.get(client, -1))
            if data == UNREADY:
                self._drop(client, "must be told about the run again")
            elif data is not None:
                replies[client] = data
        return replies

    def _ask(self, questions: Mapping[int, Message]) -> dict[int, Answered]:
        """Send each node its message and return the replies that can be read."""
        replies = self.nodes.exchange({node: encode(message) for node, message in questions.items()})
        answers: dict[int, Answered] = {}
        for node, data in replies.items():
            try:
                answers[node] = read(data, Answered, "Introduction, Ready or Done")
            except MessageError as fault:
                self._turn_away(node, str(fault))
        return answers

    def _drop(self, client: int, why: str) -> None:
        """Forget which node this client is. A client that took part is reported."""
        del self.met[client]
        if client in self.ready:
            self.ready.discard(client)
            self.tell(f"client {client} {why}")

    def _turn_away(self, node: int, why: str) -> None:
        """Report why a node is turned away: once for each reason, because it is asked again and again."""
        if self._turned_away.get(node) != why:
            self._turned_away[node] = why
            self.tell(f"turned away: {why}")


UNREADY = encode(Unready())


def decode_asked(data: bytes) -> Asked | None:
    """A message about joining; None if it is about anything else."""
    try:
        asked: Asked = read(data, Asked, "Introduce, Begin or Over")
    except MessageError:
        return None
    return asked


def _expect(kind: type[M], answer: Answered) -> M:
    """The answer if it is of this kind; a MessageError if it is an abstention or of another kind."""
    if isinstance(answer, Abstention):
        raise MessageError(answer.reason)
    if not isinstance(answer, kind):
        raise MessageError(f"expected {kind.__name__}, got {type(answer).__name__}")
    return answer


def _signed_text(asked: Introduce, unsigned: Introduction) -> bytes:
    return b"baffle/introduction/1" + asked.run + asked.challenge + encode(unsigned)
