"""A link and its clients over loopback, with real keys: a clock that tests turn, clients that answer, clients that
misbehave, a wire that can be cut, and plain HTTP requests."""

import socket
import ssl
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Event, Thread

from websockets.sync.client import ClientConnection, connect

from baffle.core.messages import CatchUp, RoundRequest, encode
from baffle.network.clock import Clock
from baffle.network.keys.authority import ServerKeys, make_keys
from baffle.network.keys.folders import ClientKeys
from baffle.network.link import client
from baffle.network.link.client import Line, client_tls
from baffle.network.link.envelope import Request, read_request, reply
from baffle.network.link.handshake import PATH, ClientSide
from baffle.network.link.server import Link, server_tls
from baffle.network.server.board import Board
from baffle.network.status import Pages

UPGRADE = (
    b"GET /link HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
RUN = bytes(range(32))
HOST = "127.0.0.1"
PATIENCE = 30.0  # seconds to wait for anything on a busy machine


@dataclass(frozen=True)
class Keys:
    folder: Path
    server: ServerKeys
    clients: list[ClientKeys]


def new_keys(folder: Path, clients: int = 3) -> Keys:
    make_keys(folder, clients, ["localhost", HOST])
    own = [ClientKeys.load(folder / f"client-{number}") for number in range(clients)]
    return Keys(folder, ServerKeys.load(folder / "server"), own)


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
    """The reply of an honest client in these tests."""
    return b"answer to " + body[:200]


class LinkClock:
    """A link's clock. It runs as usual until a test holds it; then time passes only when the test turns it."""

    def __init__(self) -> None:
        self._ahead, self._held = 0.0, float("nan")
        self._is_held = False

    def __call__(self) -> float:
        return self._ahead + (self._held if self._is_held else time.monotonic())

    def hold(self) -> None:
        self._held = time.monotonic()
        self._is_held = True

    def release(self) -> None:
        if self._is_held:
            self._ahead -= time.monotonic() - self._held
            self._is_held = False

    def turn(self, seconds: float) -> None:
        self._ahead += seconds


class Pauses(Clock):
    """A line's clock. It records the pauses between attempts to connect, and makes none longer than `longest` seconds;
    its time passes by them alone. The wait of a client that leaves, until the server has its last reply, may take
    long."""

    def __init__(self, longest: float = 0.01) -> None:
        self._longest = longest
        self.made: list[float] = []
        self.deliveries = 0
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def wait(self, event: Event, seconds: float) -> bool:
        if seconds == client.DELIVER_SECONDS:
            self.deliveries += 1
            return event.wait(PATIENCE)
        self.made.append(seconds)
        self.time += seconds
        return event.wait(min(seconds, self._longest))


class Client:
    """A client on a thread, which answers each request with `answer`."""

    def __init__(
        self,
        address: str,
        keys: ClientKeys,
        *,
        tls: bool = True,
        answer: Callable[[bytes], bytes] = answer_to,
        longest_pause: float = 0.01,
    ) -> None:
        self.told: list[str] = []
        self.asked: list[Request] = []
        self.fault: BaseException | None = None
        self.pauses = Pauses(longest_pause)
        self._answer = answer
        self.line = Line(address, keys, client_tls(keys) if tls else None, self.told.append, self.pauses)
        self._thread = Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Client":
        self._thread.start()
        return self

    def __exit__(self, *_fault: object) -> None:
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


@dataclass(repr=False)
class Peer:
    """A client that keeps to the handshake, and then does what the test wants."""

    connection: ClientConnection
    keys: ClientKeys

    def request(self) -> Request:
        frame = self.connection.recv(PATIENCE)
        assert isinstance(frame, bytes)
        own = self.keys.identity.public_key().public_bytes_raw()
        return read_request(self.keys.roster.server_key, own, frame)

    def reply(self, request: Request, body: bytes) -> bytes:
        """A signed reply. The test sends it."""
        return reply(self.keys.identity, self.keys.roster.server_key, request, body)

    def answer(self, body: bytes) -> Request:
        """Answer the next request."""
        request = self.request()
        self.connection.send(self.reply(request, body))
        return request

    def give_sign_of_life(self) -> None:
        """Returns when the link has heard it, and everything that was sent before."""
        assert self.connection.ping().wait(PATIENCE)


@dataclass(repr=False)
class Linked:
    """A link, its clock, what it logged, and the clients that were connected from the start."""

    link: Link
    keys: Keys
    tls: bool
    clock: LinkClock
    told: list[str]
    pool: ThreadPoolExecutor
    clients: dict[int, Client] = field(default_factory=dict)

    @property
    def address(self) -> str:
        return f"{HOST}:{self.link.port}"

    def ask(self, *clients: int, number: int = 0, size: int = 0, patient: bool = False) -> dict[int, bytes]:
        return dict(self.link.carry(dict.fromkeys(clients, question(number, size)), RUN, patient=patient))

    def asking(
        self, *clients: int, number: int = 0, size: int = 0, patient: bool = False
    ) -> "Future[dict[int, bytes]]":
        """Ask on another thread."""
        return self.pool.submit(self.ask, *clients, number=number, size=size, patient=patient)

    def client(self, number: int, answer: Callable[[bytes], bytes] = answer_to) -> Client:
        """A client that has not connected yet."""
        return Client(self.address, self.keys.clients[number], tls=self.tls, answer=answer)

    @contextmanager
    def peer(self, number: int, process: bytes = bytes(16)) -> Iterator[Peer]:
        """A client that is authenticated."""
        own = self.keys.clients[number]
        with self.opened(number) as connection:
            side = ClientSide(own.identity, own.roster.server_key, HOST, process)
            connection.send(side.greeting())
            connection.send(side.proof(connection.recv(PATIENCE, decode=False)))
            connection.recv(PATIENCE)
            self.link.present()  # the link has taken it in, and not only told it so
            yield Peer(connection, own)

    @contextmanager
    def opened(self, number: int = 0) -> Iterator[ClientConnection]:
        """A websocket to the link, before the handshake. A client's CA is trusted."""
        address = f"{'wss' if self.tls else 'ws'}://{self.address}{PATH}"
        plain = partial(connect, compression=None, proxy=None, max_size=None, ping_interval=None, close_timeout=1)
        with plain(address, ssl=client_tls(self.keys.clients[number]) if self.tls else None) as connection:
            yield connection

    def dial(self, source: str = HOST) -> socket.socket:
        """A socket to the link, with TLS if the link has it."""
        return dial(self.address, client_tls(self.keys.clients[0]) if self.tls else None, source)

    def until_present(self, *clients: int) -> None:
        until(lambda: set(clients) <= set(self.link.present()))

    def until_broken(self, client: int) -> None:
        """Wait until the link knows that a client's connection has ended."""
        until(lambda: client not in self.link._exchanges.connections)

    def turn(self, seconds: float) -> None:
        """Let time pass. Returns when the link has done what is due."""
        self.link.present()  # whatever has begun sets its deadline before the clock is turned
        self.clock.turn(seconds)
        for _ in range(3):  # wake the link; what is due comes next, and what follows from it after that
            self.link.present()


@contextmanager
def linked(
    keys: Keys,
    *clients: int,
    seconds: float = PATIENCE,
    tls: bool = True,
    port: int = 0,
    hold: bool = False,
    answer: Callable[[bytes], bytes] = answer_to,
) -> Iterator[Linked]:
    """A link at a free port, with these clients connected. `seconds` is the deadline of its exchanges. With `hold` its
    time passes only when the test turns the clock."""
    told: list[str] = []
    clock = LinkClock()
    context = server_tls(keys.server) if tls else None
    with (
        ThreadPoolExecutor() as pool,
        Link(keys.server, HOST, port, context, seconds, tell=told.append, clock=clock) as link,
        ExitStack() as stack,
    ):
        at = Linked(link, keys, tls, clock, told, pool)
        for number in clients:
            at.clients[number] = stack.enter_context(at.client(number, answer))
        at.until_present(*clients)
        if hold:
            clock.hold()
        try:
            yield at
        finally:
            clock.release()


@contextmanager
def wired(
    keys: Keys, answer: Callable[[bytes], bytes] = answer_to, seconds: float = PATIENCE
) -> Iterator[tuple[Linked, "Wire", Client]]:
    """A link without TLS, whose clock is held, and client 0 at the other end of a wire."""
    with (
        linked(keys, tls=False, seconds=seconds, hold=True) as at,
        Wire(at.address) as wire,
        Client(wire.address, keys.clients[0], tls=False, answer=answer) as client,
    ):
        at.until_present(0)
        yield at, wire, client


@contextmanager
def link_with_pages(keys: Keys, *, tls: bool = True, board: Board | None = None) -> Iterator[Link]:
    """A link that shows the pages of a board."""
    pages = Pages(keys.server.token, (board or Board()).status)
    with Link(keys.server, HOST, 0, server_tls(keys.server) if tls else None, 5.0, pages) as link:
        yield link


def say(link: Link, request: bytes, tls: ssl.SSLContext | None = None) -> bytes:
    """Send bytes over a new connection, and return everything that comes back until the link closes it, or wants to
    close its websocket."""
    answer = b""
    with dial(f"{HOST}:{link.port}", tls) as connection, suppress(ConnectionResetError, ssl.SSLEOFError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(request)
        while not _closes(answer) and (data := connection.recv(65_536)):
            answer += data
    return answer


def _closes(answer: bytes) -> bool:
    """Whether an answer opens a websocket and ends with a frame that closes it."""
    frame = answer.partition(b"\r\n\r\n")[2]
    return answer.startswith(b"HTTP/1.1 101 ") and frame[:1] == b"\x88" and len(frame) >= 2 + frame[1]


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
    """One direction of a wire: the bytes sent, those that have passed, and after how many it is cut."""

    sent: bytearray = field(default_factory=bytearray)
    passed: bytearray = field(default_factory=bytearray)
    most: int | None = None


class Wire:
    """A relay between clients and a link: it records the bytes that pass, and can be cut or held."""

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

    def __exit__(self, *_fault: object) -> None:
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
        """Let nothing pass until `release`. Both ends keep their connections."""
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
            for source, sink, pipes in ((far, near, self.to_client), (near, far, self.to_server)):
                source.settimeout(None)
                pipes.append(_Pipe())
                self._threads.append(Thread(target=self._flow, args=(source, sink, pipes[-1]), daemon=True))
                self._threads[-1].start()

    def _flow(self, source: socket.socket, sink: socket.socket, pipe: _Pipe) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                pipe.sent += data
                self._flowing.wait()
                most = pipe.most  # read once: a limit that is set while these bytes are sent is about later ones
                if most is not None:
                    data = data[: max(0, most - len(pipe.passed))]
                pipe.passed += data  # before anybody can have seen it, and asks whether it has passed
                sink.sendall(data)
                if most is not None and len(pipe.passed) >= most:
                    break
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        source.close()
