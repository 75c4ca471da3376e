"""The server's end of the link: it listens on one port, knows which clients are connected, and carries requests to them
and their replies back.

The network lives on a thread of its own, so connections stay alive while the server computes. `carry` is called from
outside that thread and returns when everybody has answered or the deadline has passed:

    a client that says goodbye                    is not waited for
    a client whose line breaks                    has GRACE seconds to open another; it is then asked again, in the
                                                  same bytes
    a client that does not answer in time         is left out of this exchange
    ... and was not heard from meanwhile          is not asked again before it is
    ... or has not even taken the whole request   is disconnected
"""

import asyncio
import socket
import ssl
from asyncio import sslproto
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from threading import Thread
from types import TracebackType
from typing import Any, TypeVar

from websockets.http11 import Request as HttpRequest
from websockets.http11 import Response

from baffle.core.messages import first_number, tag_of
from baffle.errors import MessageError, TransportError
from baffle.network.authority import ServerKeys
from baffle.network.link import door
from baffle.network.link.connection import Connection
from baffle.network.link.door import Door
from baffle.network.link.envelope import REPLY_BYTES, Request, ask, read_reply
from baffle.network.link.handshake import GOODBYE, REPLACED, ServerSide
from baffle.network.link.limits import most_bytes
from baffle.network.link.pages import Pages

GRACE = 2.0
"""Seconds for which a client whose line broke counts as connected."""

QUIET, GONE = 15.0, 45.0
"""After so many seconds without a byte a client is pinged, and after so many its connection is given up."""

BACKLOG = 1024

T = TypeVar("T")


sslproto.SSLProtocol.max_size = 16 * 1024
# asyncio gives every TLS connection a buffer of 256 kB, which is a quarter of a gigabyte for a thousand clients.


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


class Link:
    """Listens at an address, without TLS if `tls` is None. `seconds` is the deadline of an exchange."""

    def __init__(
        self,
        keys: ServerKeys,
        host: str,
        port: int,
        tls: ssl.SSLContext | None,
        seconds: float,
        pages: Pages | None = None,
        tell: Callable[[str], None] = lambda _words: None,
    ) -> None:
        self._keys, self._tls, self._seconds, self._tell = keys, tls, seconds, tell
        self._directory = keys.roster.directory()
        self._clients = {key: number for number, key in self._directory.items()}
        self._own = keys.roster.server_key
        self._hosts = frozenset(keys.hosts)
        self._pages = pages or Pages("")
        self._listener = _listen(host, port)
        self.port: int = self._listener.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._door = Door(len(self._directory), self._loop.time)
        self._handshakes: dict[Connection, ServerSide] = {}
        self._connections: dict[int, Connection] = {}
        self._broken: dict[int, tuple[bytes, float]] = {}  # client → its process, and when its line broke
        self._stalled: dict[int, float] = {}  # client → when it missed a deadline without a sign of life
        self._asked: dict[int, Request] = {}  # client → the newest request to it
        self._before: dict[int, Request] = {}  # client → the one before
        self._exchanges: list[Exchange] = []
        self._contribution = 0
        self.counts: Counter[str] = Counter()
        self._thread = Thread(target=self._loop.run_forever, name="link", daemon=True)

    def __enter__(self) -> "Link":
        self._thread.start()
        self._tasks = [
            asyncio.run_coroutine_threadsafe(work, self._loop) for work in (self._accept(), self._keep_alive())
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Say goodbye to everybody, and stop listening."""
        for task in self._tasks:
            task.cancel()
        self._listener.close()
        with suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._say_goodbye(), self._loop).result(5)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()

    def present(self) -> Mapping[int, bytes]:
        """The clients that are connected, each with the name of its process. A client whose line broke a moment ago
        still counts."""
        return self._call(self._present())

    def carry(self, requests: Mapping[int, bytes], run: bytes) -> Mapping[int, bytes]:
        """Send each client its request and return the replies, in the order of the requests."""
        signed = {
            client: ask(self._keys.identity, self._directory[client], run, first_number(body), tag_of(body), body)
            for client, body in requests.items()
        }
        replies = self._call(self._carry(signed))
        return {client: replies[client] for client in requests if client in replies}

    def expect(self, contribution: int) -> None:
        """Accept contributions of at most this many bytes."""
        self._contribution = contribution

    async def _present(self) -> dict[int, bytes]:
        now = self._loop.time()
        self._broken = {client: known for client, known in self._broken.items() if now - known[1] < GRACE}
        broken = {client: process for client, (process, _) in self._broken.items()}
        return broken | {client: connection.process for client, connection in self._connections.items()}

    async def _carry(self, requests: dict[int, Request]) -> dict[int, bytes]:
        present, begun = await self._present(), self._loop.time()
        exchange = Exchange({})
        for client, request in requests.items():
            if client not in present or self._is_stalled(client):
                continue
            exchange.open[client] = request
            self._before[client] = self._asked.get(client, request)
            self._asked[client] = request
            if client in self._connections:
                self._send(self._connections[client], request)
            else:
                self._wait_for_line(client, exchange)
        self._exchanges.append(exchange)
        try:
            if exchange.open:
                async with asyncio.timeout(self._seconds):
                    await exchange.done.wait()
        except TimeoutError:
            for client in exchange.open:
                self._note_late(client, begun)
        finally:
            self._exchanges.remove(exchange)
        return exchange.replies

    def _is_stalled(self, client: int) -> bool:
        connection = self._connections.get(client)
        stalled = self._stalled.get(client)
        if connection is None or stalled is None or connection.heard > stalled:
            self._stalled.pop(client, None)
            return False
        return True

    def _note_late(self, client: int, begun: float) -> None:
        """Deal with a client that has missed a deadline."""
        self.counts["late"] += 1
        connection = self._connections.get(client)
        if connection is None:
            return
        if connection.unsent:
            self._tell(f"client {client} reads too slowly; its connection is closed")
            connection.drop()
        elif connection.heard < begun:
            self._stalled[client] = self._loop.time()
            connection.ping()

    def _send(self, connection: Connection, request: Request) -> None:
        connection.allow(REPLY_BYTES + most_bytes(request.phase, len(self._directory), self._contribution))
        connection.send(request.frame)
        self.counts["sent bytes"] += len(request.frame)

    # What connections report

    def page(self, connection: Connection, request: HttpRequest) -> Response:
        response = self._pages.answer(request)
        if response.status_code == HTTPStatus.OK:
            self._door.leave(connection)
        return response

    def opened(self, connection: Connection) -> None:
        self._handshakes[connection] = ServerSide(self._keys.identity, self._clients, self._hosts)

    def received(self, connection: Connection, frame: bytes) -> None:
        if connection.client is None:
            self._shake_hands(connection, frame)
            return
        self.counts["received bytes"] += len(frame)
        try:
            self._take_reply(connection.client, frame)
        except MessageError as fault:
            self.counts["refused"] += 1
            self._tell(f"client {connection.client} is disconnected: {fault}")
            for exchange in self._exchanges:
                exchange.close(connection.client)
            raise

    def _take_reply(self, client: int, frame: bytes) -> None:
        asked, before = self._asked.get(client), self._before.get(client)
        if asked is None or not asked.is_answered_by(frame):
            if before is None or not before.is_answered_by(frame):
                raise MessageError("an answer that nobody asked for")
            return  # it comes after the deadline
        exchange = next((exchange for exchange in self._exchanges if exchange.open.get(client) is asked), None)
        if exchange:
            exchange.close(client, read_reply(self._directory[client], self._own, asked, frame))

    def lost(self, connection: Connection) -> None:
        self._handshakes.pop(connection, None)
        client = connection.client
        if client is None:
            self._door.fail(connection)
            return
        if self._connections.get(client) is not connection:
            return  # a newer connection has taken its place
        del self._connections[client]
        for exchange in self._exchanges:
            if client not in exchange.open:
                continue
            if connection.left:
                exchange.close(client)
            else:
                self._wait_for_line(client, exchange)
        if not connection.left:
            self._broken[client] = connection.process, self._loop.time()

    def _shake_hands(self, connection: Connection, frame: bytes) -> None:
        handshake = self._handshakes[connection]
        try:
            answer = handshake.take(frame)
        except MessageError:
            self._door.fail(connection)
            raise
        if handshake.client is not None:
            del self._handshakes[connection]
            self._door.prove(connection)
            connection.prove(handshake.client, handshake.process)
        connection.send(answer)
        if handshake.client is not None:
            self._welcome(connection, handshake.client)

    def _welcome(self, connection: Connection, client: int) -> None:
        """A client has proved who it is. Its older connection, if there is one, ends; an open question is asked
        again, unless its process is another, which knows nothing of the question."""
        older = self._connections.get(client)
        process = older.process if older else self._broken.pop(client, (connection.process, 0.0))[0]
        self._connections[client] = connection
        if older:
            if older.process != connection.process:
                self._tell(f"client {client} has connected again as another process; the older connection is closed")
            older.close(REPLACED, "another process has connected with this client's key")
        for exchange in self._exchanges:
            request = exchange.open.get(client)
            if request is None:
                continue
            if process == connection.process:
                self._send(connection, request)
            else:
                exchange.close(client)

    def _wait_for_line(self, client: int, exchange: Exchange) -> None:
        """Stop waiting for a client if it has not come back in time."""

        def give_up() -> None:
            if client not in self._connections:
                exchange.close(client)

        self._loop.call_later(GRACE, give_up)

    # The port

    async def _accept(self) -> None:
        self._listener.setblocking(False)
        openings = set[asyncio.Task[None]]()
        while True:
            try:
                accepted, address = await self._loop.sock_accept(self._listener)
            except OSError as fault:
                self._tell(f"a connection cannot be accepted: {fault.strerror or fault}")
                await asyncio.sleep(1)
                continue
            if not self._door.admits(address[0]):
                accepted.close()
                continue
            opening = self._loop.create_task(self._open(accepted, address[0]))
            openings.add(opening)
            opening.add_done_callback(openings.discard)

    async def _open(self, accepted: socket.socket, address: str) -> None:
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = Connection(self, address, accepted)
        self._door.enter(connection)
        try:
            await self._loop.connect_accepted_socket(
                lambda: connection,
                accepted,
                ssl=self._tls,
                ssl_handshake_timeout=door.SECONDS if self._tls else None,
            )
        except (OSError, EOFError):  # TLS errors are OSErrors
            self._door.fail(connection)
            accepted.close()

    async def _keep_alive(self) -> None:
        """Ping clients that have been silent, and drop those that stay silent."""
        while True:
            await asyncio.sleep(QUIET / 3)
            for connection in list(self._connections.values()):
                silent = self._loop.time() - connection.heard
                if silent > GONE:
                    connection.drop()
                elif silent > QUIET:
                    connection.ping()

    async def _say_goodbye(self) -> None:
        for connection in [*self._connections.values(), *self._handshakes]:
            connection.close(GOODBYE, "the server stops")
        for _ in range(20):
            if not self._connections:
                break
            await asyncio.sleep(0.1)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def server_tls(keys: ServerKeys) -> ssl.SSLContext:
    """TLS for a server with these keys."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.num_tickets = 0  # a client's connection lasts; tickets would only cost bytes
    context.load_cert_chain(keys.certificate, keys.key)
    return context


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as fault:
        raise TransportError(
            f"cannot listen at {host}:{port}: {fault.strerror or fault}; give another --host or --port, or stop the "
            "process that listens there"
        ) from None
