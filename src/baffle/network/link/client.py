"""The client's end of the link: it keeps one connection to the server open, hands out what the server asks, and sends
the answers. If the line breaks it is opened again, also while the client computes."""

import random
import re
import secrets
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from queue import SimpleQueue
from threading import Event, Lock, Thread
from types import TracebackType

from websockets.exceptions import InvalidHandshake

from baffle.core.messages import decode
from baffle.errors import AwayError, KeyRefusedError, MessageError, TransportError, UnprovedError
from baffle.network.keys import ClientKeys
from baffle.network.link.envelope import REQUEST_BYTES, Request, read_request, reply
from baffle.network.link.handshake import (
    GOODBYE,
    HANDSHAKE_BYTES,
    PATH,
    REFUSED,
    REPLACED,
    Accepted,
    ClientSide,
)
from baffle.network.link.limits import PLAN_BYTES
from baffle.network.link.websocket import ClosedError, Websocket

FIRST_PAUSE, LONGEST_PAUSE = 0.2, 30.0
"""Seconds before the first new attempt to connect, and at most; each pause is up to twice as long as the one before,
until a connection has lasted for longer than the pause."""

OPEN_SECONDS = 10.0
"""How long opening a connection may take, and each step of the handshake."""

LEAVE_SECONDS = 0.5
"""How long leaving waits for an attempt to connect. It may go on in the background, and then ends."""

DELIVER_SECONDS = 2.0
"""How long a client that leaves in peace waits until the server has its last answer, if need be over another line."""

_NAME, _IPV6 = re.compile(r"[A-Za-z0-9._-]{1,253}"), re.compile(r"\[[0-9A-Fa-f:.]{2,45}\]")


class Line:
    """A client's connection to the server at `address` (host:port). Without `tls` it is not encrypted. `tell` takes
    lines about what happens to the connection."""

    def __init__(self, address: str, keys: ClientKeys, tls: ssl.SSLContext | None, tell: Callable[[str], None]) -> None:
        self._address, self._keys, self._tls, self._tell = address, keys, tls, tell
        self._host, self._port = split(address)
        self._server = keys.roster.server_key
        self._own = keys.identity.public_key().public_bytes_raw()
        self._process = secrets.token_bytes(16)
        self._limit = PLAN_BYTES
        self._lock = Lock()
        self._socket: socket.socket | None = None
        self._connection: Websocket | None = None
        self._opened: float | None = None
        self._has_met = False  # whether the server has ever accepted this client
        self._asked: Request | None = None
        self._asked_on: Websocket | None = None  # where the server waits for the answer
        self._answered = b"", b""  # the hash of the newest request that was answered, and the answer
        self._delivered = Event()  # whether the server has that answer, as far as a client that leaves must know
        self._delivered.set()
        self._leaving = False
        self._inbox: SimpleQueue[Request | BaseException | None] = SimpleQueue()
        self._stopped = Event()
        self._said = ""
        self._thread = Thread(target=self._run, name="line", daemon=True)

    def __enter__(self) -> "Line":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and not self._stopped.is_set():
            self._deliver()
        self.stop()
        self._thread.join(LEAVE_SECONDS)

    def requests(self) -> Iterator[Request]:
        """What the server asks, until `stop` is called. Raises the error if the server can't be talked to at all."""
        while True:
            item = self._inbox.get()
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            if item is self._asked:  # the server no longer waits for answers to older ones
                yield item

    def reply(self, request: Request, body: bytes) -> None:
        """Answer a request. If its line is broken, the answer is sent when the server asks again. If the server has
        asked something else meanwhile, it no longer waits for the answer."""
        frame = reply(self._keys.identity, self._server, request, body)
        with self._lock:
            if request is not self._asked:
                return
            self._answered = request.hash(), frame
            self._delivered.clear()
            connection = self._asked_on
        if connection:
            with suppress(ClosedError, OSError):
                connection.send(frame)

    def allow(self, size: int) -> None:
        """Accept requests of at most this many bytes from now on."""
        with self._lock:
            self._limit = size
            if self._connection:
                self._connection.allow(size + REQUEST_BYTES)

    def stop(self) -> None:
        """Say goodbye to the server."""
        self._stopped.set()
        self._delivered.set()
        self._inbox.put(None)
        with self._lock:
            connection, opening = self._connection, self._socket
        if connection:
            connection.close(GOODBYE, "the client stops")
        elif opening:
            with suppress(OSError):
                opening.shutdown(socket.SHUT_RDWR)

    def _deliver(self) -> None:
        """Wait until the server has the last answer. What was sent over a line that had just broken is lost, without an
        error: so ask the server for a receipt. If none comes over this line, the server asks again over the next."""
        with self._lock:
            self._leaving = True
            connection = self._asked_on
        if connection and not self._delivered.is_set():
            connection.confirm(self._delivered.set)
        self._delivered.wait(DELIVER_SECONDS)

    def _run(self) -> None:
        pause = FIRST_PAUSE
        while not self._stopped.is_set():
            self._opened = None
            try:
                self._connect_and_listen()
            except Exception as fault:  # also a mistake of ours, which must not leave the client waiting for ever
                if not self._is_to_try_again(fault):
                    self._delivered.set()
                    self._inbox.put(fault)
                    return
                self._say(f"{fault}; trying again")
            if self._opened is not None and time.monotonic() - self._opened > pause:
                pause = FIRST_PAUSE
            self._stopped.wait(random.uniform(pause / 2, pause))
            pause = min(2 * pause, LONGEST_PAUSE)

    def _is_to_try_again(self, fault: Exception) -> bool:
        """Whoever starts a client should know if the other end is not its server. But once it has met its server,
        somebody who stands in the server's place for a while must not end it."""
        return isinstance(fault, AwayError) or (isinstance(fault, UnprovedError) and self._has_met)

    def _connect_and_listen(self) -> None:
        """Open a connection and take what comes. When it is closed, raise the error that says why."""
        try:
            connection = self._connected()
            self._shake_hands(connection)
            self._open(connection)
            while True:
                self._take(connection, connection.receive())
        except ClosedError as fault:
            raise self._closed(fault) from None
        except MessageError as fault:
            raise AwayError(f"{self._address} sent {fault}") from None
        except (OSError, InvalidHandshake, EOFError, ValueError) as fault:
            raise _error(self._address, fault) from None
        finally:
            with self._lock:
                opening, self._socket, self._connection, self._asked_on = self._socket, None, None, None
            if opening:
                opening.close()

    def _connected(self) -> Websocket:
        self._socket = socket.create_connection((self._host, self._port), timeout=OPEN_SECONDS)
        self._require_wanted()
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._tls:
            self._socket = self._tls.wrap_socket(self._socket, server_hostname=self._host)
        return Websocket(self._socket, self._host, self._port, PATH, HANDSHAKE_BYTES, OPEN_SECONDS)

    def _shake_hands(self, connection: Websocket) -> None:
        side = ClientSide(self._keys.identity, self._server, self._host, self._process)
        try:
            connection.send(side.greeting())
            proof = side.proof(connection.receive(OPEN_SECONDS))
        except MessageError as fault:
            raise UnprovedError(f"{self._address} is refused: {fault}") from None
        except ClosedError as fault:
            if fault.code == REFUSED:
                raise UnprovedError(f"{self._address} refuses this client: {fault.reason}") from None
            raise
        with self._lock:  # the first request may come together with the last frame of the handshake
            connection.allow(self._limit + REQUEST_BYTES)
        connection.send(proof)
        try:
            decode(connection.receive(OPEN_SECONDS), Accepted)
        except MessageError as fault:
            raise UnprovedError(f"{self._address} does not keep to the handshake: {fault}") from None
        except ClosedError as fault:
            if fault.code == REFUSED:
                raise KeyRefusedError(
                    f"{self._address} refuses this client's key: {fault.reason}; expected keys from the same "
                    "`baffle keys` as the server's"
                ) from None
            raise

    def _open(self, connection: Websocket) -> None:
        with self._lock:
            connection.allow(self._limit + REQUEST_BYTES)
            self._connection = connection
        self._opened, self._has_met = time.monotonic(), True
        self._require_wanted()
        self._say(f"connected to {self._address}")

    def _require_wanted(self) -> None:
        if self._stopped.is_set():
            raise AwayError("the client stops")

    def _take(self, connection: Websocket, frame: bytes) -> None:
        """Take a request: a new one is handed out, one that was answered gets the same answer again, and one that is
        being worked on is answered when the work is done."""
        request = read_request(self._server, self._own, frame)
        name = request.hash()
        with self._lock:
            answered, answer = self._answered
            is_new = name != answered and (self._asked is None or name != self._asked.hash())
            if is_new:
                self._asked = request
            self._asked_on = connection
        if name == answered:
            connection.send(answer)
            if self._leaving:
                connection.confirm(self._delivered.set)
        elif is_new:
            self._inbox.put(request)

    def _closed(self, fault: ClosedError) -> TransportError:
        """Our error for a connection that the server has closed, or that broke."""
        if fault.code == REPLACED:
            return TransportError(
                "another process has connected with this client's key; two must never share a key: stop one of them"
            )
        if fault.code == REFUSED:
            return KeyRefusedError(f"{self._address} refuses this client's key: {fault.reason}")
        if fault.code:
            self._delivered.set()  # a server that says goodbye waits for nothing
        return AwayError(f"{self._address} closed the connection ({fault.reason})")

    def _say(self, words: str) -> None:
        """Tell about a change once, however often it is found again."""
        if words != self._said and not self._stopped.is_set():
            self._said = words
            self._tell(words)


def client_tls(keys: ClientKeys) -> ssl.SSLContext:
    """TLS for a client that trusts its own CA alone."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=keys.ca.decode())
    return context


def split(address: str) -> tuple[str, int]:
    """Host and port of an address."""
    host, _, port = address.rpartition(":")
    is_host = _NAME.fullmatch(host) or _IPV6.fullmatch(host)
    if not is_host or not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 1 << 16:
        raise TransportError(f"expected an address as host:port or [IPv6]:port, got {address!r}")
    return host.strip("[]").lower(), int(port)


def _error(address: str, fault: Exception) -> TransportError:
    """Our error for a connection that could not be opened."""
    if isinstance(fault, ssl.SSLCertVerificationError):
        return UnprovedError(
            f"the certificate of {address} was not issued by this client's CA, or is for another address "
            f"({fault.verify_message})"
        )
    if isinstance(fault, InvalidHandshake) or (isinstance(fault, ValueError) and not isinstance(fault, UnicodeError)):
        return AwayError(f"{address} does not answer as a BAFFLE server ({fault})")
    if isinstance(fault, ssl.SSLError):
        return AwayError(f"{address} does not answer with TLS ({fault.reason or fault})")
    why = getattr(fault, "strerror", None) or fault or "no answer in time"
    return AwayError(f"{address} cannot be reached ({why})")
