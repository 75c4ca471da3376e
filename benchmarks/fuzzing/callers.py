"""The client's end of a line, with an impostor in the server's place that sends anything at all: answers to its request
for a websocket, frames of the handshake, frames without a signature, and signed frames with meaningless content.

Whatever comes, the client connects again, and it answers every signed request with a signed reply.
"""

import socket
import tempfile
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import cast

from websockets.frames import Frame, Opcode
from websockets.http11 import Request as Opening, Response
from websockets.server import ServerProtocol

from baffle.core.messages import CatchUp, Message, RoundRequest, encode
from baffle.errors import BaffleError
from baffle.network.clock import Clock
from baffle.network.joining import Halt, Introduce, Openings
from baffle.network.link.client import Line
from baffle.network.link.envelope import PHASES, Request, ask, read_reply
from baffle.network.link.handshake import HANDSHAKE_BYTES, ServerSide
from fuzzing.checks import ACCEPTED, REFUSED, Tried, fault_at, violation
from fuzzing.damage import Mutations
from tests.support.links import HOST, Keys, new_keys

PATIENCE = 20.0
"""Seconds in which a client must call again or answer, on a busy machine."""

AT_ONCE = 20
"""How many requests go over one line."""

REQUEST = RoundRequest(1, bytes(32), bytes(32), bytes(32), CatchUp("outcomes", 0, ()))
MESSAGES: tuple[Message, ...] = (
    Introduce("rounds = 1\n", 1, bytes(32), 0),
    Openings(bytes(32), bytes(64)),
    Halt(REQUEST),
    REQUEST,
)


Event = Opening | Response | Frame


class HastyClock(Clock):
    """A clock that makes all pauses short."""

    def wait(self, event: threading.Event, seconds: float) -> bool:  # noqa: ARG002 - the name is the clock's
        return event.wait(0.001)


class Caller:
    """A real line, with a client behind it that answers everything."""

    def __init__(self, address: str, keys: Keys) -> None:
        self.fault: BaseException | None = None
        self.line = Line(address, keys.clients[0], None, lambda _words: None, HastyClock())
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with self.line as line:
                for request in line.requests():
                    line.reply(request, b"an answer")
        except BaseException as fault:
            self.fault = fault

    def leave(self) -> None:
        self.line.stop()
        self._thread.join(PATIENCE)


class Impostor:
    """The server's end of one connection. It knows the server's key, or does as if."""

    def __init__(self, connection: socket.socket, keys: Keys) -> None:
        self.connection, self._protocol = connection, ServerProtocol(max_size=1 << 20)
        self._keys, self._events = keys, deque[Event]()
        connection.settimeout(PATIENCE)

    def next(self) -> Event:
        """The next event: a request for a websocket, or a frame."""
        while not self._events:
            data = self.connection.recv(1 << 16)
            if not data:
                raise EOFError
            self._protocol.receive_data(data)
            self._events.extend(self._protocol.events_received())
            self.flush()
        return self._events.popleft()

    def frame(self) -> bytes:
        """The next frame that holds something."""
        while True:
            event = self.next()
            if isinstance(event, Frame) and event.opcode is Opcode.BINARY:
                return bytes(event.data)
            if isinstance(event, Frame) and event.opcode is Opcode.CLOSE:
                raise EOFError

    def flush(self) -> None:
        for data in self._protocol.data_to_send():
            if data:
                self.connection.sendall(data)

    def opening(self) -> bytes:
        """What answers a request for a websocket."""
        request = cast(Opening, self.next())
        self._protocol.send_response(self._protocol.accept(request))
        return b"".join(self._protocol.data_to_send())

    def send(self, frame: bytes) -> None:
        self._protocol.send_binary(frame)
        self.flush()

    def open(self) -> ServerSide:
        self.connection.sendall(self.opening())
        clients = {key: number for number, key in self._keys.server.roster.directory().items()}
        return ServerSide(self._keys.server.identity, clients, {HOST})

    def accept(self) -> None:
        """The whole handshake."""
        side = self.open()
        self.send(side.take(self.frame()))
        self.send(side.take(self.frame()))


class Impostors:
    """The impostors in the server's place, one after the other."""

    def __init__(self, draw: Random, keys: Keys, listener: socket.socket) -> None:
        self.draw, self._keys, self._listener = draw, keys, listener
        self._mutations = Mutations(draw, [encode(one) for one in MESSAGES])
        self._own, self._client = keys.server.identity, keys.server.roster.directory()[0]
        self._server = keys.server.roster.server_key
        self.ways = (self._opening, self._handshake, self._frames, self._frames, self._requests, self._requests)

    def called(self) -> Impostor:
        connection, _ = self._listener.accept()
        return Impostor(connection, self._keys)

    def _opening(self, at: Impostor) -> Iterator[Tried]:
        sent = self._mutations.bytes_of(at.opening())
        at.connection.sendall(sent)
        yield Tried("caller, opening", REFUSED, sent)

    def _handshake(self, at: Impostor) -> Iterator[Tried]:
        side = at.open()
        challenge = side.take(at.frame())
        if self.draw.random() < 0.6:
            sent = self._mutations.of(challenge)[:HANDSHAKE_BYTES]
            at.send(sent)
        else:
            at.send(challenge)
            sent = self._mutations.of(side.take(at.frame()))[:HANDSHAKE_BYTES]
            at.send(sent)
        yield Tried("caller, handshake", REFUSED, sent)

    def _frames(self, at: Impostor) -> Iterator[Tried]:
        """An unsigned frame, or bytes that are no frame."""
        at.accept()
        sent = self._mutations.bytes_of(self._signed(encode(self.draw.choice(MESSAGES))).frame)
        if self.draw.random() < 0.5:
            at.send(sent)
        else:
            sent = self.draw.choice((b"", b"\x82\x7f", b"\x81\x05", b"\x02\x05", b"\x89\x00", b"\xff")) + sent
            at.connection.sendall(sent)
        yield Tried("caller, frame", REFUSED, sent)

    def _requests(self, at: Impostor) -> Iterator[Tried]:
        """Requests that are signed, whatever they say."""
        at.accept()
        for _ in range(AT_ONCE):
            body = self._mutations.of(encode(self.draw.choice(MESSAGES)))
            request = self._signed(body)
            at.send(request.frame)
            if read_reply(self._client, self._server, request, at.frame()) != b"an answer":
                raise AssertionError("another answer than the client's")
            yield Tried("caller, signed request", ACCEPTED, body)

    def _signed(self, body: bytes) -> Request:
        return ask(
            self._own, self._client, self.draw.randbytes(32), self.draw.randrange(9), self.draw.choice(PHASES), body
        )


def callers(count: int, seed: int) -> Iterator[Tried]:
    """Malformed messages to the client's end of a line."""
    draw = Random(seed)
    with tempfile.TemporaryDirectory() as folder, socket.create_server((HOST, 0)) as listener:
        keys = new_keys(Path(folder) / "keys", 1)
        listener.settimeout(PATIENCE)
        impostors = Impostors(draw, keys, listener)
        caller = Caller(f"{HOST}:{listener.getsockname()[1]}", keys)
        with impostors.called().connection as connection:
            Impostor(connection, keys).accept()
        done = 0
        while done < count:
            try:
                at = impostors.called()
            except TimeoutError:
                words = f"the client does not call again ({caller.fault})"
                yield Tried("caller", violation("caller", words), b"")
                break
            with at.connection:
                way = draw.choice(impostors.ways)
                try:
                    for result in way(at):
                        done += 1
                        yield result
                    with suppress(OSError, EOFError):
                        at.connection.settimeout(0.005)
                        at.next()
                except (OSError, EOFError, BaffleError, AssertionError) as fault:
                    yield Tried("caller", fault_at("caller", fault), b"")
        caller.leave()
        if caller.fault:
            yield Tried("caller", fault_at("caller", caller.fault), b"")
