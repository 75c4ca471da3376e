"""A link whose roster changes: whoever is no longer on it is sent away with a reason and stays out, a successor is let
in, and the others notice nothing."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from websockets.exceptions import ConnectionClosed

from baffle.errors import KeyRefusedError
from baffle.network.link.handshake import REFUSED, ClientSide
from tests.support.links import HOST, PATIENCE, RUN, Client, Keys, linked, new_keys, opened, proved, question, until
from tests.support.successions import Authority


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return new_keys(tmp_path / "keys", 3)


@pytest.fixture
def authority(keys: Keys, tmp_path: Path) -> Authority:
    assert keys.clients
    return Authority.over(tmp_path / "keys")


def test_a_revoked_client_is_sent_away_and_the_others_stay(keys: Keys, authority: Authority) -> None:
    with (
        linked(keys) as at,
        Client(at.address, keys.clients[0]) as first,
        Client(at.address, keys.clients[1]) as second,
    ):
        at.until_present(0, 1)
        authority.revoke(1)
        at.link.admit(authority.roster)
        assert set(at.link.present()) == {0}
        until(lambda: second.ended)
        assert isinstance(second.fault, KeyRefusedError)
        assert "refuses this client's key: this key is no longer on the server's roster" in str(second.fault)
        assert set(at.ask(0)) == {0}
        with Client(at.address, keys.clients[1]) as again:
            until(lambda: again.ended)
            assert "this key is not on the server's roster" in str(again.fault)
        assert first.told == [f"connected to {at.address}"]


def test_nobody_waits_for_the_answer_of_a_client_that_was_revoked(keys: Keys, authority: Authority) -> None:
    with linked(keys) as at, proved(at.address, keys.clients[1]) as peer, ThreadPoolExecutor(1) as pool:
        at.until_present(1)
        answer = pool.submit(at.link.carry, {1: question(0)}, RUN)
        peer.request()
        authority.revoke(1)
        at.link.admit(authority.roster)
        assert answer.result(PATIENCE) == {}
        with pytest.raises(ConnectionClosed) as closed:
            peer.request()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == REFUSED


def test_a_successor_is_let_in_and_its_predecessor_is_not(keys: Keys, authority: Authority) -> None:
    with linked(keys) as at, Client(at.address, keys.clients[1]) as before:
        at.until_present(1)
        (successor,) = authority.replace(1)
        at.link.admit(authority.roster)
        until(lambda: before.ended)
        with Client(at.address, successor):
            at.until_present(1)
            assert set(at.ask(1)) == {1}  # the reply is signed with the new key
            with Client(at.address, keys.clients[1]) as again:
                until(lambda: again.ended)
                assert isinstance(again.fault, KeyRefusedError)
            assert set(at.ask(1)) == {1}


def test_a_handshake_that_has_begun_does_not_let_a_revoked_client_in(keys: Keys, authority: Authority) -> None:
    own = keys.clients[1]
    with linked(keys) as at, opened(at.address, own) as connection:
        side = ClientSide(own.identity, own.roster.server_key, HOST, bytes(16))
        connection.send(side.greeting())
        proof = side.proof(connection.recv(PATIENCE, decode=False))
        authority.revoke(1)
        at.link.admit(authority.roster)
        connection.send(proof)
        with pytest.raises(ConnectionClosed):
            connection.recv(PATIENCE)
        assert 1 not in at.link.present()
