"""Who is connected, who was asked what, and who has answered. Everything here happens on the link's thread.

a client that says goodbye                    is not waited for
a client whose line breaks                    has GRACE seconds to open another; it is then asked again, in the
                                              same bytes
a client that does not answer in time         is left out of this exchange
... and was not heard from meanwhile          is not asked again before it is
... or has not even taken the whole request   is disconnected
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from baffle.errors import MessageError
from baffle.network.link.connection import Connection
from baffle.network.link.envelope import REPLY_BYTES, Request, answered_id, read_reply
from baffle.network.link.handshake import REFUSED, REPLACED
from baffle.network.link.limits import most_bytes
from baffle.network.rosters import Roster

GRACE = 2.0
"""Seconds for which a client whose line broke counts as connected."""

QUIET, GONE = 15.0, 45.0
"""After so many seconds without a byte a client is pinged, and after so many its connection is given up."""

MOST_UNANSWERED = 16
"""How many requests a client may still answer after their deadlines."""

TELL_AGAIN = 5.0
"""Seconds between two lines about the same client: one that misbehaves could fill a log."""


@dataclass
class Exchange:
    """Requests that wait for replies."""

    open: dict[int, Request]
    replies: dict[int, bytes] = field(default_factory=dict)
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def close(self, client: int, reply: bytes | None = None) -> None:
        """Stop waiting for a client. `reply` is what it answered."""
        if self.open.pop(client, None) and reply is not None:
            self.replies[client] = reply
        if not self.open:
            self.done.set()


@dataclass(frozen=True)
class Break:
    """A client's line broke."""

    process: bytes


class Exchanges:
    """The exchanges with the clients of a roster. `seconds` is the deadline of each."""

    def __init__(self, roster: Roster, seconds: float, say: Callable[[str], None]) -> None:
        self._directory, self._own = roster.directory(), roster.server_key
        self._seconds, self._say = seconds, say
        self.connections: dict[int, Connection] = {}
        self.contribution = 0
        """The most bytes of a contribution."""
        self.counts: Counter[str] = Counter()
        self._unanswered: dict[int, dict[bytes, int]] = {}  # client → requests on its connection, and room for a reply
        self._breaks: dict[int, Break] = {}
        self._stalled: dict[int, float] = {}  # client → when it missed a deadline without a sign of life
        self._open: list[Exchange] = []
        self._told: dict[int, float] = {}  # client → when something was last told about it

    def admit(self, roster: Roster) -> None:
        """The clients are those of this roster from now on. Whoever is no longer one of them is disconnected."""
        before, self._directory = self._directory, roster.directory()
        for client in [client for client, key in before.items() if self._directory.get(client) != key]:
            self._breaks.pop(client, None)
            if connection := self.connections.get(client):
                connection.close(REFUSED, "this key is no longer on the server's roster")
            self._close(client)

    def present(self) -> dict[int, bytes]:
        """The clients that are connected, each with the name of its process."""
        broken = {client: known.process for client, known in self._breaks.items()}
        return broken | {client: connection.process for client, connection in self.connections.items()}

    async def carry(self, requests: dict[int, Request]) -> dict[int, bytes]:
        """Send each client its request and return the replies."""
        begun, present = _now(), self.present()
        exchange = Exchange({})
        for client, request in requests.items():
            if client not in present or self._is_stalled(client):
                continue
            exchange.open[client] = request
            if client in self.connections:
                self._send(client, request)
        self._open.append(exchange)
        try:
            if exchange.open:
                async with asyncio.timeout(self._seconds):
                    await exchange.done.wait()
        except TimeoutError:
            for client in list(exchange.open):
                self._note_late(client, begun)
        finally:
            self._open.remove(exchange)
        return exchange.replies

    def welcome(self, connection: Connection, client: int) -> None:
        """A client has proved who it is. Its older connection, if there is one, ends; an open question is asked
        again, unless its process is another, which knows nothing of the question."""
        older, broken = self.connections.get(client), self._breaks.pop(client, None)
        process = older.process if older else broken.process if broken else connection.process
        self.connections[client] = connection
        self._unanswered[client] = {}
        if older:
            if older.process != connection.process:
                self._tell_of(client, "has connected again as another process; the older connection is closed")
            older.close(REPLACED, "another process has connected with this client's key")
        for exchange in self._open:
            request = exchange.open.get(client)
            if request is None:
                continue
            if process == connection.process:
                self._send(client, request)
            else:
                exchange.close(client)

    def take(self, client: int, frame: bytes) -> None:
        """Take a client's reply. One that comes after its deadline is ignored."""
        self.counts["received bytes"] += len(frame)
        answered = answered_id(frame)
        if self._unanswered[client].pop(answered, None) is None:
            raise MessageError("an answer that nobody asked for")
        for exchange in self._open:
            request = exchange.open.get(client)
            if request is not None and request.short_id == answered:
                exchange.close(client, read_reply(self._directory[client], self._own, request, frame))

    def note_refused(self, client: int, why: str) -> None:
        """A client has done what it must not do."""
        self.counts["refused"] += 1
        self._tell_of(client, f"is disconnected: {why}")

    def lost(self, connection: Connection, client: int) -> None:
        """A client's connection has ended."""
        if self.connections.get(client) is not connection:
            return  # a newer connection has taken its place
        del self.connections[client], self._unanswered[client]
        self._stalled.pop(client, None)
        if connection.broke:
            self._breaks[client] = known = Break(connection.process)
            asyncio.get_running_loop().call_later(GRACE, self._give_up, client, known)
        else:
            self._close(client)

    def check_silence(self) -> None:
        """Ping clients that have been silent, and drop those that stay silent."""
        for connection in list(self.connections.values()):
            silent = _now() - connection.heard
            if silent > GONE:
                connection.drop()
            elif silent > QUIET:
                connection.ping()

    def _give_up(self, client: int, known: Break) -> None:
        """Stop waiting for a client that has not come back since its line broke."""
        if self._breaks.get(client) is known:
            del self._breaks[client]
            self._close(client)

    def _close(self, client: int) -> None:
        for exchange in self._open:
            exchange.close(client)

    def _send(self, client: int, request: Request) -> None:
        unanswered, connection = self._unanswered[client], self.connections[client]
        unanswered[request.short_id] = most_bytes(request.phase, len(self._directory), self.contribution)
        if len(unanswered) > MOST_UNANSWERED:
            del unanswered[next(iter(unanswered))]
        connection.allow(REPLY_BYTES + max(unanswered.values()))
        frame = request.frame
        connection.send(frame)
        self.counts["sent bytes"] += len(frame)

    def _is_stalled(self, client: int) -> bool:
        """Whether a client has given no sign of life since it missed a deadline."""
        connection, stalled = self.connections.get(client), self._stalled.get(client)
        if connection and stalled is not None and connection.heard <= stalled:
            return True
        self._stalled.pop(client, None)
        return False

    def _note_late(self, client: int, begun: float) -> None:
        """Deal with a client that has missed a deadline."""
        self.counts["late"] += 1
        connection = self.connections.get(client)
        if connection is None:
            return
        if connection.unsent:
            self._tell_of(client, "reads too slowly; its connection is closed")
            connection.drop()
        elif connection.heard < begun:
            self._stalled[client] = _now()
            connection.ping()

    def _tell_of(self, client: int, words: str) -> None:
        if _now() - self._told.get(client, -TELL_AGAIN) >= TELL_AGAIN:
            self._told[client] = _now()
            self._say(f"client {client} {words}")


def _now() -> float:
    return asyncio.get_running_loop().time()
