"""The server's port: it takes connections in, lets the door judge them, and has clients prove who they are. It runs on
the link's thread."""

import asyncio
import socket
import ssl
from asyncio import sslproto
from collections.abc import Callable, Coroutine
from errno import ECONNABORTED
from http import HTTPStatus
from typing import Any

from websockets.http11 import Request, Response

from baffle.errors import TransportError, first_line
from baffle.network.authority import ServerKeys
from baffle.network.link import door
from baffle.network.link.connection import CLOSE_SECONDS, Connection
from baffle.network.link.door import Door, origin
from baffle.network.link.exchanges import QUIET, Exchanges
from baffle.network.link.handshake import GOODBYE, ServerSide
from baffle.network.link.pages import Pages
from baffle.network.rosters import Roster
from baffle.network.status import LinkCounts

BACKLOG = 1024

REFUSAL_PAUSE = 0.001
"""Seconds until the next connection is accepted after one was turned away, so that a flood of them costs little."""

FAULT_PAUSE = 1.0
"""Seconds until another try after an error of the system, for example too many open files."""

sslproto.SSLProtocol.max_size = 16 * 1024
# asyncio gives every TLS connection a buffer of 256 kB, which is a quarter of a gigabyte for a thousand clients.


class Port:
    """All connections to a listening socket, without TLS if `tls` is None. Clients' frames go to `exchanges`."""

    def __init__(
        self,
        listener: socket.socket,
        tls: ssl.SSLContext | None,
        keys: ServerKeys,
        pages: Pages,
        exchanges: Exchanges,
        say: Callable[[str], None],
    ) -> None:
        self._listener, self._tls, self._pages, self._exchanges, self._say = listener, tls, pages, exchanges, say
        self._identity, self._hosts = keys.identity, frozenset(host.lower() for host in keys.hosts)
        self._clients: dict[bytes, int] = {}  # identity → client; handshakes that have begun look here, too
        self._loop = asyncio.get_running_loop()
        self.door = Door(0, self._loop.time, behind_proxy=tls is None)
        self.admit(keys.roster)
        self._handshakes: dict[Connection, ServerSide] = {}
        self._all = set[Connection]()
        self._closing: dict[int, Connection] = {}  # client → its connection that has ended and is not closed yet
        self._tasks = set[asyncio.Task[None]]()
        for work in (self._accept, self._keep_alive):
            self._start(self._for_ever(work))

    def admit(self, roster: Roster) -> None:
        """Let the clients of this roster in from now on, and nobody else."""
        self._clients.clear()
        self._clients.update({key: number for number, key in roster.directory().items()})
        self.door.clients = len(self._clients)
        self._exchanges.admit(roster)

    async def stop(self) -> None:
        """Say goodbye to everybody, and stop listening."""
        await _cancel_the_others()
        self._listener.close()
        for connection in list(self._all):
            connection.close(GOODBYE, "the server stops")
        end = self._loop.time() + CLOSE_SECONDS
        while self._all and self._loop.time() < end:
            await asyncio.sleep(0.01)
        for connection in list(self._all):
            connection.drop()
        while self._all:
            await asyncio.sleep(0)
        await _cancel_the_others()

    # What connections report

    def page(self, connection: Connection, request: Request) -> Response:
        response = self._pages.answer(request, self._count)
        connection.served = response.status_code == HTTPStatus.OK
        return response

    def _count(self) -> LinkCounts:
        counts = self._exchanges.counts
        return LinkCounts(
            tuple(sorted(self._exchanges.connections)),
            counts["late"],
            counts["refused"],
            self.door.turned_away,
            counts["received bytes"],
            counts["sent bytes"],
        )

    def received(self, connection: Connection, frame: bytes) -> None:
        if connection.client is not None:
            self._exchanges.take(connection.client, frame)
            return
        if connection not in self._handshakes:
            self._handshakes[connection] = ServerSide(self._identity, self._clients, self._hosts)
        handshake = self._handshakes[connection]
        answer = handshake.take(frame)
        if handshake.client is None:
            connection.send(answer)
            return
        del self._handshakes[connection]
        self.door.prove(connection)
        connection.prove(handshake.client, handshake.process)
        connection.send(answer)
        self._exchanges.welcome(connection, handshake.client)

    def refused(self, connection: Connection, why: str) -> None:
        if connection.client is not None:
            self._exchanges.note_refused(connection.client, why)

    def lost(self, connection: Connection) -> None:
        self._handshakes.pop(connection, None)
        if connection.client is None:
            return
        if older := self._closing.pop(connection.client, None):
            older.drop()  # a client that comes and goes must not collect sockets
        self._closing[connection.client] = connection
        self._exchanges.lost(connection, connection.client)

    def gone(self, connection: Connection) -> None:
        self._all.discard(connection)
        if connection.client is None:
            self.door.leave(connection, failed=not connection.served)
            return
        self.door.part(connection.address)
        if self._closing.get(connection.client) is connection:
            del self._closing[connection.client]

    # The listening socket

    async def _accept(self) -> None:
        """Accept one connection, and let it in or turn it away. Nothing is awaited between the two: if the link stopped
        then, the connection would be nobody's, and never closed."""
        await asyncio.sleep(0)  # accepting alone would not let anybody else have a turn
        await self._somebody_calls()
        try:
            accepted, address = self._listener.accept()
            accepted.setblocking(False)
        except BlockingIOError:
            return
        except OSError as fault:
            if fault.errno != ECONNABORTED:
                self._say(f"a connection cannot be accepted: {fault.strerror or fault}")
                await asyncio.sleep(FAULT_PAUSE)
            return
        if not self.door.admits(origin(address[0])):
            accepted.close()
            await asyncio.sleep(REFUSAL_PAUSE)
            return
        connection = Connection(self, origin(address[0]), accepted)
        self.door.enter(connection)
        self._all.add(connection)
        self._start(self._open(connection, accepted)).add_done_callback(
            lambda _task: self._close_unmade(connection, accepted)
        )

    async def _somebody_calls(self) -> None:
        calls = asyncio.Event()
        self._loop.add_reader(self._listener, calls.set)
        try:
            await calls.wait()
        finally:
            self._loop.remove_reader(self._listener)

    async def _open(self, connection: Connection, accepted: socket.socket) -> None:
        tls = {"ssl_handshake_timeout": door.SECONDS, "ssl_shutdown_timeout": CLOSE_SECONDS} if self._tls else {}
        try:
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._loop.connect_accepted_socket(lambda: connection, accepted, ssl=self._tls, **tls)
        except (OSError, EOFError):  # TLS errors are OSErrors
            return

    def _close_unmade(self, connection: Connection, accepted: socket.socket) -> None:
        """Forget a connection that was never made: TLS was not opened, or the link stops."""
        if not connection.made:
            connection.drop()
            accepted.close()
            self.gone(connection)

    async def _keep_alive(self) -> None:
        await asyncio.sleep(QUIET / 3)
        self._exchanges.check_silence()

    # Tasks

    async def _for_ever(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Do something again and again. A mistake in it must not end the link."""
        while True:
            try:
                await work()
            except Exception as fault:
                self._say(f"a mistake in the link: {type(fault).__name__}: {first_line(fault)}")
                await asyncio.sleep(FAULT_PAUSE)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def _cancel_the_others() -> None:
    """Cancel all tasks but the one that calls."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        if not 0 <= port < 1 << 16:
            raise OSError("there is no such port")
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, UnicodeError) as fault:
        raise TransportError(
            f"cannot listen at {host}:{port}: {getattr(fault, 'strerror', None) or fault}; give another --host or "
            "--port, or stop the process that listens there"
        ) from None
    listener.setblocking(False)
    return listener


def server_tls(keys: ServerKeys) -> ssl.SSLContext:
    """TLS for a server with these keys."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.num_tickets = 0  # a client's connection lasts; tickets would only cost bytes
    context.load_cert_chain(keys.certificate, keys.key)
    return context
