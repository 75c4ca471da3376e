"""The link end to end: the replies are those of the clients, one connection an identity, and broken connections are
opened again without a request or a reply getting lost."""

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from threading import Event

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from websockets.exceptions import ConnectionClosed
from websockets.frames import Frame, Opcode
from websockets.server import ServerProtocol

from baffle.errors import TransportError
from baffle.network.link.client import Line
from baffle.network.link.exchanges import GRACE
from baffle.network.link.handshake import REPLACED, ClientSide
from tests.support.links import (
    HOST,
    PATIENCE,
    RUN,
    Keys,
    Linked,
    Pauses,
    Peer,
    Wire,
    answer_to,
    linked,
    question,
    until,
    wired,
)

DEADLINE = 30.0


def test_large_messages_pass_both_ways(keys: Keys) -> None:
    large = random.Random(0).randbytes(3 << 20)
    with linked(keys, 0, answer=lambda _body: large) as at:
        at.link.expect(len(large))
        assert set(at.ask(3, 0, 1)) == {0}  # those that are not connected are not waited for
        assert at.ask(0, size=4 << 20) == {0: large}
        assert at.ask(0) == {0: large}


# Property: the link changes nothing about the clients' replies


@pytest.fixture(scope="module")
def crowd(keys: Keys) -> Iterator[tuple[Linked, list[Peer]]]:
    """A link whose clock is held, and five clients that answer when a test says so."""
    with linked(keys, seconds=DEADLINE, hold=True) as at, ExitStack() as stack:
        yield at, [stack.enter_context(at.peer(number)) for number in range(5)]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    asked=st.lists(st.integers(0, 4), unique=True),
    order=st.permutations(range(5)),
    silent=st.sets(st.integers(0, 4), max_size=2),
    number=st.integers(0, 2**32 - 1),
)
def test_carrying_is_calling(
    crowd: tuple[Linked, list[Peer]], asked: list[int], order: list[int], silent: set[int], number: int
) -> None:
    """Clients answer in any order; those that do not answer before the deadline are missing from the result."""
    at, peers = crowd
    numbers = {client: number + client & 0xFFFFFFFF for client in asked}
    requests = {client: question(numbers[client]) for client in asked}
    asking = at.pool.submit(at.link.carry, requests, RUN)
    received = {client: peers[client].request() for client in asked}
    frames = {client: peers[client].reply(received[client], bytes([client]) + requests[client]) for client in asked}
    for client in (client for client in order if client in asked and client not in silent):
        peers[client].connection.send(frames[client])
        peers[client].give_sign_of_life()
    at.turn(DEADLINE)
    replies = asking.result(PATIENCE)
    assert list(replies) == [client for client in asked if client not in silent]
    assert replies == {client: bytes([client]) + requests[client] for client in replies}
    at.turn(1)
    for client in silent & set(asked):
        peers[client].connection.send(frames[client])  # too late
    for peer in peers:
        peer.give_sign_of_life()
    assert not at.told


# One connection an identity


def test_a_second_process_takes_over_and_the_first_one_ends_with_a_reason(keys: Keys) -> None:
    with linked(keys, 0) as at:
        first, before = at.clients[0], at.link.present()[0]
        with at.client(0) as second:
            until(lambda: first.ended)
            assert isinstance(first.fault, TransportError)
            assert "two must never share a key: stop one of them" in str(first.fault)
            assert at.link.present()[0] != before
            assert set(at.ask(0)) == {0}
            assert (len(first.asked), len(second.asked)) == (0, 1)
    assert "client 0 has connected again as another process; the older connection is closed" in at.told


def test_a_second_process_is_not_asked_what_the_first_was_asked(keys: Keys) -> None:
    with linked(keys) as at, at.peer(0) as first:
        asking = at.asking(0)
        first.request()
        with at.peer(0, process=b"another process!") as second:
            assert asking.result(PATIENCE) == {}
            asking = at.asking(0, number=1)
            assert second.answer(b"mine").round == 1, "nothing was asked before"
            assert asking.result(PATIENCE) == {0: b"mine"}
        with pytest.raises(ConnectionClosed) as closed:
            first.connection.recv(PATIENCE)
        assert closed.value.rcvd
        assert closed.value.rcvd.code == REPLACED


@pytest.mark.parametrize("wrong", ["key", "signature"])
def test_an_unfinished_handshake_with_a_clients_public_key_does_not_disturb_it(keys: Keys, wrong: str) -> None:
    own, other = (keys.clients[number].identity.public_key().public_bytes_raw() for number in (0, 1))
    with linked(keys, 0) as at:
        with at.opened() as stranger:
            side = ClientSide(keys.clients[0].identity, keys.server.roster.server_key, HOST, bytes(16))
            stranger.send(side.greeting())
            proof = side.proof(stranger.recv(PATIENCE, decode=False))
            stranger.send(proof.replace(own, other) if wrong == "key" else proof[:-1] + bytes([proof[-1] ^ 1]))
            with pytest.raises(ConnectionClosed):
                stranger.recv(PATIENCE)
        assert set(at.ask(0)) == {0}
        assert not at.clients[0].fault
    assert not at.told


# Broken connections


class Computing:
    """A client's answer that takes until the test lets it go on."""

    def __init__(self) -> None:
        self.begun, self.go_on = Event(), Event()

    def __call__(self, body: bytes) -> bytes:
        self.begun.set()
        assert self.go_on.wait(PATIENCE)
        return answer_to(body)


@pytest.mark.parametrize("ready", ["after", "before"])
def test_a_line_that_breaks_while_the_client_computes(keys: Keys, ready: str) -> None:
    """The answer is ready after the client has connected again, or before."""
    computing = Computing()
    with wired(keys, computing) as (at, wire, client):
        asking = at.asking(0)
        assert computing.begun.wait(PATIENCE)
        if ready == "before":
            wire.hold()
        wire.cut()
        if ready == "after":
            until(lambda: wire.connections == 2 and client.asked[0].frame in wire.to_client[1].passed)
        computing.go_on.set()
        if ready == "before":
            until(lambda: client.line._answered[0])
            wire.release()
        assert asking.result(PATIENCE) == {0: answer_to(question(0))}
        assert len(client.asked) == 1
        assert client.asked[0].frame in wire.to_client[0].passed
        assert len(_replies(wire, 0)) == 0
        assert len(_replies(wire, wire.connections - 1)) == 1


@pytest.mark.parametrize("share", [0.0, 0.5, 0.95])
@pytest.mark.parametrize("direction", ["request", "reply"])
def test_a_line_that_breaks_in_the_middle_of_a_frame(keys: Keys, direction: str, share: float) -> None:
    large = random.Random(0).randbytes(200_000)
    with wired(keys, lambda _body: large) as (at, wire, client):
        at.link.expect(len(large))
        wire.cut_after(wire.to_client if direction == "request" else wire.to_server, int(share * len(large)))
        assert at.ask(0, size=len(large)) == {0: large}
        assert wire.connections == 2
        (request,) = client.asked  # it is computed once
        assert request.frame in wire.to_client[1].passed, "asked again in the same bytes"
        if direction == "reply":
            assert request.frame in wire.to_client[0].passed
            (second,) = _replies(wire, 1)
            assert bytes(second.data)[-len(large) :] == large
    assert not [words for words in at.told if "disconnected" in words]


def test_an_answer_is_not_sent_if_the_server_has_asked_something_else_meanwhile(keys: Keys) -> None:
    computing = Computing()
    with wired(keys, computing, seconds=DEADLINE) as (at, wire, client):
        asking = at.asking(0)
        assert computing.begun.wait(PATIENCE)
        at.turn(DEADLINE)
        assert asking.result(PATIENCE) == {}
        at.turn(1)  # the line answers the ping of the link, which is a sign of life
        asking = at.asking(0, number=1)
        until(lambda: client.line._asked is not client.asked[0])
        computing.go_on.set()
        assert asking.result(PATIENCE) == {0: answer_to(question(1))}
        assert len(client.asked) == 2
        assert len(_replies(wire, 0)) == 1


def test_an_answer_to_a_server_that_has_gone_does_not_reach_its_successor(keys: Keys) -> None:
    computing = Computing()
    with ExitStack() as stack:
        with linked(keys) as at:
            client = stack.enter_context(at.client(0, computing))
            at.until_present(0)
            asking = at.asking(0)
            assert computing.begun.wait(PATIENCE)
        with pytest.raises(TransportError, match="the link was closed while clients were asked"):
            asking.result(PATIENCE)
        with linked(keys, port=at.link.port) as again:
            again.until_present(0)
            computing.go_on.set()
            assert again.ask(0, number=1) == {0: answer_to(question(1))}
            assert len(client.asked) == 2
            assert not again.told


# A client that leaves


@contextmanager
def leaving(keys: Keys) -> Iterator[tuple[Linked, Wire, Line, Pauses]]:
    """A client over a wire, which leaves when the test ends."""
    pauses = Pauses()
    with linked(keys, tls=False, hold=True) as at, Wire(at.address) as wire:
        line = Line(wire.address, keys.clients[0], None, lambda _words: None, pauses)
        yield at, wire, line, pauses


@pytest.mark.parametrize("broken", ["before the answer", "after the answer"])
def test_a_client_delivers_its_last_answer_before_it_leaves(keys: Keys, broken: str) -> None:
    with leaving(keys) as (at, wire, line, pauses):
        with line:
            at.until_present(0)
            asking = at.asking(0)
            request = next(line.requests())
            if broken == "before the answer":
                wire.cut()
                at.until_broken(0)
                line.reply(request, b"my last words")
            else:
                wire.hold()
                line.reply(request, b"my last words")
                wire.cut()
                wire.release()
        assert asking.result(PATIENCE) == {0: b"my last words"}
        assert pauses.deliveries == 1
        until(lambda: not at.link.present())


def test_a_client_that_is_interrupted_does_not_wait_for_a_broken_line(keys: Keys) -> None:
    with leaving(keys) as (at, wire, line, pauses):
        with suppress(KeyboardInterrupt), line:
            at.until_present(0)
            asking = at.asking(0)
            request = next(line.requests())
            wire.hold()
            wire.cut()
            at.until_broken(0)
            line.reply(request, b"the server does not get this")
            raise KeyboardInterrupt
        at.turn(GRACE)
        assert asking.result(PATIENCE) == {}
        assert pauses.deliveries == 0


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
