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

from websockets.exceptions import ConnectionClosed, InvalidHandshake
from websockets.sync.client import ClientConnection, connect

from baffle.core.messages import decode
from baffle.errors import AwayError, KeyRefusedError, MessageError, TransportError
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

FIRST_PAUSE, LONGEST_PAUSE = 0.2, 30.0
"""Seconds before the first new attempt to connect, and at most; each pause is up to twice as long as the one before,
until a connection has lasted for longer than the pause."""

OPEN_SECONDS, PING_SECONDS, CLOSE_SECONDS = 10.0, 20.0, 2.0

LEAVE_SECONDS = 0.5
"""How long leaving waits for an attempt to connect. It may go on in the background, and then ends."""

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
        self._connection: ClientConnection | None = None
        self._opened: float | None = None
        self._asked: Request | None = None
        self._asked_on: ClientConnection | None = None  # where the server waits for the answer
        self._answered: tuple[bytes, bytes] = b"", b""  # the newest request that was answered, and the answer
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
            self._answered = request.frame, frame
            connection = self._asked_on
        if connection:
            with suppress(ConnectionClosed):
                connection.send(frame)

    def allow(self, size: int) -> None:
        """Accept requests of at most this many bytes from now on."""
        with self._lock:
            self._limit = size
            if self._connection:
                self._connection.protocol.max_message_size = size + REQUEST_BYTES

    def stop(self) -> None:
        """Say goodbye to the server."""
        self._stopped.set()
        self._inbox.put(None)
        with self._lock:
            connection, opening = self._connection, self._socket
        if connection:
            connection.close(GOODBYE, "the client stops")
        elif opening:
            with suppress(OSError):
                opening.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        pause = FIRST_PAUSE
        while not self._stopped.is_set():
            self._opened = None
            try:
                self._connect_and_listen()
            except AwayError as fault:
                self._say(f"{fault}; trying again")
            except Exception as fault:  # also a mistake of ours, which must not leave the client waiting for ever
                self._inbox.put(fault)
                return
            if self._opened is not None and time.monotonic() - self._opened > pause:
                pause = FIRST_PAUSE
            self._stopped.wait(random.uniform(pause / 2, pause))
            pause = min(2 * pause, LONGEST_PAUSE)

    def _connect_and_listen(self) -> None:
        """Open a connection and take what comes. When it is closed, raise the error that says why."""
        try:
            self._socket = socket.create_connection((self._host, self._port), timeout=OPEN_SECONDS)
            self._require_wanted()
            with connect(
                f"{'wss' if self._tls else 'ws'}://{self._address}{PATH}",
                sock=self._socket,  # so that `stop` can end an attempt, and nobody can send us elsewhere
                ssl=self._tls,
                compression=None,
                open_timeout=OPEN_SECONDS,
                ping_interval=PING_SECONDS,
                ping_timeout=PING_SECONDS,
                close_timeout=CLOSE_SECONDS,
                max_size=HANDSHAKE_BYTES,
                max_queue=2,
                user_agent_header=None,
                proxy=None,
            ) as connection:
                self._shake_hands(connection)
                self._open(connection)
                for frame in connection:
                    self._take(connection, frame)
                raise AwayError(f"{self._address} closed the connection ({connection.close_reason or 'no reason'})")
        except ConnectionClosed as fault:
            raise self._closed(fault) from None
        except (OSError, InvalidHandshake, EOFError, ValueError) as fault:
            raise _error(self._address, fault) from None
        finally:
            with self._lock:
                opening, self._socket, self._connection, self._asked_on = self._socket, None, None, None
            if opening:
                opening.close()

    def _shake_hands(self, connection: ClientConnection) -> None:
        side = ClientSide(self._keys.identity, self._server, self._host, self._process)
        try:
            connection.send(side.greeting())
            proof = side.proof(_binary(connection.recv(OPEN_SECONDS)))
        except MessageError as fault:
            raise TransportError(f"{self._address} is refused: {fault}") from None
        except ConnectionClosed as fault:
            if fault.rcvd and fault.rcvd.code == REFUSED:
                raise TransportError(f"{self._address} refuses this client: {fault.rcvd.reason}") from None
            raise
        with self._lock:  # the first request may come together with the last frame of the handshake
            connection.protocol.max_message_size = self._limit + REQUEST_BYTES
        connection.send(proof)
        try:
            decode(_binary(connection.recv(OPEN_SECONDS)), Accepted)
        except MessageError as fault:
            raise TransportError(f"{self._address} does not keep to the handshake: {fault}") from None
        except ConnectionClosed as fault:
            if fault.rcvd and fault.rcvd.code == REFUSED:
                raise KeyRefusedError(
                    f"{self._address} refuses this client's key: {fault.rcvd.reason}; expected keys from the same "
                    "`baffle keys` as the server's"
                ) from None
            raise

    def _open(self, connection: ClientConnection) -> None:
        with self._lock:
            connection.protocol.max_message_size = self._limit + REQUEST_BYTES
            self._connection = connection
        self._opened = time.monotonic()
        self._require_wanted()
        self._say(f"connected to {self._address}")

    def _require_wanted(self) -> None:
        if self._stopped.is_set():
            raise AwayError("the client stops")

    def _take(self, connection: ClientConnection, frame: str | bytes) -> None:
        """Take a request: a new one is handed out, one that was answered gets the same answer again, and one that is
        being worked on is answered when the work is done."""
        try:
            request = read_request(self._server, self._own, _binary(frame))
        except MessageError as fault:
            raise AwayError(f"{self._address} sent {fault}") from None
        with self._lock:
            answered, answer = self._answered
            is_new = request.frame != answered and (self._asked is None or request.frame != self._asked.frame)
            if is_new:
                self._asked = request
            self._asked_on = connection
        if request.frame == answered:
            connection.send(answer)
        elif is_new:
            self._inbox.put(request)

    def _closed(self, fault: ConnectionClosed) -> TransportError:
        """Our error for a connection that the server has closed, or that broke."""
        if fault.rcvd and fault.rcvd.code == REPLACED:
            return TransportError(
                "another process has connected with this client's key; two must never share a key: stop one of them"
            )
        reason = fault.rcvd.reason or f"code {fault.rcvd.code}" if fault.rcvd else "the line broke"
        return AwayError(f"{self._address} closed the connection ({reason})")

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


def _binary(frame: str | bytes) -> bytes:
    if isinstance(frame, str):
        raise MessageError("a text frame, expected a binary one")
    return frame


def _error(address: str, fault: Exception) -> TransportError:
    """Our error for a connection that could not be opened."""
    if isinstance(fault, ssl.SSLCertVerificationError):
        return TransportError(
            f"the certificate of {address} was not issued by this client's CA, or is for another address "
            f"({fault.verify_message})"
        )
    if isinstance(fault, InvalidHandshake) or (isinstance(fault, ValueError) and not isinstance(fault, UnicodeError)):
        return AwayError(f"{address} does not answer as a BAFFLE server ({fault})")
    if isinstance(fault, ssl.SSLError):
        return AwayError(f"{address} does not answer with TLS ({fault.reason or fault})")
    why = getattr(fault, "strerror", None) or fault or "no answer in time"
    return AwayError(f"{address} cannot be reached ({why})")
