"""The handshake: who shows what to whom, and who is refused before it costs anything."""

import secrets
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from threading import Thread

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st
from websockets.exceptions import ConnectionClosed
from websockets.sync.server import ServerConnection, serve

from baffle.core.messages import decode, encode
from baffle.errors import KeyRefusedError, MessageError, RefusalError, TransportError
from baffle.network.link import door, handshake
from baffle.network.link.client import client_tls
from baffle.network.link.handshake import (
    HANDSHAKE_BYTES,
    REFUSED,
    Accepted,
    Challenge,
    ClientSide,
    Greeting,
    Proof,
    ServerSide,
)
from baffle.network.link.server import server_tls
from tests.support.links import HOST, Client, Keys, dial, is_closed, linked, opened, proved, until

SERVER, CLIENT, OTHER = (Ed25519PrivateKey.from_private_bytes(bytes([n]) * 32) for n in (1, 2, 3))
PROCESS = bytes(range(16))


def public(key: Ed25519PrivateKey) -> bytes:
    return key.public_key().public_bytes_raw()


def server_side(identity: Ed25519PrivateKey = SERVER) -> ServerSide:
    return ServerSide(identity, {public(CLIENT): 7}, {HOST})


def client_side(identity: Ed25519PrivateKey = CLIENT, host: str = HOST) -> ClientSide:
    return ClientSide(identity, public(SERVER), host, PROCESS)


def test_both_ends_prove_who_they_are() -> None:
    server, client = server_side(), client_side()
    proof = client.proof(server.take(client.greeting()))
    decode(server.take(proof), Accepted)
    number: int | None = server.client
    assert (number, server.process) == (7, PROCESS)


def test_all_frames_fit() -> None:
    server, client = server_side(), client_side()
    longest = encode(Greeting(secrets.token_bytes(32), "h" * 255))
    challenge = server.take(client.greeting())
    assert max(map(len, (longest, challenge, client.proof(challenge)))) <= HANDSHAKE_BYTES


def test_a_client_shows_nothing_to_another_server() -> None:
    client = client_side()
    with pytest.raises(MessageError, match="not the server that this client's roster names"):
        client.proof(server_side(OTHER).take(client.greeting()))


def test_a_challenge_cannot_be_used_again() -> None:
    challenge = server_side().take(client_side().greeting())
    other = client_side()
    other.greeting()
    with pytest.raises(MessageError, match="not the server"):
        other.proof(challenge)


def test_a_challenge_for_another_name_is_refused() -> None:
    """A false server passes a client's greeting on to the true one, which knows the client's nonce but not its name."""
    client = client_side(host="false.example")
    nonce = decode(client.greeting(), Greeting).nonce
    with pytest.raises(MessageError, match="not the server"):
        client.proof(server_side().take(encode(Greeting(nonce, HOST))))


def test_a_server_does_not_sign_for_names_that_are_not_its_own() -> None:
    with pytest.raises(RefusalError, match=r"not called 'false.example'; make a certificate"):
        server_side().take(client_side(host="false.example").greeting())


def test_a_proof_cannot_be_used_again() -> None:
    server, client = server_side(), client_side()
    greeting = client.greeting()
    proof = client.proof(server.take(greeting))
    again = server_side()
    again.take(greeting)
    with pytest.raises(RefusalError, match="has not signed"):
        again.take(proof)
    assert again.client is None


def test_a_proof_names_its_process() -> None:
    server, client = server_side(), client_side()
    proof = decode(client.proof(server.take(client.greeting())), Proof)
    with pytest.raises(RefusalError, match="has not signed"):
        server.take(encode(Proof(proof.key, bytes(16), proof.signature)))


def test_a_stranger_with_a_clients_public_key_is_refused() -> None:
    server, stranger = server_side(), client_side(OTHER)
    proof = decode(stranger.proof(server.take(stranger.greeting())), Proof)
    with pytest.raises(RefusalError, match="has not signed"):
        server.take(encode(Proof(public(CLIENT), PROCESS, proof.signature)))


def test_the_servers_own_challenge_is_no_proof() -> None:
    server = server_side()
    challenge = decode(server.take(client_side().greeting()), Challenge)
    with pytest.raises(RefusalError, match="has not signed"):
        server.take(encode(Proof(public(CLIENT), PROCESS, challenge.signature)))


def test_a_key_that_is_not_on_the_roster_is_refused_before_anything_is_verified(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server, stranger = server_side(), client_side(OTHER)
    proof = stranger.proof(server.take(stranger.greeting()))
    monkeypatch.setattr(handshake, "signed", lambda *_arguments: pytest.fail("a stranger's signature was verified"))
    with pytest.raises(RefusalError, match="not on the server's roster"):
        server.take(proof)


@given(st.data())
def test_a_flipped_bit_anywhere_ends_the_handshake(data: st.DataObject) -> None:
    server, client = server_side(), client_side()
    which = data.draw(st.integers(0, 2))

    def pass_on(frame: bytes, number: int) -> bytes:
        if number != which:
            return frame
        bit = data.draw(st.integers(0, 8 * len(frame) - 1))
        changed = bytearray(frame)
        changed[bit // 8] ^= 1 << bit % 8
        return bytes(changed)

    with pytest.raises(MessageError):
        server.take(
            pass_on(client.proof(pass_on(server.take(pass_on(client.greeting(), 0)), 1)), 2),
        )
    assert server.client is None


@given(st.binary(max_size=600))
def test_malformed_frames_are_refused(frame: bytes) -> None:
    with pytest.raises(MessageError):
        server_side().take(frame)
    begun = server_side()
    begun.take(client_side().greeting())
    with pytest.raises(MessageError):
        begun.take(frame)
    client = client_side()
    client.greeting()
    with pytest.raises(MessageError):
        client.proof(frame)


# Over the wire


@dataclass
class FalseServer:
    """A server with the right certificate and the wrong identity. It records what clients send to it."""

    identity: Ed25519PrivateKey
    heard: list[bytes] = field(default_factory=list)
    address: str = ""

    def meet(self, connection: ServerConnection) -> None:
        side = ServerSide(self.identity, {}, {HOST})
        try:
            for frame in connection:
                self.heard.append(frame if isinstance(frame, bytes) else frame.encode())
                connection.send(side.take(self.heard[-1]))
        except (MessageError, ConnectionClosed):
            return


@contextmanager
def false_server(keys: Keys) -> Iterator[FalseServer]:
    false = FalseServer(OTHER)
    with serve(false.meet, HOST, 0, ssl=server_tls(keys.server)) as server:
        false.address = f"{HOST}:{server.socket.getsockname()[1]}"
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield false
        server.shutdown()
        thread.join()


def test_a_client_never_shows_its_key_to_a_false_server(keys: Keys) -> None:
    with false_server(keys) as false, Client(false.address, keys.clients[0]) as client:
        until(lambda: client.ended)
    assert isinstance(client.fault, TransportError)
    assert "is not the server that this client's roster names" in str(client.fault)
    assert len(false.heard) == 1
    decode(false.heard[0], Greeting)
    own = keys.clients[0].identity.public_key().public_bytes_raw()
    assert own not in b"".join(false.heard)


def test_a_client_whose_key_is_unknown_is_told_so_and_ends(keys: Keys) -> None:
    stranger = replace(keys.clients[0], identity=Ed25519PrivateKey.generate())
    with linked(keys) as at, Client(at.address, stranger) as client:
        until(lambda: client.ended)
        assert not at.link.present()
    assert isinstance(client.fault, KeyRefusedError)
    assert "this key is not on the server's roster; expected keys from the same" in str(client.fault)


def test_a_name_that_is_not_the_servers_is_refused_in_words_of_any_script(keys: Keys) -> None:
    """The reason holds the name; a close frame has room for 123 bytes of it, which may be few letters."""
    with linked(keys) as at:
        for host in ("elsewhere.example", "例" * 120, "\N{MUSICAL SYMBOL G CLEF}" * 90):
            with opened(at.address, keys.clients[0]) as connection:
                connection.send(encode(Greeting(secrets.token_bytes(32), host)))
                with pytest.raises(ConnectionClosed) as closed:
                    connection.recv(5)
            assert closed.value.rcvd
            assert closed.value.rcvd.code == REFUSED
            assert closed.value.rcvd.reason.startswith(f"this server is not called '{host[:10]}")
        assert at.told == []


def test_names_are_compared_without_regard_to_case(keys: Keys) -> None:
    with linked(keys) as at, Client(f"LocalHost:{at.link.port}", keys.clients[0]) as client:
        until(lambda: 0 in at.link.present() or client.ended)
        assert not client.fault


def test_after_a_refused_proof_no_other_is_verified(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    verified = 0

    def signed(*_arguments: bytes) -> bool:
        nonlocal verified
        verified += 1
        return False

    with linked(keys) as at, opened(at.address, keys.clients[0]) as connection:
        side = ClientSide(keys.clients[0].identity, keys.server.roster.server_key, HOST, PROCESS)
        connection.send(side.greeting())
        proof = side.proof(connection.recv(5, decode=False))
        monkeypatch.setattr(handshake, "signed", signed)
        with connection.protocol_mutex:  # all in one piece
            for _ in range(40):
                connection.protocol.send_binary(proof)
            connection.send_data()
        with pytest.raises(ConnectionClosed):
            connection.recv(5)
    assert verified == 1


@pytest.mark.parametrize(
    "frame",
    [b"", b"\x00", bytes(HANDSHAKE_BYTES + 1), encode(Accepted()), "text"],
    ids=["empty", "short", "long", "another message", "text"],
)
def test_who_does_not_keep_to_the_handshake_is_closed(keys: Keys, frame: bytes | str) -> None:
    with linked(keys) as at:
        for begun in (False, True):
            with opened(at.address, keys.clients[0]) as connection:
                if begun:
                    connection.send(client_side().greeting())
                    connection.recv(5)
                connection.send(frame)
                with pytest.raises(ConnectionClosed):
                    connection.recv(5)
        assert not at.link.present()


@pytest.mark.slow
def test_a_stranger_has_five_seconds(keys: Keys) -> None:
    tls = client_tls(keys.clients[0])
    upgrade = b"GET /link HTTP/1.1\r\nHost: x\r\n"
    with linked(keys) as at:
        begun = time.monotonic()
        silent, in_tls, in_http = dial(at.address), dial(at.address, tls), dial(at.address, tls)
        in_http.sendall(upgrade)
        with silent, in_tls, in_http, opened(at.address, keys.clients[0]) as in_handshake:
            in_handshake.send(client_side().greeting())
            in_handshake.recv(5)
            with pytest.raises(ConnectionClosed):
                in_handshake.recv(10)
            assert all(is_closed(connection, 1) for connection in (silent, in_tls, in_http))
        assert door.SECONDS - 0.5 < time.monotonic() - begun < door.SECONDS + 2


def test_a_stranger_has_few_bytes(keys: Keys) -> None:
    with linked(keys) as at, dial(at.address, client_tls(keys.clients[0])) as stranger:
        stranger.sendall(b"GET /link HTTP/1.1\r\n")
        sent = 0
        with suppress(OSError):
            while sent < 40 * door.BYTES:
                sent += stranger.send(b"header: " + b"x" * 80 + b"\r\n")
                time.sleep(0.0005)
        assert sent < 40 * door.BYTES


def test_a_client_needs_few_of_the_bytes_that_a_stranger_has(keys: Keys) -> None:
    with linked(keys, tls=False) as at, proved(at.address, keys.clients[0], tls=False) as peer:
        (connection,) = at.link._port._all
        assert connection._received < door.BYTES / 8
        assert peer


def test_health_polled_often_is_no_failure(keys: Keys) -> None:
    with linked(keys) as at:
        for _ in range(3 * door.FAILURES):
            with dial(at.address, client_tls(keys.clients[0]), "127.0.0.9") as poll:
                poll.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
                assert poll.recv(100).startswith(b"HTTP/1.1 200 OK")
        assert at.link._port.door.turned_away == 0


def test_an_address_that_fails_often_is_shut_out_and_clients_that_share_it_get_in(keys: Keys) -> None:
    with linked(keys) as at, Client(at.address, keys.clients[0]):
        at.until_present(0)
        for source in ("127.0.0.9", HOST):
            for _ in range(3 * door.FAILURES):
                with dial(at.address, source=source) as stranger:
                    stranger.sendall(b"no TLS at all, and no end of line either")
                    assert is_closed(stranger, 5)
        with dial(at.address, source="127.0.0.9") as stranger:
            assert is_closed(stranger, 1)
        with pytest.raises((OSError, ssl.SSLError)):
            dial(at.address, client_tls(keys.clients[0]), "127.0.0.9")
        with Client(at.address, keys.clients[1]):
            at.until_present(0, 1)
