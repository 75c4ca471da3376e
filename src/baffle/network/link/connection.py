"""The server's end of one connection: it turns bytes into frames and back, and keeps time limits. It knows nothing
about runs."""

import asyncio
import logging
import socket
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, cast

from websockets.frames import Frame, Opcode
from websockets.http11 import Request, Response
from websockets.protocol import State
from websockets.server import ServerProtocol

from baffle.errors import MessageError, first_line
from baffle.network.link import door
from baffle.network.link.handshake import GOODBYE, HANDSHAKE_BYTES, NORMAL, PATH, REFUSED, WRONG

if TYPE_CHECKING:
    from baffle.network.link.server import Port

CLOSE_SECONDS = 2.0  # how long the other end may take to close a connection that we have ended
SWITCHING = 101  # the status of a response that opens a websocket
PIECE = 64 * 1024  # bytes go to the transport in pieces of this size, while it takes them; the rest counts as unsent
CONTROL_FRAMES = 100  # how many pings and pongs the other end may send, in addition to one a second
REASON_BYTES = 120  # the most bytes of a reason for closing: a control frame has 125 in all
_SILENT = logging.Logger("baffle.link", logging.CRITICAL + 1)  # strangers' mistakes are counted, not logged


class Connection(asyncio.Protocol):
    """One connection to a port. `client` is the number of the client at the other end, once it is authenticated."""

    def __init__(self, port: "Port", address: str, accepted: socket.socket) -> None:
        self._port, self.address, self._socket = port, address, accepted
        self._loop = asyncio.get_running_loop()
        self.client: int | None = None
        self.process = b""
        self.made = self.served = self.ended = False
        self.broke = False  # whether the connection ended although neither end closed it
        self.begun = self.heard = self._loop.time()  # the other end was last heard from at `heard`
        self._protocol = ServerProtocol(max_size=HANDSHAKE_BYTES, logger=_SILENT)
        self._received = self._controls = 0
        self._waiting = deque[bytes | memoryview]()  # empty bytes: close the transport
        self._paused = False
        self._transport: asyncio.Transport | None = None
        self._timer = self._loop.call_later(door.SECONDS, self.drop)

    def prove(self, client: int, process: bytes) -> None:
        """The other end is this client: the limits on unauthenticated connections no longer hold."""
        self.client, self.process = client, process
        self._timer.cancel()

    def allow(self, size: int) -> None:
        self._protocol.max_message_size = size

    def send(self, frame: bytes) -> None:
        if self._protocol.state is State.OPEN:
            self._protocol.send_binary(frame)
            self._flush()

    def ping(self) -> None:
        if self._protocol.state is State.OPEN:
            self._protocol.send_ping(b"")
            self._flush()

    @property
    def unsent(self) -> int:
        """How many bytes wait because the other end does not read."""
        return sum(map(len, self._waiting)) + (self._transport.get_write_buffer_size() if self._transport else 0)

    def close(self, code: int, reason: str = "") -> None:
        """Send a close frame, and end the connection even if the other end does not."""
        if self._protocol.state is State.OPEN:
            self._protocol.send_close(code, reason.encode()[:REASON_BYTES].decode(errors="ignore"))
        self._flush()
        self._end(broke=False)

    def drop(self) -> None:
        """End the connection without a close frame."""
        self._end(broke=False)
        if self._transport:
            self._transport.abort()
        else:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # TLS is not open yet, and will not be

    # What asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.made = True
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(PIECE)
        if self.ended:
            self.drop()

    def data_received(self, data: bytes) -> None:
        self.heard = self._loop.time()
        if self.client is None or self.ended:
            self._received += len(data)
            if self._received > door.BYTES:
                self.drop()
                return
        try:
            self._protocol.receive_data(data)
            for event in self._protocol.events_received():
                if not self.ended:
                    self._take(event)
            if self._protocol.parser_exc and not self.ended:
                self._refuse(first_line(self._protocol.parser_exc))
            self._flush()
        except Exception as fault:  # no bytes from outside may cause an error elsewhere
            self._port.refused(self, f"its bytes led to {type(fault).__name__}: {first_line(fault)}")
            self.drop()

    def eof_received(self) -> None:
        self._protocol.receive_eof()
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the name is asyncio's
        self._timer.cancel()
        self._waiting.clear()
        self._transport = None
        self._end(broke=True)
        self._port.gone(self)

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._write()

    # Bytes become events

    def _take(self, event: Request | Response | Frame) -> None:
        if isinstance(event, Request):
            self._answer(event)
        elif isinstance(event, Frame) and self._protocol.state is not State.CONNECTING:
            self._take_frame(event)  # bytes after a request that opened no websocket are not a frame

    def _answer(self, request: Request) -> None:
        response = self._protocol.accept(request) if request.path == PATH else None
        is_websocket = response is not None and response.status_code == SWITCHING
        if response is None or not is_websocket:
            response = self._port.page(self, request)
        self._protocol.send_response(response)
        if not is_websocket:
            self._flush()
            self._end(broke=False)

    def _take_frame(self, frame: Frame) -> None:
        if frame.opcode is Opcode.CLOSE:
            code = self._protocol.close_rcvd.code if self._protocol.close_rcvd else 0
            self._flush()
            self._end(broke=code not in (NORMAL, GOODBYE))
        elif frame.opcode in (Opcode.PING, Opcode.PONG):
            self._controls += 1
            if self._controls > CONTROL_FRAMES + self._loop.time() - self.begun:
                self._refuse("too many pings")
        elif frame.opcode is Opcode.BINARY and frame.fin:
            try:
                self._port.received(self, bytes(frame.data))
            except MessageError as fault:
                self._refuse(str(fault))
        else:
            self._refuse("a frame that is not whole or not binary")

    def _refuse(self, why: str) -> None:
        self._port.refused(self, why)
        self.close(REFUSED if self.client is None else WRONG, why)

    def _end(self, *, broke: bool) -> None:
        if self.ended:
            return
        self.ended, self.broke = True, broke
        self._received = 0
        self._timer.cancel()
        if self._transport:
            self._timer = self._loop.call_later(CLOSE_SECONDS, self.drop)
        self._port.lost(self)

    # Frames become bytes

    def _flush(self) -> None:
        for data in self._protocol.data_to_send():
            pieces = [memoryview(data)[at : at + PIECE] for at in range(0, len(data), PIECE)]
            self._waiting.extend(pieces if len(pieces) > 1 else [data])
        self._write()

    def _write(self) -> None:
        while self._waiting and not self._paused and self._transport and not self._transport.is_closing():
            data = self._waiting.popleft()
            if data:
                self._transport.write(data)
            else:
                self._transport.close()
