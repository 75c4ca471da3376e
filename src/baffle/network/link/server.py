"""The server's end of the link: one port, over which it carries requests to the connected clients and their replies
back.

The network lives on a thread of its own, so connections stay alive while the server computes. `Link` is called from
other threads; everything in `Port`, and everything that it calls, runs on the link's thread. exchanges.py decides how
long a client is waited for. A mistake in anything that happens on that thread is logged and survived.
"""

import asyncio
import socket
import ssl
import time
from asyncio import sslproto
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import CancelledError, Future, wait
from contextlib import suppress
from errno import ECONNABORTED
from threading import Thread
from typing import Any, TypeVar

from websockets.http11 import Request as PageRequest, Response

from baffle.core.messages import first_number, tag_of
from baffle.errors import TransportError, first_line
from baffle.network.joining import Reply
from baffle.network.keys.authority import ServerKeys
from baffle.network.keys.rosters import Roster
from baffle.network.link import door
from baffle.network.link.connection import CLOSE_SECONDS, Connection
from baffle.network.link.door import Door, origin
from baffle.network.link.envelope import Request, ask
from baffle.network.link.exchanges import QUIET, Exchanges
from baffle.network.link.handshake import GOODBYE, ServerSide
from baffle.network.status import NOT_FOUND, LinkCounts, Pages

BACKLOG = 1024
REFUSAL_PAUSE = 0.001  # seconds until the next connection is accepted after one was turned away
FAULT_PAUSE = 1.0  # seconds until another try after an error of the system, for example too many open files
CHECK_SECONDS = 1.0  # how often a waiting caller checks that the link's thread is alive
MOST_MISTAKES = 100  # how many different mistakes are logged
sslproto.SSLProtocol.max_size = 16 * 1024
# asyncio gives every TLS connection a buffer of 256 kB, which is a quarter of a gigabyte for a thousand clients.

T = TypeVar("T")


class Link:
    """Listens at an address, with TLS if `tls` is given. `seconds` is an exchange's deadline, by `clock`."""

    def __init__(
        self,
        keys: ServerKeys,
        host: str,
        port: int,
        tls: ssl.SSLContext | None,
        seconds: float,
        pages: Pages | None = None,
        tell: Callable[[str], None] = lambda _words: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._identity, self._directory, self._tell = keys.identity, keys.roster.directory(), tell
        self._exchanges = Exchanges(keys.roster, seconds, self._say)
        listener = listen(host, port)
        self.port: int = listener.getsockname()[1]
        self._loop = _Loop(clock)
        self._loop.set_exception_handler(self._note_mistake)
        self._port = Port(self._loop, listener, tls, keys, pages or Pages(""), self._exchanges, self._say)
        self._stopping = False
        self._mistakes: set[str] = set()
        self._thread = Thread(target=self._run, name="link", daemon=True)

    def __enter__(self) -> "Link":
        self._thread.start()
        return self

    def __exit__(self, *_fault: object) -> None:
        with suppress(TransportError):
            self._call(self._port.stop(), 2 * CLOSE_SECONDS)
        self._stopping = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()

    @property
    def counts(self) -> Counter[str]:
        return self._exchanges.counts

    def present(self) -> Mapping[int, bytes]:
        return self._do(self._exchanges.present)

    def carry(self, requests: Mapping[int, bytes], run: bytes, *, patient: bool = False) -> Mapping[int, bytes]:
        signed = {client: self._signed(client, body, run) for client, body in requests.items()}
        replies = self._call(self._exchanges.carry(signed, patient=patient))
        return {client: replies[client] for client in requests if client in replies}

    def post(self, requests: Mapping[int, bytes], run: bytes) -> Mapping[int, Reply]:
        async def answer(client: int, request: Request) -> bytes | None:
            return (await self._exchanges.carry({client: request})).get(client)

        signed = {client: self._signed(client, body, run) for client, body in requests.items()}
        return {client: self._submit(answer(client, request)) for client, request in signed.items()}

    def _signed(self, client: int, body: bytes, run: bytes) -> Request:
        return ask(self._identity, self._directory[client], run, first_number(body), tag_of(body), body)

    def admit(self, roster: Roster) -> None:
        self._do(lambda: self._port.admit(roster))
        self._directory = roster.directory()

    def expect(self, contribution: int) -> None:
        self._exchanges.contribution = contribution

    # The thread

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._loop.run_forever()
            except BaseException as fault:
                self._note_mistake(self._loop, {"exception": fault})

    def _do(self, work: Callable[[], T]) -> T:
        async def call() -> T:
            return work()

        return self._call(call())

    def _call(self, work: Coroutine[Any, Any, T], seconds: float = float("inf")) -> T:
        """Run a coroutine on the link's thread, and wait for its result."""
        future, end = self._submit(work), time.monotonic() + seconds
        try:
            while not wait([future], CHECK_SECONDS).done:
                if time.monotonic() > end or not self._thread.is_alive():
                    raise TransportError("the link's thread does not answer")
            return future.result()
        except CancelledError:
            raise TransportError("the link was closed while clients were asked") from None
        except BaseException:
            future.cancel()  # the caller was interrupted and no longer waits
            raise

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:
            work.close()
            raise TransportError("the link is closed; no client can be asked any more") from None

    def _say(self, words: str) -> None:
        """Log something. If the log cannot be written, the link still goes on."""
        with suppress(BaseException):
            self._tell(words)

    def _note_mistake(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log each mistake once, so that a stranger who knows how to cause it cannot fill the log."""
        fault = context.get("exception")
        what = f"{type(fault).__name__}: {first_line(fault)}" if fault else context["message"]
        if what not in self._mistakes and len(self._mistakes) < MOST_MISTAKES:
            self._mistakes.add(what)
            self._say(f"a mistake in the link: {what}")


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        super().__init__()

    def time(self) -> float:
        return self._clock()


class Port:
    """All connections to a listening socket. The door limits unauthenticated ones; clients talk to `exchanges`."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
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
        self._loop = loop
        self.door = Door(0, loop.time, behind_proxy=tls is None)
        self.admit(keys.roster)
        self._handshakes: dict[Connection, ServerSide] = {}
        self._all: dict[Connection, asyncio.Task[None]] = {}  # each with the task that opened it
        self._closing: dict[int, Connection] = {}  # client → its connection that has ended and is not closed yet
        self._pause = loop.call_soon(self._listen)
        self._check = loop.call_soon(self._keep_alive)

    def admit(self, roster: Roster) -> None:
        self._clients.clear()
        self._clients.update({key: number for number, key in roster.directory().items()})
        self.door.clients = len(self._clients)
        self._exchanges.admit(roster)

    async def stop(self) -> None:
        self._pause.cancel()
        self._check.cancel()
        self._loop.remove_reader(self._listener)
        self._listener.close()
        await _cancel_other_tasks()
        for connection in list(self._all):
            connection.close(GOODBYE, "the server stops")
        end = self._loop.time() + CLOSE_SECONDS
        while self._all and self._loop.time() < end:
            await asyncio.sleep(0.01)
        for connection in list(self._all):
            connection.drop()
        while self._all:
            await asyncio.sleep(0)
        await _cancel_other_tasks()

    # What connections report

    def page(self, connection: Connection, request: PageRequest) -> Response:
        """The answer to a request that opens no websocket."""
        connections, counts = tuple(sorted(self._exchanges.connections)), self._exchanges.counts
        late, refused, received, sent = (counts[name] for name in ("late", "refused", "received bytes", "sent bytes"))
        links = LinkCounts(connections, late, refused, self.door.turned_away, received, sent)
        response = self._pages.answer(request, links)
        connection.served = response is not NOT_FOUND
        return response

    def received(self, connection: Connection, frame: bytes) -> None:
        """Take a frame. A MessageError closes the connection."""
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
        """The other end broke a rule, and the connection is about to be closed."""
        if connection.client is not None:
            self._exchanges.note_refused(connection.client, why)

    def lost(self, connection: Connection) -> None:
        """The connection has ended: nothing more is received or sent. Called once."""
        self._handshakes.pop(connection, None)
        if connection.client is None:
            return
        if older := self._closing.pop(connection.client, None):
            older.drop()  # a client that comes and goes must not collect sockets
        self._closing[connection.client] = connection
        self._exchanges.lost(connection, connection.client)

    def gone(self, connection: Connection) -> None:
        """The socket is closed, too. Called once, if the connection was made."""
        self._all.pop(connection, None)
        if connection.client is None:
            self.door.leave(connection, failed=not connection.served)
            return
        self.door.part(connection.address)
        if self._closing.get(connection.client) is connection:
            del self._closing[connection.client]

    # The listening socket

    def _listen(self) -> None:
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        """Accept one connection. If it is turned away, pause; also after an error, whatever it is."""
        pause = FAULT_PAUSE
        try:
            pause = self._accept_one()
        finally:
            if pause:
                self._loop.remove_reader(self._listener)
                self._pause = self._loop.call_later(pause, self._listen)

    def _accept_one(self) -> float:
        """Let a connection in or turn it away. Returns the seconds until the next one may come."""
        try:
            accepted, address = self._listener.accept()
            accepted.setblocking(False)
        except BlockingIOError:
            return 0.0
        except OSError as fault:
            if fault.errno == ECONNABORTED:
                return 0.0
            self._say(f"a connection cannot be accepted: {fault.strerror or fault}")
            return FAULT_PAUSE
        if not self.door.admits(origin(address[0])):
            accepted.close()
            return REFUSAL_PAUSE
        connection = Connection(self, origin(address[0]), accepted)
        self.door.enter(connection)
        opening = self._loop.create_task(self._open(connection, accepted))
        opening.add_done_callback(lambda _task: self._close_unmade(connection, accepted))
        self._all[connection] = opening
        return 0.0

    async def _open(self, connection: Connection, accepted: socket.socket) -> None:
        """Open a connection. One that is never made, because TLS was not opened or the link stops, is forgotten."""
        tls = {"ssl_handshake_timeout": door.SECONDS, "ssl_shutdown_timeout": CLOSE_SECONDS} if self._tls else {}
        with suppress(OSError, EOFError):  # TLS errors are OSErrors
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._loop.connect_accepted_socket(lambda: connection, accepted, ssl=self._tls, **tls)

    def _close_unmade(self, connection: Connection, accepted: socket.socket) -> None:
        if not connection.made:
            connection.drop()
            accepted.close()
            self.gone(connection)

    def _keep_alive(self) -> None:
        self._check = self._loop.call_later(QUIET / 3, self._keep_alive)
        self._exchanges.check_silence()


async def _cancel_other_tasks() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def listen(host: str, port: int) -> socket.socket:
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
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.num_tickets = 0  # a client's connection lasts; tickets would only cost bytes
    context.load_cert_chain(keys.certificate, keys.key)
    return context
