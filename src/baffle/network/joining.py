"""How a connected client becomes a client of a run: it introduces itself, and the server sends it the plan.

    server                            client
    Introduce(run, plan)      →
                              ←       Introduction(samples, …)
    Begin(run, plan, tiers)   →
                              ←       Ready(trajectory)
    … rounds …
    Over(the last weights)    →
                              ←       Done(their hash)

Who a client is, its line has proved before. A client that will not take part answers with an Abstention that says why.
One that was restarted, or whose weights went wrong, answers `Unready`, and has to introduce itself again.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Protocol, TypeVar

from msgspec import Meta

from baffle.aggregation.messages import Key
from baffle.core.messages import Abstention, Hash, Message, Number, RoundRequest, encode, read
from baffle.errors import MessageError, one_line

AGAIN = 5.0
"""Seconds until a client that was silent or turned away is asked again: while the server asks, the others wait."""

MOST_PLAN = 1 << 20
"""The most characters that a plan may have."""

NO_RUN = bytes(32)
"""The run of messages to a client that has not been told about one."""

PlanText = Annotated[str, Meta(max_length=MOST_PLAN)]


class Introduce(Message, frozen=True, tag="introduce"):
    """To a client: what would you bring to a run of this plan?"""

    run: Key
    plan: PlanText


class Introduction(Message, frozen=True, tag="introduction"):
    """From a client: how many samples it has, how many directions a round it affords (0: all), one more than the round
    whose weights it holds (0: it holds none), and one more than the last round that it has answered by its marks (0: it
    has answered none)."""

    samples: Number
    affords: Number
    held: Number
    answered: Number = 0


class Begin(Message, frozen=True, tag="begin"):
    """To a client: the run's plan with every setting decided, how many directions each client evaluates, and one more
    than the last round that this client contributed to (0: it contributed to none)."""

    run: Key
    plan: PlanText
    tiers: tuple[Number, ...]
    answered: Number = 0


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
    """From a client that has not been told about the run, or has forgotten it."""


M = TypeVar("M", Introduction, Ready, Done)

Asked = Introduce | Begin | Over
Answered = Introduction | Ready | Done | Unready | Abstention


class Lines(Protocol):
    """Lines to clients, by their numbers. Who is at the other end of a line has been proved."""

    def present(self) -> Mapping[int, object]:
        """The clients that are connected, each with a name for its process: a client that was restarted has another."""
        ...

    def carry(self, requests: Mapping[int, bytes], run: bytes) -> Mapping[int, bytes]:
        """Send each client its request and return the replies. A client that does not answer in time is missing."""
        ...

    def expect(self, contribution: int) -> None:
        """Contributions to the run have at most this many bytes."""
        ...


@dataclass
class ConnectedClients:
    """Which of the connected clients take part in a run. For its rounds this is the transport to them."""

    lines: Lines
    directory: Mapping[int, bytes]
    run: bytes
    plan: str
    tell: Callable[[str], None]
    met: dict[int, object] = field(default_factory=dict)
    """Client → the process that introduced itself."""
    ready: set[int] = field(default_factory=set)
    """Clients that have been told about the run and take part in it."""
    ever_ready: set[int] = field(default_factory=set)
    """Clients that have been ready at least once."""
    _ask_after: dict[int, float] = field(default_factory=dict)
    _turned_away: dict[int, str] = field(default_factory=dict)

    def meet(self) -> dict[int, Introduction]:
        """Ask every connected client that we have not met to introduce itself. One that will not take part is reported
        and left alone for a while."""
        present = self.lines.present()
        for client, process in list(self.met.items()):
            if present.get(client) != process:
                self._drop(client, "was restarted" if client in present else "has left")
        now = time.monotonic()
        newcomers = [
            client for client in sorted(present.keys() - self.met.keys()) if self._ask_after.get(client, now) <= now
        ]
        if not newcomers:
            return {}
        question = Introduce(self.run, self.plan)
        replies = self._ask(dict.fromkeys(newcomers, question), NO_RUN)
        self._ask_after |= dict.fromkeys(newcomers, time.monotonic() + AGAIN)
        introductions: dict[int, Introduction] = {}
        for client, reply in replies.items():
            try:
                introduction = _expect(Introduction, reply)
                if not introduction.samples:
                    raise MessageError("it has no samples")
            except MessageError as fault:
                self._turn_away(client, str(fault))
                continue
            self.met[client] = present[client]
            self.ready.discard(client)
            del self._ask_after[client]
            introductions[client] = introduction
        return introductions

    def start_run(self, begins: Mapping[int, Begin], trajectory_digest: bytes) -> set[int]:
        """Tell clients about the run. Returns those that take part in it."""
        replies = self._ask(begins, NO_RUN)
        started: set[int] = set()
        for client in begins:
            try:
                if client not in replies:
                    raise MessageError("it did not answer")
                if _expect(Ready, replies[client]).trajectory != trajectory_digest:
                    raise MessageError("it follows another plan")
            except MessageError as fault:
                self._drop(client, "does not take part")
                self._ask_after[client] = time.monotonic() + AGAIN
                self._turn_away(client, str(fault))
                continue
            started.add(client)
        self.ready |= started
        self.ever_ready |= started
        return started

    def end_run(self, last: Mapping[int, RoundRequest]) -> set[int]:
        """Tell the clients that the run is over, each with the request that brings it to the last weights. Returns
        those that now hold them."""
        replies = self._ask({client: Over(request) for client, request in last.items()}, self.run)
        holders: set[int] = set()
        for client, reply in replies.items():
            if isinstance(reply, Done) and reply.weights_hash == last[client].weights_hash:
                holders.add(client)
            elif isinstance(reply, Unready):
                self._drop(client, "must be told about the run again")
            elif isinstance(reply, Abstention):
                self.tell(f"client {client} does not hold the last weights: {one_line(reply.reason)}")
        return holders

    def exchange(self, requests: Mapping[int, bytes]) -> Mapping[int, bytes]:
        """Send requests to the clients of the run and return their replies. A client that has forgotten the run
        introduces itself again before the next round."""
        asked = {client: data for client, data in requests.items() if client in self.ready}
        replies = dict(self.lines.carry(asked, self.run)) if asked else {}
        for client in [client for client, data in replies.items() if data == UNREADY]:
            del replies[client]
            self._drop(client, "must be told about the run again")
        return replies

    def _ask(self, questions: Mapping[int, Message], run: bytes) -> dict[int, Answered]:
        """Send each client its message and return the replies that can be read."""
        if not questions:
            return {}
        encoded_once = {id(message): encode(message) for message in questions.values()}
        replies = self.lines.carry({client: encoded_once[id(message)] for client, message in questions.items()}, run)
        answers: dict[int, Answered] = {}
        for client, data in replies.items():
            try:
                answers[client] = read(data, Answered, "Introduction, Ready or Done")
            except MessageError as fault:
                self._turn_away(client, str(fault))
        return answers

    def _drop(self, client: int, why: str) -> None:
        """Forget that we have met this client. A client that took part is reported."""
        self.met.pop(client, None)
        if client in self.ready:
            self.ready.discard(client)
            self.tell(f"client {client} {why}")

    def _turn_away(self, client: int, why: str) -> None:
        """Report why a client does not take part: once for each reason, because it is asked again and again."""
        if self._turned_away.get(client) != why:
            self._turned_away[client] = why
            self.tell(f"client {client} does not take part: {why}")


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
        raise MessageError(one_line(answer.reason))
    if not isinstance(answer, kind):
        raise MessageError(f"expected {kind.__name__}, got {type(answer).__name__}")
    return answer
