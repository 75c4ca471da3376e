"""A real link on loopback, and requests to it byte by byte."""

import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from baffle.network.authority import ServerKeys, make_keys
from baffle.network.board import Board
from baffle.network.keys import ClientKeys
from baffle.network.link.client import Line, client_tls
from baffle.network.link.pages import Pages
from baffle.network.link.server import Link, server_tls

ADDRESS = "127.0.0.1"


@contextmanager
def link_with_pages(folder: Path, *, tls: bool = True, board: Board | None = None) -> Iterator[Link]:
    """A link with the keys in a folder, which shows a board."""
    own = ServerKeys.load(folder / "server")
    pages = Pages(own.token, (board or Board()).status)
    with Link(own, ADDRESS, 0, server_tls(own) if tls else None, 5.0, pages) as link:
        yield link


@contextmanager
def client_connected(link: Link, folder: Path, number: int = 0) -> Iterator[Line]:
    """A client that has proved who it is. From then on the link shuts out nobody at this address."""
    keys = ClientKeys.load(folder / f"client-{number}")
    with Line(f"{ADDRESS}:{link.port}", keys, client_tls(keys), lambda _words: None) as line:
        while number not in link.present():
            time.sleep(0.01)
        yield line


def new_keys(folder: Path, clients: int = 3) -> Path:
    make_keys(folder, clients, ["localhost", ADDRESS])
    return folder


def say(link: Link, keys: Path, request: bytes, *, tls: bool = True) -> bytes:
    """Send bytes over a new connection, and return all that comes back until the link closes it."""
    context = ssl.create_default_context(cafile=keys / "ca.pem")
    with socket.create_connection((ADDRESS, link.port), timeout=10) as plain:
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = context.wrap_socket(plain, server_hostname=ADDRESS) if tls else plain
        with connection:
            connection.sendall(request)
            answer = b""
            try:
                while data := connection.recv(65_536):
                    answer += data
            except (ConnectionResetError, ssl.SSLEOFError):
                pass
            return answer
