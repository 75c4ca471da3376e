"""The handshake: each end proves its identity, and strangers are refused before they cost anything."""

import secrets
import ssl
from contextlib import ExitStack, suppress

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, strategies as st
from websockets.exceptions import ConnectionClosed

from baffle.core.messages import decode, encode
from baffle.errors import MessageError, RefusalError
from baffle.network.link import door, handshake
from baffle.network.link.handshake import Accepted, Challenge, ClientSide, Greeting, Proof, ServerSide
from tests.support.links import HOST, PATIENCE, Client, Keys, dial, is_closed, linked, until

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
    challenge = server.take(client.greeting())
    proof = client.proof(challenge)
    decode(server.take(proof), Accepted)
    number: int | None = server.client
    assert (number, server.process) == (7, PROCESS)
    longest = encode(Greeting(secrets.token_bytes(32), "h" * 255))
    assert max(map(len, (longest, challenge, proof))) <= handshake.HANDSHAKE_BYTES


@pytest.mark.parametrize("misuse", ["another server's", "used again", "for another name"])
def test_a_client_shows_its_key_only_after_a_fresh_challenge_of_its_own_server(misuse: str) -> None:
    """A challenge for another name: a false server passes a client's greeting on to the true one, which knows the
    client's nonce but not the name that it called."""
    client = client_side(host="false.example" if misuse == "for another name" else HOST)
    greeting = client.greeting()
    if misuse == "another server's":
        challenge = server_side(OTHER).take(greeting)
    elif misuse == "used again":
        challenge = server_side().take(client_side().greeting())
    else:
        challenge = server_side().take(encode(Greeting(decode(greeting, Greeting).nonce, HOST)))
    with pytest.raises(MessageError, match="not the server that this client's roster names"):
        client.proof(challenge)


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


@pytest.mark.parametrize("forger", ["another process", "a stranger", "the server's own challenge"])
def test_a_proof_that_the_clients_key_has_not_signed_is_refused(forger: str) -> None:
    server, client = server_side(), client_side(OTHER if forger == "a stranger" else CLIENT)
    challenge = server.take(client.greeting())
    signature = decode(client.proof(challenge), Proof).signature
    process = bytes(16) if forger == "another process" else PROCESS
    if forger == "the server's own challenge":
        signature = decode(challenge, Challenge).signature
    with pytest.raises(RefusalError, match="has not signed"):
        server.take(encode(Proof(public(CLIENT), process, signature)))
    assert server.client is None


def test_nothing_of_a_key_that_is_not_on_the_roster_is_verified(monkeypatch: pytest.MonkeyPatch) -> None:
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
        server.take(pass_on(client.proof(pass_on(server.take(pass_on(client.greeting(), 0)), 1)), 2))
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


def test_a_name_that_is_not_the_servers_is_refused_in_words_of_any_script(keys: Keys) -> None:
    """The reason holds the name; a close frame has room for 123 bytes of it, which may be few letters."""
    with linked(keys) as at:
        for host in ("elsewhere.example", "例" * 120, "\N{MUSICAL SYMBOL G CLEF}" * 90):
            with at.opened() as connection:
                connection.send(encode(Greeting(secrets.token_bytes(32), host)))
                with pytest.raises(ConnectionClosed) as closed:
                    connection.recv(PATIENCE)
            assert closed.value.rcvd
            assert closed.value.rcvd.code == handshake.REFUSED
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

    with linked(keys) as at, at.opened() as connection:
        side = ClientSide(keys.clients[0].identity, keys.server.roster.server_key, HOST, PROCESS)
        connection.send(side.greeting())
        proof = side.proof(connection.recv(PATIENCE, decode=False))
        monkeypatch.setattr(handshake, "signed", signed)
        with connection.protocol_mutex:  # all in one piece
            for _ in range(40):
                connection.protocol.send_binary(proof)
            connection.send_data()
        with pytest.raises(ConnectionClosed):
            connection.recv(PATIENCE)
    assert verified == 1


def test_a_stranger_has_five_seconds(keys: Keys) -> None:
    with linked(keys, hold=True) as at, ExitStack() as stack:
        silent, in_tls, in_http = dial(at.address), at.dial(), at.dial()
        in_http.sendall(b"GET /link HTTP/1.1\r\nHost: x\r\n")
        in_handshake = stack.enter_context(at.opened())
        in_handshake.send(client_side().greeting())
        in_handshake.recv(PATIENCE)
        strangers = [stack.enter_context(connection) for connection in (silent, in_tls, in_http)]
        until(lambda: len(at.link._port._all) == 4)
        at.turn(door.SECONDS - 0.1)
        assert len(at.link._port._all) == 4
        at.turn(0.2)
        assert all(is_closed(connection) for connection in strangers)
        with pytest.raises(ConnectionClosed):
            in_handshake.recv(PATIENCE)


def test_a_stranger_has_few_bytes(keys: Keys) -> None:
    with linked(keys) as at, at.dial() as stranger:
        stranger.sendall(b"GET /link HTTP/1.1\r\n")
        with suppress(OSError):  # the connection is reset, or TLS has ended
            while True:
                stranger.sendall(b"header: " + b"x" * 80 + b"\r\n")


def test_an_address_that_fails_often_is_shut_out_and_clients_that_share_it_get_in(keys: Keys) -> None:
    with linked(keys, 0) as at:
        for source in ("127.0.0.9", HOST):
            for _ in range(3 * door.FAILURES):
                with dial(at.address, source=source) as stranger:
                    stranger.sendall(b"no TLS at all, and no end of line either")
                    assert is_closed(stranger)
        with dial(at.address, source="127.0.0.9") as stranger:
            assert is_closed(stranger)
        with pytest.raises((OSError, ssl.SSLError)):
            at.dial("127.0.0.9")
        with at.client(1):
            at.until_present(0, 1)
