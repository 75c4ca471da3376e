"""A link and lines over loopback, with real keys: clients that answer, clients that misbehave, and a wire that can be
cut."""

import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from types import TracebackType

from websockets.sync.client import ClientConnection, connect

from baffle.core.messages import CatchUp, RoundRequest, encode
from baffle.network.authority import ServerKeys, make_keys
from baffle.network.keys import ClientKeys
from baffle.network.link.client import Line, client_tls
from baffle.network.link.envelope import Request, read_request, reply
from baffle.network.link.handshake import PATH, ClientSide
from baffle.network.link.server import Link, server_tls

RUN = bytes(range(32))
HOST = "127.0.0.1"
PATIENCE = 30.0
"""Seconds to wait for anything on a busy machine."""


@dataclass(frozen=True)
class Keys:
    server: ServerKeys
    clients: list[ClientKeys]


def new_keys(folder: Path, clients: int) -> Keys:
    make_keys(folder, clients, ["localhost", HOST])
    return Keys(
        ServerKeys.load(folder / "server"), [ClientKeys.load(folder / f"client-{number}") for number in range(clients)]
    )


def until(condition: Callable[[], object], seconds: float = PATIENCE) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def question(number: int, size: int = 0) -> bytes:
    """The request of a round, with this many bytes of weights in it."""
    catch_up = CatchUp("weights", 0, (bytes(size),))
    return encode(RoundRequest(number, bytes(32), bytes(32), bytes(32), catch_up))


def answer_to(body: bytes) -> bytes:
    """What an honest client answers in these tests."""
    return b"answer to " + body[:200]


@dataclass
class Linked:
    """A link and what it told."""

    link: Link
    keys: Keys
    told: list[str]

    @property
    def address(self) -> str:
        return f"{HOST}:{self.link.port}"

    def ask(self, *clients: int, number: int = 0, size: int = 0) -> dict[int, bytes]:
        return dict(self.link.carry(dict.fromkeys(clients, question(number, size)), RUN))

    def until_present(self, *clients: int) -> None:
        until(lambda: set(clients) <= set(self.link.present()))


@contextmanager
def linked(keys: Keys, *, seconds: float = PATIENCE, tls: bool = True, port: int = 0) -> Iterator[Linked]:
    """A link at a free port. `seconds` is the deadline of its exchanges."""
    told: list[str] = []
    context = server_tls(keys.server) if tls else None
    with Link(keys.server, HOST, port, context, seconds, tell=told.append) as link:
        yield Linked(link, keys, told)


class Client:
    """A client on a thread, which answers each request with `answer`."""

    def __init__(
        self, address: str, keys: ClientKeys, *, tls: bool = True, answer: Callable[[bytes], bytes] = answer_to
    ) -> None:
        self.told: list[str] = []
        self.asked: list[Request] = []
        self.fault: BaseException | None = None
        self._answer = answer
        self.line = Line(address, keys, client_tls(keys) if tls else None, self.told.append)
        self._thread = Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Client":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    def leave(self) -> None:
        self.line.stop()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            with self.line as line:
                for request in line.requests():
                    self.asked.append(request)
                    line.reply(request, self._answer(request.body))
        except BaseException as fault:
            self.fault = fault


@dataclass
class Peer:
    """A client that keeps to the handshake, and then does whatever the test wants."""

    connection: ClientConnection
    keys: ClientKeys

    def request(self, seconds: float = PATIENCE) -> Request:
        frame = self.connection.recv(seconds)
        assert isinstance(frame, bytes)
        return read_request(self.keys.roster.server_key, self.own, frame)

    def reply(self, request: Request, body: bytes) -> bytes:
        """A signed reply. The test sends it."""
        return reply(self.keys.identity, self.keys.roster.server_key, request, body)

    @property
    def own(self) -> bytes:
        return self.keys.identity.public_key().public_bytes_raw()


@contextmanager
def opened(address: str, keys: ClientKeys, *, tls: bool = True) -> Iterator[ClientConnection]:
    """A websocket to a link, before the handshake."""
    with connect(
        f"{'wss' if tls else 'ws'}://{address}{PATH}",
        ssl=client_tls(keys) if tls else None,
        compression=None,
        proxy=None,
        max_size=None,
        ping_interval=None,
        close_timeout=1,
    ) as connection:
        yield connection


@contextmanager
def proved(address: str, keys: ClientKeys, *, tls: bool = True, process: bytes = bytes(16)) -> Iterator[Peer]:
    """A client that has proved who it is."""
    with opened(address, keys, tls=tls) as connection:
        side = ClientSide(keys.identity, keys.roster.server_key, HOST, process)
        connection.send(side.greeting())
        connection.send(side.proof(connection.recv(PATIENCE, decode=False)))
        connection.recv(PATIENCE)
        yield Peer(connection, keys)


def dial(address: str, tls: ssl.SSLContext | None = None, source: str = HOST) -> socket.socket:
    """A plain or TLS socket to an address, from an address of our own."""
    host, _, port = address.rpartition(":")
    plain = socket.create_connection((host, int(port)), timeout=PATIENCE, source_address=(source, 0))
    if tls is None:
        return plain
    try:
        return tls.wrap_socket(plain, server_hostname=HOST)
    except BaseException:
        plain.close()
        raise


def is_closed(connection: socket.socket, seconds: float = PATIENCE) -> bool:
    """Whether the other end closes a connection in time. What it says before is read."""
    connection.settimeout(seconds)
    try:
        while connection.recv(65536):
            pass
    except TimeoutError:
        return False
    except OSError:  # reset, or TLS ended without a goodbye
        return True
    return True


@dataclass
class _Pipe:
    """One direction of a wire: what was sent, how much of it has passed, and where it is to be cut."""

    sent: bytearray = field(default_factory=bytearray)
    passed: bytearray = field(default_factory=bytearray)
    most: int | None = None


class Wire:
    """A relay between lines and a link: it records what passes, and can be cut or held."""

    def __init__(self, address: str) -> None:
        self._to = address
        self._listener = socket.create_server((HOST, 0))
        self.address = f"{HOST}:{self._listener.getsockname()[1]}"
        self.connections = 0
        self.to_client: list[_Pipe] = []
        self.to_server: list[_Pipe] = []
        self._sockets: list[socket.socket] = []
        self._flowing = Event()
        self._flowing.set()
        self._threads = [Thread(target=self._accept, daemon=True)]
        self._closed = False

    def __enter__(self) -> "Wire":
        self._threads[0].start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        self._flowing.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join(PATIENCE)

    def cut(self) -> None:
        """Break every connection."""
        for end in self._sockets:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def hold(self) -> None:
        """Let nothing pass until `release`; nobody is told."""
        self._flowing.clear()

    def release(self) -> None:
        self._flowing.set()

    def cut_after(self, pipes: list[_Pipe], more: int) -> None:
        """Break the newest connection when this many more bytes have passed in a direction."""
        pipes[-1].most = len(pipes[-1].passed) + more

    def _accept(self) -> None:
        while not self._closed:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = dial(self._to)
            except OSError:  # the server is away
                near.close()
                continue
            self.connections += 1
            self._sockets += [near, far]
            near.settimeout(None)
            far.settimeout(None)
            down, up = _Pipe(), _Pipe()
            self.to_client.append(down)
            self.to_server.append(up)
            flows = [
                Thread(target=self._flow, args=(far, near, down), daemon=True),
                Thread(target=self._flow, args=(near, far, up), daemon=True),
            ]
            self._threads += flows
            for flow in flows:
                flow.start()

    def _flow(self, source: socket.socket, sink: socket.socket, pipe: _Pipe) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                pipe.sent += data
                self._flowing.wait()
                if pipe.most is not None:
                    data = data[: max(0, pipe.most - len(pipe.passed))]
                sink.sendall(data)
                pipe.passed += data
                if pipe.most is not None and len(pipe.passed) >= pipe.most:
                    break
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        source.close()
