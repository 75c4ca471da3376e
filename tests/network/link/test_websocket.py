"""A client's websocket, with another end that may break every rule."""

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from websockets.exceptions import InvalidHandshake
from websockets.frames import Frame, Opcode
from websockets.http11 import Request
from websockets.server import ServerProtocol

from baffle.errors import MessageError
from baffle.network.link.websocket import ClosedError, Websocket
from tests.support.links import PATIENCE

MOST = 10_000


@contextmanager
def pair(ping_seconds: float = 600.0, send_seconds: float = 600.0) -> Iterator[tuple[Websocket, socket.socket]]:
    """An open websocket, and the other end as a bare socket."""
    near, far = socket.socketpair()
    with near, far, ThreadPoolExecutor() as pool:
        patience = {"ping_seconds": ping_seconds, "send_seconds": send_seconds}
        impatient = type("Impatient", (Websocket,), patience)
        opening = pool.submit(impatient, near, "server.example", 9092, "/link", MOST, PATIENCE)
        far.settimeout(PATIENCE)
        server = ServerProtocol()
        server.receive_data(far.recv(4096))
        (request,) = server.events_received()
        assert isinstance(request, Request)
        assert request.path == "/link"
        server.send_response(server.accept(request))
        far.sendall(b"".join(server.data_to_send()))
        yield opening.result(), far


def frame(opcode: Opcode, data: bytes = b"", *, fin: bool = True) -> bytes:
    return Frame(opcode, data, fin).serialize(mask=False)


def test_frames_come_in_order_however_they_are_cut() -> None:
    with pair() as (own, far):
        stream = frame(Opcode.BINARY, b"one") + frame(Opcode.PING, b"?") + frame(Opcode.BINARY, bytes(MOST))
        for at in range(0, len(stream), 1000):
            far.sendall(stream[at : at + 1000])
        assert own.receive(PATIENCE) == b"one"
        assert own.receive(PATIENCE) == bytes(MOST)
        assert far.recv(100)[0] & 0x0F == Opcode.PONG


@pytest.mark.parametrize(
    "sent",
    [
        frame(Opcode.TEXT, b"words"),
        frame(Opcode.BINARY, b"half", fin=False),
        frame(Opcode.BINARY, b"half", fin=False) + frame(Opcode.CONT, b"half"),
    ],
    ids=["text", "half", "fragments"],
)
def test_only_whole_binary_frames_are_taken(sent: bytes) -> None:
    with pair() as (own, far):
        far.sendall(sent)
        with pytest.raises(MessageError, match="expected whole binary frames"):
            own.receive(PATIENCE)


@pytest.mark.parametrize(
    "sent",
    [frame(Opcode.BINARY, bytes(MOST + 1)), b"\x82\x7f" + b"\x7f" * 8, b"\x82\x80" + bytes(4), b"\xff\x00", bytes(9)],
    ids=["too large", "far too large", "masked", "reserved", "zeros"],
)
def test_frames_against_the_rules_end_the_connection(sent: bytes) -> None:
    with pair() as (own, far):
        far.sendall(sent)
        far.shutdown(socket.SHUT_WR)
        with pytest.raises(ClosedError):
            own.receive(PATIENCE)


def test_what_the_other_end_says_when_it_closes_is_passed_on() -> None:
    with pair() as (own, far):
        far.sendall(frame(Opcode.BINARY, b"last") + frame(Opcode.CLOSE, (4003).to_bytes(2, "big") + b"because"))
        far.shutdown(socket.SHUT_WR)
        assert own.receive(PATIENCE) == b"last"
        with pytest.raises(ClosedError) as closed:
            own.receive(PATIENCE)
        assert (closed.value.code, closed.value.reason) == (4003, "because")
        with pytest.raises(ClosedError):
            own.send(b"too late")


def test_a_line_that_breaks_is_closed() -> None:
    with pair() as (own, far):
        far.sendall(frame(Opcode.BINARY, b"whole") + frame(Opcode.BINARY, b"never finished")[:5])
        far.close()
        assert own.receive(PATIENCE) == b"whole"
        with pytest.raises(ClosedError, match="the line broke"):
            own.receive(PATIENCE)


def test_silence_is_answered_with_a_ping_and_then_given_up() -> None:
    with pair(ping_seconds=0.1) as (own, far):
        begun = time.monotonic()
        with pytest.raises(ClosedError, match="no sign of life"):
            own.receive()
        assert time.monotonic() - begun >= 0.2
        assert far.recv(100)[0] & 0x0F == Opcode.PING


def test_the_other_end_is_waited_for_while_it_answers_pings() -> None:
    with pair(ping_seconds=2.0) as (own, far), ThreadPoolExecutor() as pool:
        receiving = pool.submit(own.receive)
        for _ in range(2):
            assert far.recv(100)[0] & 0x0F == Opcode.PING
            far.sendall(frame(Opcode.PONG))
        far.sendall(frame(Opcode.BINARY, b"at last"))
        assert receiving.result() == b"at last"


def test_nothing_follows_a_frame_that_could_not_be_sent_whole() -> None:
    """The other end reads nothing for so long that sending is given up."""
    with pair(send_seconds=0.2) as (own, far):
        with pytest.raises(TimeoutError):
            own.send(bytes(50_000_000))
        with pytest.raises((ClosedError, OSError)):
            own.send(b"another frame, in the middle of the first")
        with pytest.raises((ClosedError, OSError)):
            own.receive(PATIENCE)
        taken = 0
        while data := far.recv(1 << 20):
            taken += len(data)
        assert taken < 50_000_000


@pytest.mark.parametrize(
    "answer",
    [b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", b"SSH-2.0-OpenSSH\r\n", b"\x00" * 9000, b""],
    ids=["another server", "another protocol", "zeros", "nothing"],
)
def test_another_kind_of_server_is_recognized(answer: bytes) -> None:
    near, far = socket.socketpair()
    with near, far, ThreadPoolExecutor() as pool:
        opening = pool.submit(Websocket, near, "server.example", 9092, "/link", MOST, PATIENCE)
        far.recv(4096)
        far.sendall(answer)
        far.shutdown(socket.SHUT_WR)
        with pytest.raises((InvalidHandshake, EOFError, ClosedError, ValueError)):
            opening.result()


def test_opening_is_given_up_in_the_end() -> None:
    near, far = socket.socketpair()
    with near, far, pytest.raises(TimeoutError):
        Websocket(near, "server.example", 9092, "/link", MOST, 0.1)
