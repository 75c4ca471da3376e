"""Requests to the connected clients, and their replies. Everything here runs on the link's thread.

a client that closes its connection      is not waited for
a client whose connection breaks         has GRACE seconds to open another, and is asked again in the same bytes
                                         in a patient exchange it has until the deadline, also as another process
a client that misses a deadline          is left out of this exchange
... and was silent meanwhile             is not asked again before it gives a sign of life
... or has not read the whole request    is disconnected
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from baffle.errors import MessageError
from baffle.network.keys.rosters import Roster
from baffle.network.link.connection import Connection
from baffle.network.link.envelope import REPLY_BYTES, Request, answered_id, most_bytes, read_reply
from baffle.network.link.handshake import REFUSED, REPLACED

GRACE = 2.0  # seconds for which a client whose connection broke counts as connected
QUIET, GONE = 15.0, 45.0  # seconds without a byte until a client is pinged, and until its connection is given up
MOST_UNANSWERED = 16  # how many requests a client may still answer after their deadlines
TELL_AGAIN = 5.0  # seconds between two log lines about the same client, so that one that misbehaves cannot fill the log


@dataclass
class Exchange:
    open: dict[int, Request]
    patient: bool = False
    replies: dict[int, bytes] = field(default_factory=dict)
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def close(self, client: int, reply: bytes | None = None) -> None:
        """Stop waiting for a client, whose reply this is if it has answered."""
        if self.open.pop(client, None) and reply is not None:
            self.replies[client] = reply
        if not self.open:
            self.done.set()


class Exchanges:
    """The exchanges with the clients of a roster. `seconds` is the deadline of each."""

    def __init__(self, roster: Roster, seconds: float, say: Callable[[str], None]) -> None:
        self._directory, self._own = roster.directory(), roster.server_key
        self._seconds, self._say = seconds, say
        self.connections: dict[int, Connection] = {}
        self.contribution = 0  # the most bytes of a contribution
        self.counts: Counter[str] = Counter()
        self._unanswered: dict[int, dict[bytes, int]] = {}  # client → requests on its connection, and room for a reply
        self._broken: dict[int, Connection] = {}  # connections that broke a moment ago
        self._stalled: dict[int, float] = {}  # client → when it missed a deadline without a sign of life
        self._open: list[Exchange] = []
        self._told: dict[int, float] = {}  # client → when something was last logged about it

    def admit(self, roster: Roster) -> None:
        before, self._directory = self._directory, roster.directory()
        for client in [client for client, key in before.items() if self._directory.get(client) != key]:
            self._broken.pop(client, None)
            if connection := self.connections.get(client):
                connection.close(REFUSED, "this key is no longer on the server's roster")
            self._close(client)

    def present(self) -> dict[int, bytes]:
        return {client: connection.process for client, connection in (self._broken | self.connections).items()}

    async def carry(self, requests: dict[int, Request], *, patient: bool = False) -> dict[int, bytes]:
        begun, present = _now(), self.present()
        asked = {one: asked for one, asked in requests.items() if one in present and not self._stalls(one)}
        exchange = Exchange({**requests} if patient else asked, patient)
        for client, request in exchange.open.items():
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
        """Take in an authenticated client's connection. Its older connection, if there is one, ends. An open request is
        sent again; to another process of the client, which cannot know of it, only in a patient exchange."""
        broken, older = self._broken.pop(client, None), self.connections.get(client)
        process = (older or broken or connection).process
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
            if process == connection.process or exchange.patient:
                self._send(client, request)
            else:
                exchange.close(client)

    def take(self, client: int, frame: bytes) -> None:
        """Take a client's reply. A reply that comes after its deadline is ignored."""
        self.counts["received bytes"] += len(frame)
        answered = answered_id(frame)
        if self._unanswered[client].pop(answered, None) is None:
            raise MessageError("an answer that nobody asked for")
        for exchange in self._open:
            request = exchange.open.get(client)
            if request is not None and request.short_id == answered:
                exchange.close(client, read_reply(self._directory[client], self._own, request, frame))

    def note_refused(self, client: int, why: str) -> None:
        self.counts["refused"] += 1
        self._tell_of(client, f"is disconnected: {why}")

    def lost(self, connection: Connection, client: int) -> None:
        if self.connections.get(client) is not connection:
            return  # a newer connection has taken its place
        del self.connections[client], self._unanswered[client]
        self._stalled.pop(client, None)
        if connection.broke:
            self._broken[client] = connection
            asyncio.get_running_loop().call_later(GRACE, self._give_up, client, connection)
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

    def _give_up(self, client: int, connection: Connection) -> None:
        """Stop waiting for a client that has not come back since its connection broke."""
        if self._broken.get(client) is connection:
            del self._broken[client]
            self._close(client)

    def _close(self, client: int) -> None:
        for exchange in self._open:
            if not exchange.patient or client not in self._directory:
                exchange.close(client)

    def _send(self, client: int, request: Request) -> None:
        unanswered, connection = self._unanswered[client], self.connections[client]
        unanswered[request.short_id] = most_bytes(request.phase, len(self._directory), self.contribution)
        if len(unanswered) > MOST_UNANSWERED:
            del unanswered[next(iter(unanswered))]
        connection.allow(REPLY_BYTES + max(unanswered.values()))
        connection.send(frame := request.frame)
        self.counts["sent bytes"] += len(frame)

    def _stalls(self, client: int) -> bool:
        """Whether a client has given no sign of life since it missed a deadline."""
        connection, stalled = self.connections.get(client), self._stalled.get(client)
        if connection and stalled is not None and connection.heard <= stalled:
            return True
        self._stalled.pop(client, None)
        return False

    def _note_late(self, client: int, begun: float) -> None:
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
