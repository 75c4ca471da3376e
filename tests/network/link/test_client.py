"""A client's line: addresses, pauses, leaving, and servers that are not what they should be."""

import socket
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from baffle.errors import TransportError, UnprovedError
from baffle.network.link import client as line_module
from baffle.network.link.client import split
from tests.support.links import (
    HOST,
    Client,
    Keys,
    linked,
    new_keys,
    until,
)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, float]]:
    """The range of each pause that lines make; none lasts for long."""
    made: list[tuple[float, float]] = []

    def uniform(least: float, most: float) -> float:
        made.append((least, most))
        return 0.01

    monkeypatch.setattr("baffle.network.link.client.random.uniform", uniform)
    return made


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


def test_a_client_leaves_quickly_while_nobody_answers(keys: Keys) -> None:
    with socket.create_server((HOST, 0), backlog=0) as deaf:
        address = f"{HOST}:{deaf.getsockname()[1]}"
        waiting = []
        for _ in range(3):  # beyond its backlog even TCP gets no answer
            one = socket.socket()
            one.setblocking(False)
            one.connect_ex(deaf.getsockname())
            waiting.append(one)
        for tls in (True, False):
            client = Client(address, keys.clients[0], tls=tls)
            client.__enter__()
            time.sleep(0.2)
            begun = time.monotonic()
            client.leave()
            assert time.monotonic() - begun < 1.5
        for one in waiting:
            one.close()


def test_a_server_cannot_send_a_client_elsewhere(keys: Keys) -> None:
    with socket.create_server((HOST, 0)) as elsewhere, socket.create_server((HOST, 0)) as false:
        elsewhere.settimeout(0.5)
        with Client(f"{HOST}:{false.getsockname()[1]}", keys.clients[0], tls=False) as client:
            connection, _ = false.accept()
            with connection:
                connection.recv(4096)
                target = f"{HOST}:{elsewhere.getsockname()[1]}"
                connection.sendall(
                    f"HTTP/1.1 302 Found\r\nLocation: ws://{target}/link\r\nContent-Length: 0\r\n\r\n".encode()
                )
                until(lambda: client.told)
        with pytest.raises(TimeoutError):
            elsewhere.accept()
    assert "does not answer as a BAFFLE server" in client.told[0]


@pytest.mark.parametrize("tls", [False, True])
def test_somebody_in_the_servers_place_does_not_end_a_client_that_has_met_its_server(
    keys: Keys, tmp_path: Path, pauses: list[tuple[float, float]], tls: bool
) -> None:
    """Without TLS it does not pass the handshake, with TLS its certificate is another CA's. When the server is back, so
    is its client."""
    others = new_keys(tmp_path / "others", 1)
    words = "was not issued by this client's CA" if tls else "is not the server that this client's roster names"
    with ExitStack() as stack:
        with linked(keys, tls=tls) as at:
            client = stack.enter_context(Client(at.address, keys.clients[0], tls=tls))
            at.until_present(0)
        with linked(others, port=at.link.port, tls=tls):
            until(lambda: any(words in told and told.endswith("; trying again") for told in client.told))
        with linked(keys, port=at.link.port, tls=tls) as again:
            again.until_present(0)
            assert set(again.ask(0)) == {0}
    assert not client.fault
    assert pauses


@pytest.mark.parametrize("tls", [False, True])
def test_a_client_that_has_never_met_its_server_says_what_is_wrong_and_ends(
    keys: Keys, tmp_path: Path, tls: bool
) -> None:
    with (
        linked(new_keys(tmp_path / "others", 1), tls=tls) as false,
        Client(false.address, keys.clients[0], tls=tls) as client,
    ):
        until(lambda: client.ended)
    assert isinstance(client.fault, UnprovedError)


def test_requests_that_the_server_has_not_signed_are_not_handed_out(keys: Keys) -> None:
    """A proxy that ends TLS changes a bit of a request."""
    with linked(keys, tls=False, seconds=1) as at, Client(at.address, keys.clients[0], tls=False) as client:
        at.until_present(0)
        exchanges = at.link._exchanges
        send = exchanges._send

        def changed(number: int, request: object) -> None:
            connection = exchanges.connections[number]
            connection.send(request.frame[:-1] + bytes([request.frame[-1] ^ 1]))  # type: ignore[attr-defined]

        exchanges._send = changed  # type: ignore[method-assign, assignment]
        assert at.ask(0) == {}
        assert client.asked == []
        assert any("a request that the server has not signed; trying again" in words for words in client.told)
        exchanges._send = send  # type: ignore[method-assign]
        at.until_present(0)
        until(lambda: at.ask(0))


def test_pauses_between_attempts_grow_and_are_random(keys: Keys, pauses: list[tuple[float, float]]) -> None:
    with linked(keys) as at:
        pass
    with Client(at.address, keys.clients[0]) as client:
        until(lambda: len(pauses) >= 10)
    longest = [min(line_module.FIRST_PAUSE * 2**n, line_module.LONGEST_PAUSE) for n in range(10)]
    assert pauses[:10] == [(most / 2, most) for most in longest]
    assert longest[-1] == line_module.LONGEST_PAUSE
    assert sum("cannot be reached" in words for words in client.told) == 1, "a change is told once"


def test_after_a_connection_that_lasted_pauses_begin_anew(
    keys: Keys, pauses: list[tuple[float, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_module, "FIRST_PAUSE", 0.02)
    monkeypatch.setattr(line_module, "LONGEST_PAUSE", 0.3)
    with linked(keys) as at:
        pass
    with Client(at.address, keys.clients[0]):
        until(lambda: (0.15, 0.3) in pauses)
        with linked(keys, port=at.link.port) as again:
            again.until_present(0)
            time.sleep(0.4)
            before = len(pauses)
        until(lambda: len(pauses) > before)
    assert pauses[before][1] == 0.02


def test_a_client_that_is_thrown_out_at_once_does_not_hurry_back(keys: Keys, pauses: list[tuple[float, float]]) -> None:
    """It gives an answer that is far too large whenever it is asked."""
    with linked(keys, seconds=5) as at, Client(at.address, keys.clients[0], answer=lambda _body: bytes(1 << 20)):
        for _ in range(4):
            at.until_present(0)
            assert at.ask(0) == {}
        until(lambda: len(pauses) >= 4)
        assert [most for _, most in pauses[:4]] == [0.2, 0.4, 0.8, 1.6]
        assert at.link.counts["refused"] == 4
        assert sum("client 0 is disconnected" in words for words in at.told) == 1, "not told again at once"
