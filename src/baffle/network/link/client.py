"""The client's end of the link: it keeps one connection to the server open, hands out the server's requests, and sends
the replies. A connection that breaks is opened again, also while the client computes."""

import random
import re
import secrets
import socket
import ssl
from collections.abc import Iterator
from contextlib import suppress
from queue import SimpleQueue
from threading import Event, Lock, Thread

from websockets.exceptions import InvalidHandshake

from baffle.client.abstaining import Tell
from baffle.core.messages import decode
from baffle.errors import AwayError, KeyRefusedError, MessageError, TransportError, UnprovedError
from baffle.network.clock import Clock
from baffle.network.keys.folders import ClientKeys, OperatorKeys
from baffle.network.link.envelope import PLAN_BYTES, REQUEST_BYTES, Request, read_request, reply
from baffle.network.link.handshake import GOODBYE, HANDSHAKE_BYTES, PATH, REFUSED, REPLACED, Accepted, ClientSide
from baffle.network.link.websocket import ClosedError, Websocket

FIRST_PAUSE, LONGEST_PAUSE = 0.2, 30.0  # seconds before the first new attempt to connect, and at most
OPEN_SECONDS = 10.0  # time limit for opening a connection, and for each step of the handshake
LEAVE_SECONDS = 0.5  # how long a client that leaves waits for an attempt to connect, which may end in the background
DELIVER_SECONDS = 2.0  # how long a client that leaves without an error waits until the server has its last reply

_NAME, _IPV6 = re.compile(r"[A-Za-z0-9._-]{1,253}"), re.compile(r"\[[0-9A-Fa-f:.]{2,45}\]")


class Line:
    """A client's connection to the server at `address` (host:port), not encrypted without `tls`. `tell` is its log."""

    def __init__(
        self, address: str, keys: ClientKeys, tls: ssl.SSLContext | None, tell: Tell, clock: Clock | None = None
    ) -> None:
        self._address, self._keys, self._tls, self._tell, self._clock = address, keys, tls, tell, clock or Clock()
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
        self._asked_on: Websocket | None = None  # where the server waits for the reply
        self._answered = b"", b""  # the hash of the newest request that has a reply, and the reply
        self._delivered = Event()  # whether the server has that reply, as far as a client that leaves must know
        self._delivered.set()
        self._leaving = False
        self._inbox: SimpleQueue[Request | BaseException | None] = SimpleQueue()
        self._stopped = Event()
        self._said = ""
        self._thread = Thread(target=self._run, name="line", daemon=True)

    def __enter__(self) -> "Line":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_fault: object) -> None:
        if kind is None and not self._stopped.is_set():
            self._deliver()
        self.stop()
        self._thread.join(LEAVE_SECONDS)

    def requests(self) -> Iterator[Request]:
        """The server's requests, until `stop` is called. Raises the error that makes it pointless to try again."""
        while True:
            item = self._inbox.get()
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            if item is self._asked:  # the server no longer waits for replies to older ones
                yield item

    def reply(self, request: Request, body: bytes) -> None:
        """Reply to a request. If its connection is broken, the reply is sent when the server asks again. If the server
        has asked something else meanwhile, nothing is sent."""
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
        with self._lock:
            self._limit = size
            if self._connection:
                self._connection.allow(size + REQUEST_BYTES)

    def stop(self) -> None:
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
        """Wait until the server has the last reply. A reply sent over a connection that has just broken is lost without
        an error, so ask the server for a receipt. If none comes, the server asks again over the next connection."""
        with self._lock:
            self._leaving = True
            connection = self._asked_on
        if connection and not self._delivered.is_set():
            connection.confirm(self._delivered.set)
        self._clock.wait(self._delivered, DELIVER_SECONDS)

    def _run(self) -> None:
        """Connect again and again, with pauses that double until a connection has lasted for longer than the pause. An
        impostor in the server's place ends a client that starts, but not one that has met its server."""
        pause = FIRST_PAUSE
        while not self._stopped.is_set():
            self._opened = None
            try:
                self._connect_and_listen()
            except Exception as fault:  # also a mistake of ours, which must not leave the client waiting for ever
                if not isinstance(fault, AwayError) and not (isinstance(fault, UnprovedError) and self._has_met):
                    self._delivered.set()
                    self._inbox.put(fault)
                    return
                self._say(f"{fault}; trying again")
            if self._opened is not None and self._clock.now() - self._opened > pause:
                pause = FIRST_PAUSE
            self._clock.wait(self._stopped, random.uniform(pause / 2, pause))
            pause = min(2 * pause, LONGEST_PAUSE)

    def _connect_and_listen(self) -> None:
        """Open a connection and take its requests. When it is closed, raise the error that says why."""
        try:
            connection = self._connected()
            self._shake_hands(connection)
            with self._lock:
                connection.allow(self._limit + REQUEST_BYTES)
                self._connection = connection
            self._opened, self._has_met = self._clock.now(), True
            self._require_wanted()
            self._say(f"connected to {self._address}")
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
                hint = "expected keys from the same `baffle keys` as the server's"
                raise KeyRefusedError(f"{self._address} refuses this client's key: {fault.reason}; {hint}") from None
            raise

    def _require_wanted(self) -> None:
        if self._stopped.is_set():
            raise AwayError("the client stops")

    def _take(self, connection: Websocket, frame: bytes) -> None:
        """Take a request. A new one is handed out, one that has a reply gets the same reply again, and one that is
        being worked on gets its reply when the work is done."""
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
        if fault.code == REPLACED:
            return TransportError(
                "another process has connected with this client's key; two must never share a key: stop one of them"
            )
        if fault.code == REFUSED:
            return KeyRefusedError(f"{self._address} refuses this client's key: {fault.reason}")
        if fault.code:
            self._delivered.set()  # a server that closes the connection waits for no reply
        return AwayError(f"{self._address} closed the connection ({fault.reason})")

    def _say(self, words: str) -> None:
        """Log a change once, however often it is found again."""
        if words != self._said and not self._stopped.is_set():
            self._said = words
            self._tell(words)


def client_tls(keys: ClientKeys | OperatorKeys) -> ssl.SSLContext:
    """TLS for a client that trusts its own CA alone, and checks the host's name."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=keys.ca.decode())
    return context


def split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    is_host = _NAME.fullmatch(host) or _IPV6.fullmatch(host)
    if not is_host or not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 1 << 16:
        raise TransportError(f"expected an address as host:port or [IPv6]:port, got {address!r}")
    return host.strip("[]").lower(), int(port)


def _error(address: str, fault: Exception) -> TransportError:
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
