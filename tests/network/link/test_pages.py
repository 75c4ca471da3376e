"""The pages on the link's port: strangers see /health and nothing else, the operator also /status and /metrics."""

import base64
from collections.abc import Iterator
from contextlib import suppress
from itertools import product

import msgspec
import pytest
from websockets.datastructures import Headers
from websockets.http11 import Request

from baffle.network.link import door
from baffle.network.link.client import client_tls
from baffle.network.link.handshake import PATH, REFUSED
from baffle.network.link.server import Link
from baffle.network.server.board import Board
from baffle.network.status import NOT_FOUND, LinkCounts, Pages, Status
from tests.support.links import HOST, Client, Keys, link_with_pages, linked, say, until
from tests.support.prometheus import parse

PATHS = (
    *("/", "/health", "/status", "/metrics", PATH, "/status/", "//status", "/health/../status", "/%73tatus", "/STATUS"),
    *("/status?token=x", "/status#", "http://127.0.0.1/status", "*", "/link/", "/operator.token"),
)
METHODS = ("GET", "HEAD", "POST", "PUT", "OPTIONS", "CONNECT", "get", "STATUS")
UPGRADE = (
    "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
)
NONSENSE = b"\x82\x80\0\0\0\0"
"""An empty frame, with which no handshake begins. If the request before it opened a websocket, the link closes it."""


@pytest.fixture(autouse=True)
def _no_stranger_fills_the_log(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert [record.getMessage() for record in caplog.records] == []


@pytest.fixture(scope="module")
def token(keys: Keys) -> str:
    return (keys.folder / "operator" / "operator.token").read_text().strip()


@pytest.fixture(scope="module")
def link(keys: Keys) -> Iterator[Link]:
    """A link with a client. Without TLS a connection costs little, and no address is shut out."""
    with link_with_pages(keys, tls=False) as link, Client(f"{HOST}:{link.port}", keys.clients[0], tls=False):
        until(lambda: 0 in link.present())
        yield link


def request(method: str, path: str, *headers: str) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", *headers]
    return "".join(f"{line.strip()}\r\n" for line in lines).encode("latin-1") + b"\r\n"


def code_of(answer: bytes) -> int | None:
    """The status code; None if the connection was closed without an answer."""
    return int(answer.split(b" ", 2)[1]) if answer else None


def body_of(answer: bytes) -> bytes:
    head, _, body = answer.partition(b"\r\n\r\n")
    length = next(line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))
    assert len(body) == int(length.split(b":")[1])
    return body


def wrong_headers(token: str) -> dict[str, tuple[str, ...]]:
    """What may stand in the place of the token and must not open anything."""
    basic = base64.b64encode(f"operator:{token}".encode()).decode()
    return {
        "no token": (),
        "no scheme": (f"Authorization: {token}",),
        "Basic": (f"Authorization: Basic {basic}",),
        "Bearer in small letters": (f"Authorization: bearer {token}",),
        "a part": (f"Authorization: Bearer {token[:-1]}",),
        "another": (f"Authorization: Bearer {'0' * len(token)}",),
        "not ASCII": ("Authorization: Bearer \xe9\xff",),
        "the same twice": (f"Authorization: Bearer {token}", f"Authorization: Bearer {token}"),
        "a wrong one last": (f"Authorization: Bearer {token}", "Authorization: Bearer x"),
        "a cookie": (f"Cookie: token={token}",),
    }


def test_without_credentials_nothing_answers_but_health(link: Link) -> None:
    """Every path with every method, as a page and as a websocket."""
    answered = set()
    for path, method, upgrade in product(PATHS, METHODS, ((), (UPGRADE,))):
        code = code_of(say(link, request(method, path, *upgrade) + NONSENSE))
        assert code in (200, 404, 101, None), (path, method, upgrade, code)
        if code in (200, 101):
            answered.add((path, method, bool(upgrade), code))
    health = set(product(["/health"], ["GET", "HEAD"], [False, True], [200]))
    assert answered == health | {(PATH, "GET", True, 101)}


@pytest.mark.parametrize("path", ["/status", "/metrics"])
def test_a_wrong_token_opens_nothing(link: Link, token: str, path: str) -> None:
    for name, headers in wrong_headers(token).items():
        for upgrade in ((), (UPGRADE,)):
            answer = say(link, request("GET", path, *headers, *upgrade))
            assert code_of(answer) == 404, name
            assert body_of(answer) == b""
            assert token.encode() not in answer


def test_a_token_opens_no_other_path_or_method(link: Link, token: str) -> None:
    bearer = f"Authorization: Bearer {token}"
    asked = product(METHODS, PATHS)
    opened = {(method, path) for method, path in asked if code_of(say(link, request(method, path, bearer))) == 200}
    assert opened == set(product(("GET", "HEAD"), ("/health", "/status", "/metrics")))


def test_a_token_proves_nothing_on_a_websocket(link: Link, token: str) -> None:
    frame = bytes([0x82, 0x80 | 40]) + bytes(4) + bytes(40)
    answer = say(link, request("GET", PATH, UPGRADE, f"Authorization: Bearer {token}") + frame)
    assert answer.startswith(b"HTTP/1.1 101 ")
    closing = answer.partition(b"\r\n\r\n")[2]
    assert closing[0] == 0x88, "expected a frame that closes"
    assert int.from_bytes(closing[2:4], "big") == REFUSED
    assert link.present().keys() == {0}


def test_the_operator_sees_the_status_and_the_metrics(link: Link, token: str) -> None:
    answer = say(link, request("GET", "/status", f"Authorization: Bearer {token}"))
    assert b"Content-Type: application/json" in answer
    assert b"Cache-Control: no-store" in answer
    status = msgspec.json.decode(body_of(answer), type=Status)
    assert (status.clients_connected, status.connected, status.doing) == (1, "0", "starting")
    answer = say(link, request("GET", "/metrics", f"Authorization: Bearer {token}"))
    assert b"Content-Type: text/plain; version=0.0.4; charset=utf-8" in answer
    shown = parse(body_of(answer).decode())
    assert shown["baffle_clients_connected"].value == 1
    assert shown["baffle_turned_away_total"].kind == "counter"
    answer = say(link, request("HEAD", "/health"))
    assert b"Content-Length: 3\r\n" in answer
    assert answer.endswith(b"\r\n\r\n")


def test_only_failures_are_counted_and_shut_an_address_out(keys: Keys, token: str) -> None:
    """The operator and a monitor may ask as often as they like. An address that guesses tokens is shut out."""
    tls = client_tls(keys.clients[0])
    with link_with_pages(keys) as link:
        operator = request("GET", "/status", f"Authorization: Bearer {token}")
        for _ in range(2 * door.FAILURES):
            assert code_of(say(link, request("GET", "/health"), tls)) == 200
            answer = say(link, operator, tls)
        assert msgspec.json.decode(body_of(answer), type=Status).turned_away == 0
        with suppress(OSError):  # a connection that is closed at once
            while True:
                assert code_of(say(link, request("GET", "/status", "Authorization: Bearer guess"), tls)) == 404


def test_without_a_token_there_is_no_operator(keys: Keys) -> None:
    untrimmed = Request("/status", Headers([("Authorization", "Bearer ")]))
    given = Request("/status", Headers([("Authorization", f"Bearer {keys.server.token}")]))
    for pages in (Pages(""), Pages("", Board().status), Pages(keys.server.token)):
        for asked in (untrimmed, given):
            assert pages.answer(asked, LinkCounts()) is NOT_FOUND
    with linked(keys, tls=False) as at:  # a link that is given no pages
        assert code_of(say(at.link, request("GET", "/status", f"Authorization: Bearer {keys.server.token}"))) == 404
