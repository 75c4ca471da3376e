"""What the link's port answers to strangers: /health and nothing else. Whoever has the operator's token also sees
/status and /metrics."""

import base64
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import msgspec
import pytest
from websockets.datastructures import Headers
from websockets.http11 import Request

from baffle.network.authority import ServerKeys
from baffle.network.board import Board
from baffle.network.link import connection, door
from baffle.network.link.handshake import PATH, REFUSED
from baffle.network.link.pages import Pages
from baffle.network.link.server import Link, server_tls
from baffle.network.status import LinkCounts, Status
from tests.support.link_pages import client_connected, link_with_pages, new_keys, say
from tests.support.prometheus import parse

PATHS = (
    "/",
    "/health",
    "/status",
    "/metrics",
    PATH,
    "/health/",
    "/status/",
    "//status",
    "/./status",
    "/health/../status",
    "/%73tatus",
    "/STATUS",
    "/status?",
    "/status?token=x",
    "/status#",
    "/metrics;a",
    "/health?",
    "http://127.0.0.1/status",
    "*",
    "/link/",
    "/keys",
    "/operator.token",
    "/favicon.ico",
    "/debug",
    "/api/v1/status",
    "/control",
)
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "CONNECT", "get", "STATUS")
UPGRADE = (
    "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
)
NONSENSE = b"\x82\x80\0\0\0\0"
"""An empty frame, with which no handshake begins. If the request before it opened a websocket, the link closes it."""


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "CLOSE_SECONDS", 0.1)


@pytest.fixture(autouse=True)
def _no_stranger_fills_the_log(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert [record.getMessage() for record in caplog.records] == []


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new_keys(tmp_path_factory.mktemp("keys") / "keys")


@pytest.fixture(scope="module")
def token(keys: Path) -> str:
    return (keys / "operator" / "operator.token").read_text().strip()


@pytest.fixture(scope="module")
def link(keys: Path) -> Iterator[Link]:
    """A client is connected, so this address is not shut out whatever comes from it."""
    with link_with_pages(keys) as link, client_connected(link, keys):
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
        "empty": ("Authorization:",),
        "no scheme": (f"Authorization: {token}",),
        "Basic": (f"Authorization: Basic {basic}",),
        "Basic with the token": (f"Authorization: Basic {token}",),
        "Bearer in small letters": (f"Authorization: bearer {token}",),
        "two spaces": (f"Authorization: Bearer  {token}",),
        "Bearer alone": ("Authorization: Bearer",),
        "a part": (f"Authorization: Bearer {token[:-1]}",),
        "more": (f"Authorization: Bearer {token}0",),
        "another": (f"Authorization: Bearer {'0' * len(token)}",),
        "not ASCII": ("Authorization: Bearer \xe9\xff",),
        "two in one": (f"Authorization: Bearer {token}, Bearer {token}",),
        "the same twice": (f"Authorization: Bearer {token}", f"Authorization: Bearer {token}"),
        "a wrong one first": ("Authorization: Bearer x", f"Authorization: Bearer {token}"),
        "a wrong one last": (f"Authorization: Bearer {token}", "Authorization: Bearer x"),
        "a proxy's": (f"Proxy-Authorization: Bearer {token}",),
        "a cookie": (f"Cookie: token={token}",),
    }


def test_without_credentials_nothing_answers_but_health(link: Link, keys: Path) -> None:
    """Every path with every method, as a page and as a websocket."""
    answered = set()
    for path, method, upgrade in product(PATHS, METHODS, ((), (UPGRADE,))):
        code = code_of(say(link, keys, request(method, path, *upgrade) + NONSENSE))
        assert code in (200, 404, 101, None), (path, method, upgrade, code)
        if code in (200, 101):
            answered.add((path, method, bool(upgrade), code))
    assert answered == {
        ("/health", "GET", False, 200),
        ("/health", "GET", True, 200),
        ("/health", "HEAD", False, 200),
        ("/health", "HEAD", True, 200),
        (PATH, "GET", True, 101),
    }


@pytest.mark.parametrize("path", ["/status", "/metrics"])
def test_a_wrong_token_opens_nothing(link: Link, keys: Path, token: str, path: str) -> None:
    for name, headers in wrong_headers(token).items():
        for upgrade in ((), (UPGRADE,)):
            answer = say(link, keys, request("GET", path, *headers, *upgrade))
            assert code_of(answer) == 404, name
            assert body_of(answer) == b""
            assert token.encode() not in answer


def test_a_token_opens_no_other_path_or_method(link: Link, keys: Path, token: str) -> None:
    bearer = f"Authorization: Bearer {token}"
    opened = {
        (method, path)
        for path, method in product(PATHS, METHODS)
        if code_of(say(link, keys, request(method, path, bearer))) == 200
    }
    assert opened == set(product(("GET", "HEAD"), ("/health", "/status", "/metrics")))


def test_a_websocket_of_a_stranger_is_closed_when_it_cannot_prove_itself(
    link: Link, keys: Path, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the token nor silence proves anything."""
    frame = bytes([0x82, 0x80 | 40]) + bytes(4) + bytes(40)
    opening = request("GET", PATH, UPGRADE, f"Authorization: Bearer {token}")
    answer = say(link, keys, opening + frame)
    assert answer.startswith(b"HTTP/1.1 101 ")
    closing = answer.partition(b"\r\n\r\n")[2]
    assert closing[0] == 0x88, "expected a frame that closes"
    assert int.from_bytes(closing[2:4], "big") == REFUSED
    monkeypatch.setattr(door, "SECONDS", 0.2)
    assert say(link, keys, opening).partition(b"\r\n\r\n")[2] == b""
    assert link.present().keys() == {0}


def test_requests_that_are_no_http_get_nothing(link: Link, keys: Path) -> None:
    for data in (
        b"\r\n\r\n",
        b"GET /health\r\n\r\n",
        b"GET /health HTTP/2.0\r\n\r\n",
        b"GET /status HTTP/1.1\r\nAuthorization : x\r\n\r\n",
        b"GET /status HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /health HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc",
        b"GET /caf\xc3\xa9 HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64) + b"\r\n\r\n",
    ):
        assert say(link, keys, data) == b"", data
    for data, code in (
        (b"GET /" + b"a" * 9_000 + b" HTTP/1.1\r\n\r\n", 414),
        (b"GET /health HTTP/1.1\r\nA: " + b"a" * 9_000 + b"\r\n\r\n", 431),
    ):
        assert code_of(say(link, keys, data)) == code


def test_the_operator_sees_the_status(link: Link, keys: Path, token: str) -> None:
    answer = say(link, keys, request("GET", "/status", f"Authorization: Bearer {token}"))
    assert b"Content-Type: application/json" in answer
    assert b"Cache-Control: no-store" in answer
    status = msgspec.json.decode(body_of(answer), type=Status)
    assert (status.clients_connected, status.connected, status.doing) == (1, "0", "starting")


def test_the_operator_sees_the_metrics(link: Link, keys: Path, token: str) -> None:
    answer = say(link, keys, request("GET", "/metrics", f"Authorization: Bearer {token}"))
    assert b"Content-Type: text/plain; version=0.0.4; charset=utf-8" in answer
    shown = parse(body_of(answer).decode())
    assert shown["baffle_clients_connected"].value == 1
    assert shown["baffle_turned_away_total"].kind == "counter"


def test_head_has_the_length_and_no_body(link: Link, keys: Path) -> None:
    answer = say(link, keys, request("HEAD", "/health"))
    assert b"Content-Length: 3\r\n" in answer
    assert answer.endswith(b"\r\n\r\n")


def test_who_asks_is_counted_and_shut_out_only_after_failures(keys: Path, token: str) -> None:
    """The operator and a monitor may ask as often as they like. Whoever guesses tokens is shut out."""
    with link_with_pages(keys) as link:
        operator = request("GET", "/status", f"Authorization: Bearer {token}")
        for _ in range(2 * door.FAILURES):
            assert code_of(say(link, keys, request("GET", "/health"))) == 200
            answer = say(link, keys, operator)
        assert msgspec.json.decode(body_of(answer), type=Status).turned_away == 0
        for _ in range(4 * door.FAILURES):
            try:
                code = code_of(say(link, keys, request("GET", "/status", "Authorization: Bearer guess")))
            except OSError:
                break
            assert code == 404
        else:
            pytest.fail("nobody is shut out")


def test_without_a_token_nobody_is_an_operator(keys: Path) -> None:
    own = ServerKeys.load(keys / "server")
    untrimmed = Request("/status", Headers([("Authorization", "Bearer ")]))
    assert Pages("", Board().status).answer(untrimmed, LinkCounts).status_code == 404
    for pages in (None, Pages(""), Pages("", Board().status), Pages(own.token)):
        with Link(own, "127.0.0.1", 0, server_tls(own), 5.0, pages) as link:
            for header in ("Authorization: Bearer", "Authorization: Bearer ", f"Authorization: Bearer {own.token}"):
                assert code_of(say(link, keys, request("GET", "/status", header))) == 404
