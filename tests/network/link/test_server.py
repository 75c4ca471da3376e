"""The link's thread survives whatever happens on it, and nobody waits for a link that has stopped."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from baffle.errors import TransportError
from tests.support.links import (
    HOST,
    RUN,
    Client,
    Keys,
    linked,
    opened,
    proved,
    question,
    until,
)


@pytest.mark.parametrize("kind", [RuntimeError, OSError, KeyboardInterrupt, SystemExit])
def test_the_thread_survives_a_mistake_in_a_callback(keys: Keys, kind: type[BaseException]) -> None:
    def fail() -> None:
        raise kind("on purpose")

    with linked(keys) as at, Client(at.address, keys.clients[0]):
        at.until_present(0)
        at.link._loop.call_soon_threadsafe(fail)
        until(lambda: any("on purpose" in words for words in at.told))
        assert set(at.ask(0)) == {0}


@pytest.mark.parametrize("kind", [RuntimeError, OSError, SystemExit])
def test_clients_are_still_accepted_if_nothing_can_be_told(keys: Keys, kind: type[BaseException]) -> None:
    from baffle.network.link.server import Link, server_tls

    def tell(_words: str) -> None:
        raise kind("the disk is full")

    with (
        Link(keys.server, HOST, 0, server_tls(keys.server), 5, tell=tell) as link,
        Client(f"{HOST}:{link.port}", keys.clients[0]) as first,
    ):
        until(lambda: 0 in link.present())
        with Client(f"{HOST}:{link.port}", keys.clients[0]):  # the link has something to tell
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


def test_an_error_in_accepting_is_told_and_accepting_goes_on(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    from baffle.network.link import port

    monkeypatch.setattr(port, "FAULT_PAUSE", 0.01)
    with linked(keys) as at:
        faults: list[Exception] = [OSError(24, "Too many open files"), ValueError("unheard of")]
        at.link._port._listener = Failing(at.link._port._listener, faults)  # type: ignore[assignment]
        with Client(at.address, keys.clients[0]):
            at.until_present(0)
            assert set(at.ask(0)) == {0}
    assert faults == []
    assert "a connection cannot be accepted: Too many open files" in at.told
    assert "a mistake in the link: ValueError: unheard of" in at.told


def test_a_caller_that_is_interrupted_leaves_nothing_behind(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    from baffle.network.link import server

    with linked(keys) as at, proved(at.address, keys.clients[0]) as peer:
        with monkeypatch.context() as patched:

            def interrupted(_link: object, _future: object, _seconds: float) -> None:
                peer.request()
                raise KeyboardInterrupt

            patched.setattr(server.Link, "_result", interrupted)
            with pytest.raises(KeyboardInterrupt):
                at.ask(0)
        until(lambda: not at.link._exchanges._open)
        with ThreadPoolExecutor() as pool:
            asking = pool.submit(at.ask, 0, number=1)
            peer.connection.send(peer.reply(peer.request(), b"second"))
            assert asking.result() == {0: b"second"}


def test_a_link_that_was_closed_asks_nobody(keys: Keys) -> None:
    with linked(keys) as at:
        pass
    for call in (lambda: at.ask(0), at.link.present):
        with pytest.raises(TransportError, match="the link is closed"):
            call()


def test_closing_while_clients_are_asked_ends_the_exchange(keys: Keys) -> None:
    with ThreadPoolExecutor() as pool, linked(keys) as at, proved(at.address, keys.clients[0]) as peer:
        asking = pool.submit(at.ask, 0)
        peer.request()
        begun = time.monotonic()
        at.link._call(at.link._port.stop())
        with pytest.raises(TransportError, match="the link was closed while clients were asked"):
            asking.result()
        assert time.monotonic() - begun < 5


def test_closing_does_not_wait_for_those_who_do_not_answer(keys: Keys) -> None:
    with ExitStack() as stack:
        with linked(keys) as at:
            for number in range(3):
                peer = stack.enter_context(proved(at.address, keys.clients[number]))
                stack.enter_context(peer.connection.protocol_mutex)  # it reads nothing and says nothing any more
                stack.enter_context(opened(at.address, keys.clients[0]))
            begun = time.monotonic()
        assert time.monotonic() - begun < 4


def test_a_port_in_use_is_said(keys: Keys) -> None:
    with (
        linked(keys) as at,
        pytest.raises(TransportError, match=rf"cannot listen at {HOST}:{at.link.port}: .*give another --host"),
        linked(keys, port=at.link.port),
    ):
        pass


@pytest.mark.parametrize("port", [-1, 70_000])
def test_a_port_that_does_not_exist_is_said(keys: Keys, port: int) -> None:
    with pytest.raises(TransportError, match=f"cannot listen at {HOST}:{port}"), linked(keys, port=port):
        pass
