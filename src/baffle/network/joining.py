"""How a connected client becomes a client of a run: it introduces itself, and the server sends it the plan.

    server                            client
    Introduce(run, plan)      →
                              ←       Introduction(samples, …)
    Begin(run, plan, tiers)   →
                              ←       Ready(trajectory)
    … rounds …
    Over(the last weights)    →
                              ←       Done(their hash)

Who a client is, its line has proved before. A client that will not take part answers with an Abstention.
One that was restarted, or whose weights went wrong, answers `Unready`, and has to introduce itself again.
"""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Annotated, Protocol, TypeVar, get_args

from msgspec import Meta

from baffle.aggregation.messages import Key
from baffle.core.messages import Abstention, Hash, Message, Number, RoundRequest, encode, read, tag_of
from baffle.errors import MessageError

AGAIN = 5.0
"""Seconds until a client that was silent or turned away is asked again."""

MOST_PLAN = 1 << 19
"""The most characters that a plan may have: room for a layout of some thousand rows. A client reads this much in less
than a second."""

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


Reply = Future[bytes | None]
"""What a client answers, or None if it does not answer in time."""


class Lines(Protocol):
    """Lines to clients, by their numbers. Who is at the other end of a line has been proved."""

    def present(self) -> Mapping[int, object]:
        """The clients that are connected, each with a name for its process: a client that was restarted has another."""
        ...

    def carry(self, requests: Mapping[int, bytes], run: bytes) -> Mapping[int, bytes]:
        """Send each client its request and return the replies. A client that does not answer in time is missing."""
        ...

    def post(self, requests: Mapping[int, bytes], run: bytes) -> Mapping[int, Reply]:
        """Send each client its request without waiting for it: each reply, or None, comes in a future of its own."""
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
    _took_part: dict[int, object] = field(default_factory=dict)  # client → the process as which it was last ready
    _introducing: dict[int, tuple[object, Reply]] = field(default_factory=dict)  # its process, and what it answers
    _starting: dict[int, Reply] = field(default_factory=dict)
    _ask_after: dict[int, tuple[object, float]] = field(default_factory=dict)
    _turned_away: dict[int, str] = field(default_factory=dict)

    def meet(self) -> dict[int, Introduction]:
        """Ask every connected client that we have not met to introduce itself, and return the introductions that have
        come by now. Nobody waits for a client that takes its time. One that will not take part is reported and left
        alone for a while. One whose line broke and that comes back as the same process takes part again at once."""
        present = self.lines.present()
        for client, process in list(self.met.items()):
            if present.get(client) != process:
                self._drop(client, "was restarted" if client in present else "has left")
        for client, (process, _) in list(self._introducing.items()):
            if present.get(client) != process:
                del self._introducing[client]
        for client in present.keys() - self.met.keys():
            if client in self._took_part and self._took_part[client] == present[client]:
                self._take_back(client, present[client])
        newcomers = [
            client
            for client in sorted(present.keys() - self.met.keys() - self._introducing.keys())
            if not self._is_left_alone(client, present[client])
        ]
        asked = self._post(dict.fromkeys(newcomers, Introduce(self.run, self.plan)))
        self._introducing |= {client: (present[client], reply) for client, reply in asked.items()}
        introductions: dict[int, Introduction] = {}
        for client, (process, reply) in list(self._introducing.items()):
            if not reply.done():
                continue
            del self._introducing[client]
            try:
                introduction = _expect(Introduction, reply.result())
                if not introduction.samples:
                    raise MessageError("it has no samples")
            except MessageError as fault:
                self._turn_away(client, process, str(fault))
                continue
            self.met[client] = process
            self.ready.discard(client)
            introductions[client] = introduction
        return introductions

    def start_run(self, begins: Mapping[int, Begin], trajectory_digest: bytes) -> set[int]:
        """Tell clients that we have met about the run. Returns those that have answered by now, these or earlier ones,
        and take part: a client may have to load its model first, and the rounds do not wait for it."""
        self._starting |= self._post(begins)
        started: set[int] = set()
        for client, reply in list(self._starting.items()):
            if not reply.done():
                continue
            del self._starting[client]
            if client not in self.met:
                continue  # it has left, or was restarted
            try:
                if _expect(Ready, reply.result()).trajectory != trajectory_digest:
                    raise MessageError("it follows another plan")
            except MessageError as fault:
                self._turn_away(client, self.met[client], str(fault))
                self._drop(client, "does not take part")
                continue
            started.add(client)
        self._took_part |= {client: self.met[client] for client in started}
        self.ready |= started
        self.ever_ready |= started
        return started

    @property
    def starting(self) -> bool:
        """Whether clients have been told about the run and have not answered yet."""
        return bool(self._starting)

    def reachable(self) -> set[int]:
        """The clients that take part and are connected at this moment."""
        return self.ready & self.lines.present().keys()

    def end_run(self, last: Mapping[int, RoundRequest]) -> set[int]:
        """Tell the clients that the run is over, each with the request that brings it to the last weights. Returns
        those that now hold them."""
        replies = self.exchange({client: encode(Over(request)) for client, request in last.items()})
        holders: set[int] = set()
        for client, data in replies.items():
            try:
                if _expect(Done, data).weights_hash == last[client].weights_hash:
                    holders.add(client)
            except MessageError as fault:
                self.tell(f"client {client} does not hold the last weights: {fault}")
        return holders

    def exchange(self, requests: Mapping[int, bytes]) -> Mapping[int, bytes]:
        """Send requests to the clients of the run and return their replies. A client that has forgotten the run
        introduces itself again before the next round."""
        asked = {client: data for client, data in requests.items() if client in self.ready}
        replies = dict(self.lines.carry(asked, self.run)) if asked else {}
        for client in [client for client, data in replies.items() if data == UNREADY]:
            del replies[client]
            self._took_part.pop(client, None)
            self._drop(client, "must be told about the run again")
        return replies

    def _post(self, questions: Mapping[int, Message]) -> dict[int, Reply]:
        """Send each client its message, before it knows of a run, without waiting for the replies."""
        if not questions:
            return {}
        encoded_once = {id(message): encode(message) for message in questions.values()}
        return dict(
            self.lines.post({client: encoded_once[id(message)] for client, message in questions.items()}, NO_RUN)
        )

    def _take_back(self, client: int, process: object) -> None:
        self.met[client] = process
        self.ready.add(client)
        self.tell(f"client {client} is back")

    def _drop(self, client: int, why: str) -> None:
        """Forget that we have met this client. A client that took part is reported."""
        self.met.pop(client, None)
        self._starting.pop(client, None)
        if client in self.ready:
            self.ready.discard(client)
            self.tell(f"client {client} {why}")

    def _turn_away(self, client: int, process: object, why: str) -> None:
        """Leave a client alone for a while, and report why: once for each reason, because it is asked again and
        again."""
        self._ask_after[client] = process, time.monotonic() + AGAIN
        if self._turned_away.get(client) != why:
            self._turned_away[client] = why
            self.tell(f"client {client} does not take part: {why}")

    def _is_left_alone(self, client: int, process: object) -> bool:
        turned_away, until = self._ask_after.get(client, (None, 0.0))
        return process == turned_away and time.monotonic() < until


UNREADY = encode(Unready())

JOINING = {kind.__struct_config__.tag for kind in get_args(Asked)}
"""How messages about joining begin."""


def decode_asked(data: bytes) -> Asked | None:
    """A message about joining; None if it is about anything else."""
    if tag_of(data) not in JOINING:
        return None
    asked: Asked = read(data, Asked, "Introduce, Begin or Over")
    return asked


def _expect(kind: type[M], data: bytes | None) -> M:
    """The answer if it is of this kind; a MessageError if there is none, or if it is an abstention or anything else."""
    if data is None:
        raise MessageError("it did not answer")
    answer: Answered = read(data, Answered, "Introduction, Ready or Done")
    if isinstance(answer, Abstention):
        raise MessageError("it abstained; its own log says why")
    if not isinstance(answer, kind):
        raise MessageError(f"expected {kind.__name__}, got {type(answer).__name__}")
    return answer
