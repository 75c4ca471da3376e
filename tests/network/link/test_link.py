"""A real link and real lines over loopback, with TLS."""

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from threading import Event

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from websockets.exceptions import ConnectionClosed
from websockets.frames import Frame, Opcode
from websockets.server import ServerProtocol

from baffle.errors import TransportError
from baffle.network.link.client import Line
from baffle.network.link.handshake import REPLACED, ClientSide
from tests.support.links import (
    HOST,
    PATIENCE,
    RUN,
    Client,
    Keys,
    Wire,
    answer_to,
    linked,
    opened,
    proved,
    question,
    until,
)


def test_replies_come_back_in_the_order_of_the_requests(keys: Keys) -> None:
    with linked(keys) as at, ExitStack() as clients:
        for number in range(3):
            clients.enter_context(Client(at.address, keys.clients[number]))
        at.until_present(0, 1, 2)
        replies = at.ask(2, 0, 1)
    assert replies == dict.fromkeys((2, 0, 1), answer_to(question(0)))
    assert list(replies) == [2, 0, 1]


def test_a_client_that_is_not_connected_is_not_waited_for(keys: Keys) -> None:
    with linked(keys) as at, Client(at.address, keys.clients[0]):
        at.until_present(0)
        begun = time.monotonic()
        assert set(at.ask(0, 1, 2)) == {0}
        assert at.ask(3) == {}
        assert at.ask() == {}
        assert time.monotonic() - begun < PATIENCE / 2


def test_without_tls(keys: Keys) -> None:
    with linked(keys, tls=False) as at, Client(at.address, keys.clients[0], tls=False):
        at.until_present(0)
        assert set(at.ask(0)) == {0}


def test_large_messages_pass_both_ways(keys: Keys) -> None:
    large = random.Random(0).randbytes(3 << 20)
    with linked(keys) as at, Client(at.address, keys.clients[0], answer=lambda _body: large):
        at.link.expect(len(large))
        at.until_present(0)
        assert at.ask(0, size=4 << 20) == {0: large}
        assert at.ask(0) == {0: large}


# Property: the link changes nothing about what clients answer


@pytest.fixture(scope="module")
def crowd(keys: Keys):  # type: ignore[no-untyped-def]
    """A link whose five clients answer after a pause, or never, as a test says."""
    pauses: dict[int, float | None] = {}

    def client(number: int) -> Callable[[bytes], bytes]:
        def answer(body: bytes) -> bytes:
            pause = pauses[number]
            time.sleep(0.4 if pause is None else pause)
            return bytes([number]) + answer_to(body)

        return answer

    with linked(keys, seconds=0.3) as at, ExitStack() as clients:
        for number in range(5):
            clients.enter_context(Client(at.address, keys.clients[number], answer=client(number)))
        at.until_present(*range(5))
        yield at, pauses


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    asked=st.lists(st.integers(0, 4), unique=True),
    order=st.permutations(range(5)),
    silent=st.sets(st.integers(0, 4), max_size=2),
    number=st.integers(0, 2**32 - 1),
)
def test_carrying_is_calling(crowd, asked: list[int], order: list[int], silent: set[int], number: int) -> None:  # type: ignore[no-untyped-def]
    at, pauses = crowd
    pauses |= {client: None if client in silent else 0.02 * order[client] for client in range(5)}
    begun = time.monotonic()
    replies = at.link.carry({client: question(number + client & 0xFFFFFFFF) for client in asked}, RUN)
    assert replies == {
        client: bytes([client]) + answer_to(question(number + client & 0xFFFFFFFF))
        for client in asked
        if client not in silent
    }
    assert list(replies) == [client for client in asked if client not in silent]
    if silent & set(asked):
        assert time.monotonic() - begun >= 0.3
        time.sleep(0.3)  # they wake up, and their answers come too late
    assert not at.told


# One connection an identity


def test_a_second_process_takes_over_and_the_first_one_ends_with_a_reason(keys: Keys) -> None:
    with linked(keys) as at, Client(at.address, keys.clients[0]) as first:
        at.until_present(0)
        before = at.link.present()[0]
        with Client(at.address, keys.clients[0]) as second:
            until(lambda: first.ended)
            assert isinstance(first.fault, TransportError)
            assert "two must never share a key: stop one of them" in str(first.fault)
            assert at.link.present()[0] != before
            assert set(at.ask(0)) == {0}
            assert (len(first.asked), len(second.asked)) == (0, 1)
    assert "client 0 has connected again as another process; the older connection is closed" in at.told


def test_a_second_process_is_not_asked_what_the_first_was_asked(keys: Keys) -> None:
    with linked(keys) as at, ThreadPoolExecutor() as pool, proved(at.address, keys.clients[0]) as first:
        asking = pool.submit(at.ask, 0)
        first.request()
        with proved(at.address, keys.clients[0], process=b"another process!") as second:
            assert asking.result() == {}
            with pytest.raises(TimeoutError):
                second.connection.recv(0.2)
        with pytest.raises(ConnectionClosed) as closed:
            first.connection.recv(1)
        assert closed.value.rcvd
        assert closed.value.rcvd.code == REPLACED


def test_an_unfinished_handshake_with_a_clients_public_key_does_not_disturb_it(keys: Keys) -> None:
    with linked(keys) as at, Client(at.address, keys.clients[0]) as client:
        at.until_present(0)
        own = keys.clients[0].identity.public_key().public_bytes_raw()
        for wrong in (lambda proof: proof.replace(own, keys.clients[1].identity.public_key().public_bytes_raw()), None):
            with opened(at.address, keys.clients[0]) as stranger:
                side = ClientSide(keys.clients[0].identity, keys.server.roster.server_key, HOST, bytes(16))
                stranger.send(side.greeting())
                proof = side.proof(stranger.recv(5, decode=False))
                if wrong:
                    stranger.send(wrong(proof))
                else:
                    stranger.send(proof[:-1] + bytes([proof[-1] ^ 1]))
                with pytest.raises(ConnectionClosed):
                    stranger.recv(5)
            assert set(at.ask(0)) == {0}
        assert not client.fault
    assert not at.told


# Again


def test_a_line_that_breaks_while_the_client_computes(keys: Keys) -> None:
    computing, go_on = Event(), Event()

    def answer(body: bytes) -> bytes:
        computing.set()
        go_on.wait(10)
        return answer_to(body)

    with (
        linked(keys, tls=False) as at,
        Wire(at.address) as wire,
        Client(wire.address, keys.clients[0], tls=False, answer=answer) as client,
        ThreadPoolExecutor() as pool,
    ):
        at.until_present(0)
        asking = pool.submit(at.ask, 0)
        computing.wait()
        wire.cut()
        until(lambda: wire.connections == 2 and client.asked[0].frame in wire.to_client[1].passed)
        go_on.set()
        assert asking.result() == {0: answer_to(question(0))}
        assert len(client.asked) == 1
        assert client.asked[0].frame in wire.to_client[0].passed
        assert len(_replies(wire, 0)) == 0
        assert len(_replies(wire, 1)) == 1


def test_an_answer_that_is_ready_while_the_line_is_broken_is_sent_when_asked_again(keys: Keys) -> None:
    computing, go_on = Event(), Event()

    def answer(body: bytes) -> bytes:
        computing.set()
        go_on.wait(10)
        return answer_to(body)

    with (
        linked(keys, tls=False) as at,
        Wire(at.address) as wire,
        Client(wire.address, keys.clients[0], tls=False, answer=answer) as client,
        ThreadPoolExecutor() as pool,
    ):
        at.until_present(0)
        asking = pool.submit(at.ask, 0)
        computing.wait()
        wire.hold()
        wire.cut()
        go_on.set()
        time.sleep(0.1)
        wire.release()
        assert asking.result() == {0: answer_to(question(0))}
        assert len(client.asked) == 1


@pytest.mark.parametrize("share", [0.1, 0.5, 0.95])
@pytest.mark.parametrize("direction", ["request", "reply"])
def test_a_line_that_breaks_in_the_middle_of_a_frame(keys: Keys, direction: str, share: float) -> None:
    large = random.Random(0).randbytes(200_000)
    with (
        linked(keys, tls=False) as at,
        Wire(at.address) as wire,
        Client(wire.address, keys.clients[0], tls=False, answer=lambda _body: large) as client,
    ):
        at.link.expect(len(large))
        at.until_present(0)
        pipes = wire.to_client if direction == "request" else wire.to_server
        wire.cut_after(pipes, int(share * len(large)))
        assert at.ask(0, size=len(large)) == {0: large}
        assert wire.connections == 2
        assert len(client.asked) == 1, "computed once"
        (frame,) = {request.frame for request in client.asked}
        assert frame in wire.to_client[1].passed, "asked again in the same bytes"
        if direction == "reply":
            assert frame in wire.to_client[0].passed
            (second,) = _replies(wire, 1)
            whole = bytes(second.data)
            assert whole[-len(large) :] == large
    assert not [words for words in at.told if "disconnected" in words]


def test_a_repeated_answer_is_the_same_bytes(keys: Keys) -> None:
    """The client has sent its answer, but the line breaks before it arrives."""
    with (
        linked(keys, tls=False) as at,
        Wire(at.address) as wire,
        Client(wire.address, keys.clients[0], tls=False) as client,
        ThreadPoolExecutor() as pool,
    ):
        at.until_present(0)
        wire.cut_after(wire.to_server, 0)
        asking = pool.submit(at.ask, 0)
        assert asking.result() == {0: answer_to(question(0))}
        (lost,), (taken,) = _replies(wire, 0), _replies(wire, 1)
        assert lost.data == taken.data
        assert len(client.asked) == 1


def test_an_answer_is_not_sent_if_the_server_has_asked_something_else_meanwhile(keys: Keys) -> None:
    computing, go_on = Event(), Event()

    def answer(body: bytes) -> bytes:
        if not computing.is_set():
            computing.set()
            go_on.wait(10)
        return answer_to(body)

    with (
        linked(keys, tls=False, seconds=1) as at,
        Wire(at.address) as wire,
        Client(wire.address, keys.clients[0], tls=False, answer=answer) as client,
        ThreadPoolExecutor() as pool,
    ):
        at.until_present(0)
        assert at.ask(0) == {}
        until(lambda: not at.link._exchanges._is_stalled(0))
        asking = pool.submit(at.ask, 0, number=1)
        until(lambda: client.line._asked is not client.asked[0])
        go_on.set()
        assert asking.result() == {0: answer_to(question(1))}
        assert len(client.asked) == 2
        assert len(_replies(wire, 0)) == 1


def test_a_server_that_is_killed_and_started_again_gets_its_clients_back(keys: Keys) -> None:
    with ExitStack() as clients:
        with linked(keys) as at:
            port = at.link.port
            both = [clients.enter_context(Client(at.address, keys.clients[number])) for number in range(2)]
            at.until_present(0, 1)
            assert set(at.ask(0, 1)) == {0, 1}
        until(lambda: all(any("(the server stops)" in words for words in client.told) for client in both))
        with linked(keys, port=port) as again:
            again.until_present(0, 1)
            assert set(again.ask(0, 1, number=1)) == {0, 1}
            assert [client.fault for client in both] == [None, None]
            assert not again.told


def test_an_answer_to_a_server_that_has_gone_does_not_reach_its_successor(keys: Keys) -> None:
    computing, go_on = Event(), Event()

    def answer(body: bytes) -> bytes:
        computing.set()
        go_on.wait(10)
        return answer_to(body)

    with ExitStack() as clients, ThreadPoolExecutor() as pool:
        with linked(keys, seconds=20) as at:
            client = clients.enter_context(Client(at.address, keys.clients[0], answer=answer))
            at.until_present(0)
            asking = pool.submit(at.ask, 0)
            computing.wait()
        with pytest.raises(TransportError, match="the link was closed"):
            asking.result()
        with linked(keys, port=at.link.port) as again:
            again.until_present(0)
            go_on.set()
            assert again.ask(0, number=1) == {0: answer_to(question(1))}
            assert len(client.asked) == 2
            assert not again.told


def test_a_client_whose_last_answer_was_lost_on_the_way_delivers_it_before_it_leaves(keys: Keys) -> None:
    with linked(keys, tls=False) as at, Wire(at.address) as wire, ThreadPoolExecutor() as pool:
        with Line(wire.address, keys.clients[0], None, lambda _words: None) as line:
            at.until_present(0)
            asking = pool.submit(at.ask, 0)
            request = next(line.requests())
            wire.hold()
            line.reply(request, b"my last words")
            wire.cut()
            wire.release()
        assert asking.result() == {0: b"my last words"}


def test_a_client_that_leaves_while_its_line_is_broken_first_delivers_its_last_answer(keys: Keys) -> None:
    with linked(keys, tls=False) as at, Wire(at.address) as wire, ThreadPoolExecutor() as pool:
        own = keys.clients[0]
        with Line(wire.address, own, None, lambda _words: None) as line:
            at.until_present(0)
            asking = pool.submit(at.ask, 0)
            request = next(line.requests())
            wire.cut()
            until(lambda: not at.link._exchanges.connections)
            line.reply(request, b"my last words")
        assert asking.result() == {0: b"my last words"}
        assert not at.link.present()


def test_a_client_that_is_stopped_does_not_wait_for_a_broken_line(keys: Keys) -> None:
    with linked(keys, tls=False) as at, Wire(at.address) as wire, ThreadPoolExecutor() as pool:
        own = keys.clients[0]
        with suppress(KeyboardInterrupt), Line(wire.address, own, None, lambda _words: None) as line:
            at.until_present(0)
            asking = pool.submit(at.ask, 0)
            request = next(line.requests())
            wire.hold()
            wire.cut()
            until(lambda: not at.link._exchanges.connections)
            line.reply(request, b"nobody waits for this")
            begun = time.monotonic()
            raise KeyboardInterrupt
        assert time.monotonic() - begun < 1.5
        assert asking.result() == {}


def _replies(wire: Wire, connection: int) -> list[Frame]:
    """The whole binary frames after the handshake that a client has sent over a connection of a wire."""
    protocol = ServerProtocol(max_size=None)
    stream = bytes(wire.to_server[connection].sent)
    head = stream.index(b"\r\n\r\n") + 4
    protocol.receive_data(stream[:head])
    protocol.send_response(protocol.accept(protocol.events_received()[0]))  # type: ignore[arg-type]
    protocol.receive_data(stream[head:])
    frames = [event for event in protocol.events_received() if isinstance(event, Frame)]
    return [frame for frame in frames if frame.opcode is Opcode.BINARY][2:]
