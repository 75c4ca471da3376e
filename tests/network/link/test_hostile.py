"""Strangers at the port while a run goes on: whatever they send, they are turned away, and no client notices."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from websockets.frames import Frame, Opcode

from baffle.core.messages import encode
from baffle.network.link.client import client_tls
from baffle.network.link.handshake import Accepted, Greeting
from tests.support.links import HOST, UPGRADE, Keys, Linked, dial, linked, say


@pytest.fixture(scope="module")
def busy(keys: Keys) -> Iterator[Linked]:
    """A link with three clients."""
    with linked(keys, 0, 1, 2) as at:
        yield at


def masked(opcode: Opcode, data: bytes = b"", *, fin: bool = True) -> bytes:
    """A frame as clients send it, if need be against the rules."""
    length = bytes([0x80 | len(data)]) if len(data) < 126 else b"\xfe" + len(data).to_bytes(2, "big")
    return bytes([fin << 7 | opcode]) + length + bytes(4) + data


def page(path: str, *headers: str, method: str = "GET") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: x", *headers, "", ""]).encode()


GREETING = encode(Greeting(bytes(32), HOST))
ODD = {
    "a page and frames behind it": page("/health") + masked(Opcode.BINARY, GREETING),
    "an upgrade and a close frame": UPGRADE + masked(Opcode.CLOSE),
    "an upgrade, a close frame and a greeting": UPGRADE + masked(Opcode.CLOSE) + masked(Opcode.BINARY, GREETING),
    "an upgrade twice": UPGRADE + UPGRADE,
    "an upgrade with a body": UPGRADE.replace(b"Host: x", b"Host: x\r\nContent-Length: 9") + b"123456789",
    "two greetings": UPGRADE + 2 * masked(Opcode.BINARY, GREETING),
    "a greeting in pieces": UPGRADE + masked(Opcode.BINARY, GREETING, fin=False) + masked(Opcode.CONT, b""),
    "a message of the server": UPGRADE + masked(Opcode.BINARY, encode(Accepted())),
    "a frame without a mask": UPGRADE + Frame(Opcode.BINARY, GREETING).serialize(mask=False),
    "a frame of a kind that does not exist": UPGRADE + b"\x83\x80\x00\x00\x00\x00",
    "a frame of 2⁶³ bytes": UPGRADE + b"\x82\xff" + b"\xff" * 8 + bytes(4),
    "a close frame with a code that does not exist": UPGRADE + masked(Opcode.CLOSE, b"\x00\x01"),
    "a line without end": b"GET /" + b"x" * 20_000,
    "too many headers": page("/health", *[f"h{n}: v" for n in range(500)]),
    "letters that are no letters": b"GET /h\xc3\xa9alth HTTP/1.1\r\nHost: x\r\n\r\n",
    "a message that is no HTTP": b"GET /health\r\n\r\n",
    "a body of 150 MB": page("/health", "Content-Length: 150000000", method="POST") + bytes(30_000),
    "a body in chunks": page("/health", "Transfer-Encoding: chunked", method="POST") + b"ffffffff\r\n",
    "a request to a proxy": b"CONNECT example.org:443 HTTP/1.1\r\nHost: example.org\r\n\r\n",
    "the bytes of all kinds": bytes(range(256)),
}


@pytest.mark.parametrize("sent", ODD.values(), ids=ODD)
def test_odd_requests_are_turned_away(busy: Linked, sent: bytes) -> None:
    say(busy.link, sent, client_tls(busy.keys.clients[0]))  # returns when the link closes the connection
    assert set(busy.ask(0, 1, 2)) == {0, 1, 2}
    assert busy.told == []


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    before=st.sampled_from([b"", page("/health")[:-2], UPGRADE, UPGRADE + masked(Opcode.BINARY, GREETING)]),
    sent=st.one_of(
        st.binary(max_size=300),
        st.lists(
            st.builds(masked, st.sampled_from(list(Opcode)), st.binary(max_size=130), fin=st.booleans()), max_size=5
        ).map(b"".join),
    ),
)
def test_random_bytes_do_no_harm(busy: Linked, before: bytes, sent: bytes) -> None:
    with busy.dial() as stranger:
        stranger.sendall(before + sent)
    with dial(busy.address) as stranger:
        stranger.sendall(sent)
    assert set(busy.ask(0, 1, 2)) == {0, 1, 2}
    assert set(busy.link.present()) == {0, 1, 2}
    assert busy.told == []


def test_four_hundred_open_sockets_leave_room_for_a_client_from_elsewhere(keys: Keys) -> None:
    with linked(keys) as at, ExitStack() as crowd:
        for _ in range(400):
            crowd.enter_context(dial(at.address, source="127.0.0.6"))
        with at.client(0):
            at.until_present(0)
            assert len(at.link._port._all) <= at.link._port.door.places + 1


def test_a_flood_from_an_address_that_is_shut_out_does_not_keep_clients_waiting(keys: Keys) -> None:
    with linked(keys, 0) as at:
        for _ in range(500):
            dial(at.address, source="127.0.0.6").close()
        assert set(at.ask(0)) == {0}
        with at.client(1):
            at.until_present(1)
