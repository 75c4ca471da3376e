"""A client's websocket: the protocol of the websockets library over a socket, with or without TLS.

The library's own client needs two threads a connection and twice the memory. Here the thread that receives also keeps
the connection alive: after some seconds without a byte it sends a ping, and after as many more it gives up.
"""

import select
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from threading import Lock

from websockets.client import ClientProtocol
from websockets.frames import CloseCode, Frame, Opcode
from websockets.protocol import State
from websockets.uri import WebSocketURI

from baffle.errors import MessageError

PING_SECONDS = 20.0  # seconds without a byte until the other end is pinged; after as many more the line is given up
SEND_SECONDS = 60.0  # how long the other end may take to make room for more bytes
CHUNK = 1 << 16
RECEIPT = b"receipt"  # the content of a ping that asks whether everything sent so far has arrived
_WAIT = (ssl.SSLWantReadError, ssl.SSLWantWriteError, BlockingIOError)


class ClosedError(Exception):
    """The connection is closed. `code` is the other end's reason as a number; 0 if it gave none."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code, self.reason = code, reason


class Websocket:
    """An open websocket. One thread receives; any thread may send or close."""

    ping_seconds, send_seconds = PING_SECONDS, SEND_SECONDS

    def __init__(self, connected: socket.socket, host: str, port: int, path: str, most: int, seconds: float) -> None:
        """Open a websocket over a socket, in at most `seconds`. Frames have at most `most` bytes."""
        self._socket = connected
        self._socket.setblocking(False)
        self._lock = Lock()  # a TLS connection must not be read and written at the same time
        self._frames: deque[bytes] = deque()
        self._on_receipt: Callable[[], None] = lambda: None
        uri = WebSocketURI(isinstance(connected, ssl.SSLSocket), host, port, path, "")
        self._protocol = ClientProtocol(uri, max_size=most)
        with self._lock:
            self._protocol.send_request(self._protocol.connect())
            self._flush()
        give_up = time.monotonic() + seconds
        while self._protocol.state is State.CONNECTING and self._protocol.handshake_exc is None:
            self._receive_some(give_up - time.monotonic())
        if self._protocol.handshake_exc:
            raise self._protocol.handshake_exc

    def allow(self, most: int) -> None:
        self._protocol.max_message_size = most

    def receive(self, seconds: float | None = None) -> bytes:
        """The next frame. Raises TimeoutError after so many seconds; None: waits while the other end answers pings."""
        pinged = False
        while not self._frames:
            try:
                self._receive_some(self.ping_seconds if seconds is None else seconds)
                pinged = False
            except TimeoutError:
                if seconds is not None:
                    raise
                if pinged:
                    raise ClosedError(0, "no sign of life") from None
                pinged = True
                self._say(lambda: self._protocol.send_ping(b""))
        return self._frames.popleft()

    def send(self, frame: bytes) -> None:
        self._say(lambda: self._protocol.send_binary(frame))

    def confirm(self, then: Callable[[], None]) -> None:
        """Call `then` when everything that was sent so far has arrived; never, if the connection breaks first."""
        self._on_receipt = then
        with suppress(ClosedError, OSError):
            self._say(lambda: self._protocol.send_ping(RECEIPT))

    def close(self, code: int, reason: str) -> None:
        """Tell the other end why this one leaves. It answers, and `receive` raises; the owner closes the socket."""
        with suppress(ClosedError, OSError):
            self._say(lambda: self._protocol.send_close(code, reason))

    def _say(self, speak: Callable[[], None]) -> None:
        with self._lock:
            if self._protocol.state is not State.OPEN:
                raise self._closed()
            speak()
            self._flush()

    def _receive_some(self, seconds: float) -> None:
        """Read the next bytes, which may be less or more than a frame."""
        while (data := self._read()) is None:
            self._await(select.POLLIN, seconds)
        with self._lock:
            if data:
                self._protocol.receive_data(data)
            else:
                self._protocol.receive_eof()
            self._flush()
        for event in self._protocol.events_received():
            if isinstance(event, Frame):
                self._take(event)
        if not self._frames and (self._protocol.close_rcvd or self._protocol.state is State.CLOSED):
            raise self._closed()

    def _take(self, frame: Frame) -> None:
        if frame.opcode in (Opcode.TEXT, Opcode.BINARY, Opcode.CONT):
            if frame.opcode is not Opcode.BINARY or not frame.fin:
                raise MessageError("expected whole binary frames")
            self._frames.append(bytes(frame.data))
        elif frame.opcode is Opcode.PONG and frame.data == RECEIPT:
            self._on_receipt()

    def _read(self) -> bytes | None:
        """The next bytes; empty at the end of the stream; None if none have come yet."""
        with self._lock:
            try:
                return self._socket.recv(CHUNK)
            except _WAIT:
                return None
            except ssl.SSLEOFError:
                return b""

    def _flush(self) -> None:
        for data in self._protocol.data_to_send():
            if data:
                self._send_all(memoryview(data))
            else:
                with suppress(OSError):
                    self._socket.shutdown(socket.SHUT_WR)

    def _send_all(self, data: memoryview) -> None:
        give_up = time.monotonic() + self.send_seconds
        try:
            while data:
                try:
                    data = data[self._socket.send(data) :]
                except ssl.SSLWantReadError:
                    self._await(select.POLLIN, give_up - time.monotonic())
                except _WAIT:
                    self._await(select.POLLOUT, give_up - time.monotonic())
        except BaseException:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # after a part of a frame nothing else may follow
            raise

    def _await(self, event: int, seconds: float) -> None:
        poll = select.poll()
        poll.register(self._socket, event)
        if seconds <= 0 or not poll.poll(1000 * seconds):
            raise TimeoutError("no answer in time")

    def _closed(self) -> ClosedError:
        received, sent = self._protocol.close_rcvd, self._protocol.close_sent
        if received:
            return ClosedError(received.code, received.reason or f"code {received.code}")
        if sent is None or sent.code in (CloseCode.NORMAL_CLOSURE, CloseCode.GOING_AWAY):
            return ClosedError(0, "the line broke")
        return ClosedError(0, sent.reason or f"code {sent.code}")
