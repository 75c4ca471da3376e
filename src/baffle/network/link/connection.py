"""The server's end of one connection: bytes in, frames out, and the other way round. It knows websockets and time
limits, and nothing about runs."""

import asyncio
import logging
import socket
from contextlib import suppress
from typing import Protocol, cast

from websockets.frames import Frame, Opcode
from websockets.http11 import Request, Response
from websockets.protocol import State
from websockets.server import ServerProtocol

from baffle.errors import MessageError
from baffle.network.link import door
from baffle.network.link.handshake import GOODBYE, HANDSHAKE_BYTES, PATH, REFUSED, WRONG

CLOSE_SECONDS = 2.0
"""How long the other end may take to close a connection that we have ended."""

SWITCHING = 101
"""The status of a response that opens a websocket."""

_SILENT = logging.Logger("baffle.link", logging.CRITICAL + 1)  # strangers' mistakes are counted, not logged


class Host(Protocol):
    """What a connection tells the link that it belongs to."""

    def page(self, connection: "Connection", request: Request) -> Response:
        """The answer to a request that opens no websocket."""
        ...

    def opened(self, connection: "Connection") -> None:
        """A websocket is open; who is at the other end is not known yet."""
        ...

    def received(self, connection: "Connection", frame: bytes) -> None: ...

    def lost(self, connection: "Connection") -> None: ...


class Connection(asyncio.Protocol):
    """One connection. `client` is the number of the client at the other end, once it has proved who it is."""

    def __init__(self, host: Host, address: str, accepted: socket.socket) -> None:
        self._host = host
        self._socket = accepted
        self.address = address
        self.client: int | None = None
        self.process = b""
        self.left = False
        """Whether the other end said goodbye."""
        self.heard = 0.0
        """When the other end was last heard from, by the loop's clock."""
        self._protocol = ServerProtocol(max_size=HANDSHAKE_BYTES, logger=_SILENT)
        self._received = 0
        self._transport: asyncio.Transport | None = None
        self._timer = asyncio.get_running_loop().call_later(door.SECONDS, self.drop)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.heard = asyncio.get_running_loop().time()

    def prove(self, client: int, process: bytes) -> None:
        """The other end is this client: the limits on strangers no longer hold."""
        self.client, self.process = client, process
        self._timer.cancel()

    def allow(self, size: int) -> None:
        """Accept frames of at most this many bytes from now on."""
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
        """How many bytes the other end has not taken yet."""
        return self._transport.get_write_buffer_size() if self._transport else 0

    def close(self, code: int, reason: str = "") -> None:
        """Say goodbye, and end the connection even if the other end does not."""
        if self._protocol.state is State.OPEN:
            self._protocol.send_close(code, reason[:120])
            self._flush()
        if self._transport:
            asyncio.get_running_loop().call_later(CLOSE_SECONDS, self.drop)

    def drop(self) -> None:
        """End the connection without a word."""
        if self._transport:
            self._transport.abort()
        else:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # TLS is not open yet, and will not be

    def data_received(self, data: bytes) -> None:
        self.heard = asyncio.get_running_loop().time()
        if self.client is None:
            self._received += len(data)
            if self._received > door.BYTES:
                self.drop()
                return
        self._protocol.receive_data(data)
        for event in self._protocol.events_received():
            self._take(event)
        self._flush()

    def eof_received(self) -> None:
        self._protocol.receive_eof()
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the name is asyncio's
        self._timer.cancel()
        self._transport = None
        self._host.lost(self)

    def _take(self, event: Request | Response | Frame) -> None:
        if isinstance(event, Request):
            self._open(event)
        elif isinstance(event, Frame):
            self._take_frame(event)

    def _open(self, request: Request) -> None:
        response = self._protocol.accept(request) if request.path == PATH else None
        if response is None or response.status_code != SWITCHING:
            response = self._host.page(self, request)
        self._protocol.send_response(response)
        if self._protocol.state is State.OPEN:
            self._host.opened(self)

    def _take_frame(self, frame: Frame) -> None:
        if frame.opcode is Opcode.CLOSE:
            code = self._protocol.close_rcvd.code if self._protocol.close_rcvd else 0
            self.left = code in (1000, GOODBYE)
        elif frame.opcode is Opcode.BINARY and frame.fin:
            try:
                self._host.received(self, bytes(frame.data))
            except MessageError as fault:
                self.close(REFUSED if self.client is None else WRONG, str(fault))
        elif frame.opcode in (Opcode.TEXT, Opcode.BINARY, Opcode.CONT):
            self.close(WRONG, "expected whole binary frames")

    def _flush(self) -> None:
        for data in self._protocol.data_to_send():
            if self._transport is None or self._transport.is_closing():
                return
            if data:
                self._transport.write(data)
            else:
                self._transport.close()
