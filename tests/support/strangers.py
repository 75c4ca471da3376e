"""Strangers at a server's port, each on a thread of a process of its own, who never stop:

    python -m tests.support.strangers PORT SOURCE

SOURCE is the address that they come from."""

import contextlib
import random
import socket
import ssl
import sys
import time
from collections.abc import Callable
from threading import Thread

HOST = "127.0.0.1"
BODY = 150_000_000
UPGRADE = (
    b"GET /link HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
RECORD = b"\x16\x03\x01"
"""How a TLS record of a handshake begins."""

Dial = Callable[[], socket.socket]


def half_tls(plain: Dial, _tls: Dial) -> None:
    """Begin a TLS handshake, byte by byte."""
    with plain() as connection:
        for byte in RECORD + b"\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(600):
            connection.sendall(bytes([byte]))
            time.sleep(0.05)


def half_http(_plain: Dial, tls: Dial) -> None:
    """Begin a request, and go on with one header a while."""
    with tls() as connection:
        connection.sendall(UPGRADE[:-2])
        while True:
            connection.sendall(b"x: y\r\n")
            time.sleep(0.2)


def half_handshake(_plain: Dial, tls: Dial) -> None:
    """Open a websocket and say nothing."""
    with tls() as connection:
        connection.sendall(UPGRADE)
        while connection.recv(4096):
            pass


def large_body(_plain: Dial, tls: Dial) -> None:
    with tls() as connection:
        connection.sendall(f"POST /status HTTP/1.1\r\nHost: x\r\nContent-Length: {BODY}\r\n\r\n".encode())
        pour(connection)


def chunked_body(_plain: Dial, tls: Dial) -> None:
    with tls() as connection:
        head = b"POST /link HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        connection.sendall(head + f"{BODY:x}\r\n".encode())
        pour(connection)


def large_frame(_plain: Dial, tls: Dial) -> None:
    with tls() as connection:
        connection.sendall(UPGRADE + b"\x82\xff" + BODY.to_bytes(8, "big") + bytes(4))
        pour(connection)


def large_plain_body(plain: Dial, _tls: Dial) -> None:
    with plain() as connection:
        pour(connection)


def crowd(plain: Dial, _tls: Dial) -> None:
    """Keep 400 sockets open."""
    with contextlib.ExitStack() as opened:
        for _ in range(400):
            with contextlib.suppress(OSError):
                opened.enter_context(plain())
        time.sleep(1)


def random_bytes(plain: Dial, tls: Dial) -> None:
    for dial in (plain, tls):
        with dial() as connection:
            connection.sendall(random.randbytes(random.randrange(1, 3000)))
            connection.recv(4096)


def broken_records(plain: Dial, _tls: Dial) -> None:
    """TLS records of every kind where none belongs, as in a renegotiation that nobody asked for."""
    with plain() as connection:
        for kind in (0x14, 0x15, 0x16, 0x17, 0x18):
            connection.sendall(bytes([kind]) + b"\x03\x03\x40\x00" + random.randbytes(0x4000))
        connection.recv(4096)


def pour(connection: socket.socket) -> None:
    block = bytes(1 << 16)
    for _ in range(BODY // len(block)):
        connection.sendall(block)


ALL = (
    *(half_tls, half_http, half_handshake, large_body, chunked_body, large_frame, large_plain_body, crowd),
    *(random_bytes, broken_records),
)


def main() -> None:
    port, source = int(sys.argv[1]), sys.argv[2]
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE

    def plain() -> socket.socket:
        return socket.create_connection((HOST, port), timeout=8, source_address=(source, 0))

    def tls() -> socket.socket:
        return context.wrap_socket(plain(), server_hostname=HOST)

    def for_ever(stranger: Callable[[Dial, Dial], None]) -> None:
        while True:
            with contextlib.suppress(OSError):
                stranger(plain, tls)
            time.sleep(0.01)

    for stranger in ALL:
        Thread(target=for_ever, args=(stranger,), daemon=True).start()
    sys.stdout.write("here\n")
    sys.stdout.flush()
    sys.stdin.read()  # until nobody needs them any more


if __name__ == "__main__":
    main()
