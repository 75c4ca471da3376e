"""A client's line: addresses, pauses, leaving, and servers that are not the client's own."""

import select
import socket
import time
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import pytest

from baffle.errors import TransportError, UnprovedError
from baffle.network.link.client import FIRST_PAUSE, LONGEST_PAUSE, OPEN_SECONDS, split
from tests.support.links import HOST, Client, Keys, answer_to, linked, new_keys, question, until


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [("fl.example.org:9092", "fl.example.org", 9092), ("127.0.0.1:1", "127.0.0.1", 1), ("[::1]:65535", "::1", 65535)],
)
def test_addresses(address: str, host: str, port: int) -> None:
    assert split(address) == (host, port)


@pytest.mark.parametrize(
    "address",
    [
        *("", "host", ":1", "host:", "host:0", "host:65536", "host:1:2", "::1:9092", "a b:1", "a/b:1", "user@host:1"),
        *("host?x:1", "host#x:1", "[::1:1", "host:٣", "host:+1", "host:1\n", "[]:1", "é:1", "https://host:1"),
    ],
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(TransportError, match="expected an address as host:port"):
        split(address)


@pytest.mark.parametrize("address", ["a..b:1", f"{'x' * 64}.example:1", "0.0.0.0.0:1"])
def test_a_name_that_cannot_be_looked_up_is_tried_again(keys: Keys, address: str) -> None:
    with Client(address, keys.clients[0]) as client:
        until(lambda: client.told)
        assert "cannot be reached" in client.told[0]
        assert client.told[0].endswith("trying again")
    assert not client.fault


def test_a_client_leaves_quickly_while_no_server_answers(keys: Keys) -> None:
    with socket.create_server((HOST, 0), backlog=0) as deaf, ExitStack() as waiting:
        for _ in range(3):  # beyond its backlog even TCP gets no answer
            one = waiting.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(deaf.getsockname())
        for tls in (True, False):
            with Client(f"{HOST}:{deaf.getsockname()[1]}", keys.clients[0], tls=tls) as client:
                until(lambda client=client: client.line._thread.is_alive())  # type: ignore[misc]
                begun = time.monotonic()
            assert time.monotonic() - begun < OPEN_SECONDS, "it does not wait until the attempt has failed"


def test_a_server_cannot_send_a_client_elsewhere(keys: Keys) -> None:
    with socket.create_server((HOST, 0)) as elsewhere, socket.create_server((HOST, 0)) as false:
        target = f"{HOST}:{elsewhere.getsockname()[1]}"
        redirect = f"HTTP/1.1 302 Found\r\nLocation: ws://{target}/link\r\nContent-Length: 0\r\n\r\n"
        with Client(f"{HOST}:{false.getsockname()[1]}", keys.clients[0], tls=False) as client:
            for _ in range(2):
                connection, _ = false.accept()
                with connection:
                    connection.recv(4096)
                    connection.sendall(redirect.encode())
            until(lambda: client.told)
        assert not select.select([elsewhere], [], [], 0)[0]
    assert "does not answer as a BAFFLE server" in client.told[0]


@pytest.mark.parametrize("tls", [False, True])
def test_an_impostor_does_not_end_a_client_that_has_met_its_server(keys: Keys, tmp_path: Path, tls: bool) -> None:
    """Without TLS it does not pass the handshake, with TLS its certificate is another CA's. When the server is back, so
    is its client."""
    others = new_keys(tmp_path / "others", 1)
    words = "was not issued by this client's CA" if tls else "is not the server that this client's roster names"
    with ExitStack() as stack:
        with linked(keys, tls=tls) as at:
            client = stack.enter_context(at.client(0))
            at.until_present(0)
        with linked(others, port=at.link.port, tls=tls):
            until(lambda: any(words in told and told.endswith("; trying again") for told in client.told))
        with linked(keys, port=at.link.port, tls=tls) as again:
            again.until_present(0)
            assert set(again.ask(0)) == {0}
    assert not client.fault


@pytest.mark.parametrize("tls", [False, True])
def test_a_client_that_has_never_met_its_server_says_so_and_ends(keys: Keys, tmp_path: Path, tls: bool) -> None:
    with (
        linked(new_keys(tmp_path / "others", 1), tls=tls) as false,
        Client(false.address, keys.clients[0], tls=tls) as client,
    ):
        until(lambda: client.ended)
    assert isinstance(client.fault, UnprovedError)


def test_requests_that_the_server_has_not_signed_are_not_handed_out(keys: Keys) -> None:
    """A proxy that ends TLS changes a bit of a request."""
    with linked(keys, 0, tls=False) as at:
        client, connection = at.clients[0], at.link._exchanges.connections[0]
        send = connection.send
        connection.send = lambda frame: send(frame[:-1] + bytes([frame[-1] ^ 1]))  # type: ignore[method-assign]
        assert at.ask(0) == {0: answer_to(question(0))}
        assert len(client.asked) == 1, "asked again over another connection, without the change"
        assert any("a request that the server has not signed; trying again" in words for words in client.told)


# Pauses between attempts to connect


def longest(pauses: list[float]) -> list[float]:
    """The upper ends of the ranges from which pauses were drawn, if they doubled each time."""
    return [min(FIRST_PAUSE * 2**n, LONGEST_PAUSE) for n in range(len(pauses))]


def test_pauses_between_attempts_grow_and_are_random(keys: Keys) -> None:
    with linked(keys) as at:
        pass
    with at.client(0) as client:
        until(lambda: len(client.pauses.made) >= 20)
    made = client.pauses.made
    assert all(most / 2 <= pause <= most for pause, most in zip(made, longest(made), strict=True))
    assert longest(made)[-1] == LONGEST_PAUSE
    assert all(one != other for one, other in pairwise(made))
    assert sum("cannot be reached" in words for words in client.told) == 1, "a change is logged once"


def test_after_a_connection_that_lasted_pauses_begin_anew(keys: Keys) -> None:
    with linked(keys) as at:
        pass
    with at.client(0) as client:
        until(lambda: len(client.pauses.made) >= 5)
        with linked(keys, port=at.link.port) as again:
            again.until_present(0)
            until(lambda: client.line._opened is not None)
            client.pauses.time += 2 * LONGEST_PAUSE
            before = len(client.pauses.made)
        until(lambda: len(client.pauses.made) > before)
    assert client.pauses.made[before] <= FIRST_PAUSE


def test_a_client_that_is_thrown_out_at_once_does_not_hurry_back(keys: Keys) -> None:
    """It gives an answer that is far too large whenever it is asked."""
    with linked(keys, 0, hold=True, answer=lambda _body: bytes(1 << 20)) as at:
        for _ in range(4):
            at.until_present(0)
            assert at.ask(0) == {}
        made = at.clients[0].pauses.made
        until(lambda: len(made) >= 4)
        assert all(most / 2 <= pause <= most for pause, most in zip(made[:4], longest(made[:4]), strict=True))
        assert at.link.counts["refused"] == 4
        assert sum("client 0 is disconnected" in words for words in at.told) == 1, "not logged again at once"
