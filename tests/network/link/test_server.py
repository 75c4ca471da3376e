"""The link's thread survives whatever happens on it, and no caller waits for a link that has stopped. Clients come and
go as the roster changes."""

import socket
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed

from baffle.errors import KeyRefusedError, TransportError
from baffle.network.link import server
from baffle.network.link.connection import CLOSE_SECONDS
from baffle.network.link.handshake import REFUSED, ClientSide
from baffle.network.link.server import FAULT_PAUSE, Link, server_tls
from tests.support.links import HOST, PATIENCE, RUN, Client, Keys, linked, new_keys, question, until
from tests.support.served import Authority


@pytest.mark.parametrize("kind", [RuntimeError, OSError, KeyboardInterrupt, SystemExit])
def test_the_thread_survives_a_mistake_in_a_callback(keys: Keys, kind: type[BaseException]) -> None:
    def fail() -> None:
        raise kind("on purpose")

    with linked(keys, 0) as at:
        at.link._loop.call_soon_threadsafe(fail)
        until(lambda: f"a mistake in the link: {kind.__name__}: on purpose" in at.told)
        assert set(at.ask(0)) == {0}


@pytest.mark.parametrize("kind", [RuntimeError, OSError, SystemExit])
def test_clients_are_still_accepted_if_the_log_cannot_be_written(keys: Keys, kind: type[BaseException]) -> None:
    def tell(_words: str) -> None:
        raise kind("the disk is full")

    with (
        Link(keys.server, HOST, 0, server_tls(keys.server), PATIENCE, tell=tell) as link,
        Client(f"{HOST}:{link.port}", keys.clients[0]) as first,
    ):
        until(lambda: 0 in link.present())
        with Client(f"{HOST}:{link.port}", keys.clients[0]):  # the link has something to log
            until(lambda: first.ended)
            until(lambda: 0 in link.present())
            assert set(link.carry({0: question(0)}, RUN)) == {0}


class Failing:
    """A listening socket that fails to accept, once for each fault."""

    def __init__(self, listener: socket.socket, faults: list[Exception]) -> None:
        self._listener, self._faults = listener, faults

    def accept(self) -> tuple[socket.socket, Any]:
        if self._faults:
            raise self._faults.pop()
        return self._listener.accept()

    def fileno(self) -> int:
        return self._listener.fileno()

    def close(self) -> None:
        self._listener.close()


def test_an_error_in_accepting_is_logged_and_accepting_goes_on(keys: Keys) -> None:
    with linked(keys) as at:
        faults: list[Exception] = [OSError(24, "Too many open files"), ValueError("unheard of")]
        at.link._port._listener = Failing(at.link._port._listener, faults)  # type: ignore[assignment]
        with at.client(0):
            for left in (1, 0):
                until(lambda left=left: len(faults) == left)  # type: ignore[misc]
                at.turn(FAULT_PAUSE)
            at.until_present(0)
            assert set(at.ask(0)) == {0}
    assert at.told == [
        "a mistake in the link: ValueError: unheard of",
        "a connection cannot be accepted: Too many open files",
    ]


def test_a_caller_that_is_interrupted_leaves_nothing_behind(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    with linked(keys) as at, at.peer(0) as peer:
        with monkeypatch.context() as patched:

            def interrupted(_futures: object, _seconds: float) -> None:
                peer.request()
                raise KeyboardInterrupt

            patched.setattr(server, "wait", interrupted)
            with pytest.raises(KeyboardInterrupt):
                at.ask(0)
        until(lambda: not at.link._exchanges._open)
        asking = at.asking(0, number=1)
        peer.answer(b"second")
        assert asking.result(PATIENCE) == {0: b"second"}


def test_a_link_that_was_closed_says_so(keys: Keys) -> None:
    with linked(keys) as at:
        pass
    for call in (lambda: at.ask(0), at.link.present):
        with pytest.raises(TransportError, match="the link is closed"):
            call()


def test_closing_waits_two_seconds_for_clients_that_do_not_answer(keys: Keys) -> None:
    with ExitStack() as stack:
        with linked(keys) as at:
            for number in range(3):
                peer = stack.enter_context(at.peer(number))
                stack.enter_context(peer.connection.protocol_mutex)  # it reads nothing and says nothing any more
                stack.enter_context(at.opened())
            begun = time.monotonic()
        assert time.monotonic() - begun >= CLOSE_SECONDS
        assert not at.link._thread.is_alive()


@pytest.mark.parametrize("port", [-1, 70_000, None], ids=["negative", "too large", "in use"])
def test_a_port_that_cannot_be_used_is_named(keys: Keys, port: int | None) -> None:
    with linked(keys) as at:
        wanted = at.link.port if port is None else port
        words = rf"cannot listen at {HOST}:{wanted}: .*give another --host"
        with pytest.raises(TransportError, match=words), linked(keys, port=wanted):
            pass


# A roster that changes


@pytest.fixture
def own(tmp_path: Path) -> Keys:
    return new_keys(tmp_path / "keys", 3)


@pytest.fixture
def authority(own: Keys) -> Authority:
    return Authority.over(own.folder)


def test_a_revoked_client_is_sent_away_and_the_others_stay(own: Keys, authority: Authority) -> None:
    with linked(own, 0, 1) as at:
        authority.revoke(1)
        at.link.admit(authority.roster)
        assert set(at.link.present()) == {0}
        until(lambda: at.clients[1].ended)
        assert isinstance(at.clients[1].fault, KeyRefusedError)
        words = "refuses this client's key: this key is no longer on the server's roster"
        assert words in str(at.clients[1].fault)
        assert set(at.ask(0)) == {0}
        with at.client(1) as again:
            until(lambda: again.ended)
            assert "this key is not on the server's roster" in str(again.fault)
        assert at.clients[0].told == [f"connected to {at.address}"]


def test_a_revoked_client_is_not_waited_for(own: Keys, authority: Authority) -> None:
    with linked(own, hold=True) as at, at.peer(1) as peer:
        asking = at.asking(1)
        peer.request()
        authority.revoke(1)
        at.link.admit(authority.roster)
        assert asking.result(PATIENCE) == {}
        with pytest.raises(ConnectionClosed) as closed:
            peer.request()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == REFUSED


def test_a_successor_is_let_in_and_its_predecessor_is_not(own: Keys, authority: Authority) -> None:
    with linked(own, 1) as at:
        (successor,) = authority.replace(1)
        at.link.admit(authority.roster)
        until(lambda: at.clients[1].ended)
        with Client(at.address, successor):
            at.until_present(1)
            assert set(at.ask(1)) == {1}  # the reply is signed with the new key
            with at.client(1) as again:
                until(lambda: again.ended)
                assert isinstance(again.fault, KeyRefusedError)
            assert set(at.ask(1)) == {1}


def test_a_handshake_that_has_begun_does_not_let_a_revoked_client_in(own: Keys, authority: Authority) -> None:
    revoked = own.clients[1]
    with linked(own) as at, at.opened() as connection:
        side = ClientSide(revoked.identity, revoked.roster.server_key, HOST, bytes(16))
        connection.send(side.greeting())
        proof = side.proof(connection.recv(PATIENCE, decode=False))
        authority.revoke(1)
        at.link.admit(authority.roster)
        connection.send(proof)
        with pytest.raises(ConnectionClosed):
            connection.recv(PATIENCE)
        assert 1 not in at.link.present()
