"""How long a client is waited for: clients that leave, break off, stall, come late or misbehave. The link's clock is
held, so an exchange that ends has not waited for anything."""

import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import pytest
from websockets.exceptions import ConnectionClosed

from baffle.core.messages import encode
from baffle.network.joining import Introduce
from baffle.network.link.envelope import REQUEST_BYTES, SMALL, Request
from baffle.network.link.exchanges import GRACE, MOST_UNANSWERED, QUIET
from baffle.network.link.handshake import GOODBYE
from tests.support.links import PATIENCE, RUN, Keys, Linked, Peer, linked, question, until

CONTRIBUTION = 100_000
DEADLINE = 10.0


@pytest.fixture
def at(keys: Keys) -> Iterator[Linked]:
    """A link without clients, whose clock is held."""
    with linked(keys, seconds=DEADLINE, hold=True) as at:
        at.link.expect(CONTRIBUTION)
        yield at


def late(at: Linked, peer: Peer, number: int = 0) -> Request:
    """A request to client 0 that is not answered before its deadline."""
    asking = at.asking(0, number=number)
    request = peer.request()
    at.turn(DEADLINE)
    assert asking.result(PATIENCE) == {}
    at.turn(1)
    return request


@pytest.mark.parametrize("socket_stays_open", [False, True])
def test_a_client_that_says_goodbye_is_not_waited_for(at: Linked, socket_stays_open: bool) -> None:
    with at.peer(0) as peer:
        asking = at.asking(0)
        peer.request()
        if socket_stays_open:
            with peer.connection.protocol_mutex:
                peer.connection.protocol.send_close(GOODBYE)
                peer.connection.send_data()
                assert asking.result(PATIENCE) == {}
        else:
            peer.connection.close(GOODBYE)
            assert asking.result(PATIENCE) == {}
        assert not at.link.present()


def test_a_client_whose_line_breaks_has_some_seconds_to_come_back_after_each_break(at: Linked) -> None:
    asking = None
    frames = set()
    for _ in range(3):
        with at.peer(0) as peer:
            asking = asking or at.asking(0)
            frames.add(peer.request().frame)
            peer.connection.close_socket()
        at.until_broken(0)
        at.turn(0.9 * GRACE)
        assert set(at.link.present()) == {0}
        assert not asking.done()
    assert len(frames) == 1, "asked again in the same bytes"
    at.turn(0.2 * GRACE)
    assert asking
    assert asking.result(PATIENCE) == {}
    assert not at.link.present()


def test_a_patient_exchange_waits_for_a_client_until_the_deadline(at: Linked) -> None:
    """A nonce that is not opened costs everybody a statement, and a line may break for longer than some seconds."""
    with at.peer(0) as peer:
        asking = at.asking(0, patient=True)
        peer.request()
        peer.connection.close_socket()
    at.until_broken(0)
    at.turn(2 * GRACE)
    assert not at.link.present()
    assert not asking.done()
    with at.peer(0, process=b"another process.") as peer:
        peer.answer(b"here")
        assert asking.result(PATIENCE) == {0: b"here"}
        peer.connection.close(GOODBYE)
    until(lambda: not at.link.present())
    asking = at.asking(0, 1, patient=True)  # away when it begins
    with at.peer(1) as other:
        other.answer(b"late")
        at.turn(DEADLINE)
        assert asking.result(PATIENCE) == {1: b"late"}


def test_a_client_that_comes_back_during_an_exchange_is_asked_although_its_line_was_broken_before(at: Linked) -> None:
    with at.peer(0) as peer:
        peer.connection.close_socket()
    at.until_broken(0)
    asking = at.asking(0)
    until(lambda: at.link._exchanges._open)
    with at.peer(0) as peer:
        peer.answer(b"here")
        assert asking.result(PATIENCE) == {0: b"here"}


def test_a_client_that_stays_silent_is_pinged_and_then_dropped(at: Linked) -> None:
    with at.peer(0) as peer, at.client(1):
        at.until_present(1)
        with peer.connection.protocol_mutex:  # it does not answer pings
            while set(at.link.present()) == {0, 1}:
                at.turn(QUIET / 3)
                until(lambda: at.link._exchanges.connections[1].heard > at.clock() - QUIET - 1)
            silent = at.link._exchanges.connections.keys()
            assert silent == {1}
    assert at.told == []


def test_a_client_that_was_silent_is_not_asked_again_before_it_gives_a_sign_of_life(at: Linked) -> None:
    """Its process may be stopped, while its machine still takes bytes."""
    with at.peer(0) as peer, at.client(1):
        at.until_present(1)
        at.turn(1)
        with peer.connection.protocol_mutex:
            asking = at.asking(0, 1)
            until(lambda: any(1 in exchange.replies for exchange in at.link._exchanges._open))
            at.turn(DEADLINE)
            assert set(asking.result(PATIENCE)) == {1}
            sent = at.link.counts["sent bytes"]
            for number in range(5):
                assert set(at.ask(0, 1, number=number)) == {1}
            assert at.link.counts["late"] == 1
            assert at.link.counts["sent bytes"] - sent == 5 * (len(question(0)) + REQUEST_BYTES), "it is not even asked"
            at.turn(1)
        peer.give_sign_of_life()
        asking = at.asking(0, 1, number=9)
        assert peer.request().round == 0
        assert peer.answer(b"here").round == 9
        assert set(asking.result(PATIENCE)) == {0, 1}
    assert not at.told


# Misbehaviour: it ends the connection, and costs the others nothing


Misbehave = Callable[[Peer, Request], None]


def send(*frames: object) -> Misbehave:
    """Send frames, each of which is bytes, text, or a function of the peer and the request."""

    def misbehave(peer: Peer, request: Request) -> None:
        for frame in frames:
            peer.connection.send(frame(peer, request) if callable(frame) else frame)  # type: ignore[arg-type]

    return misbehave


def in_fragments(peer: Peer, request: Request) -> None:
    whole = peer.reply(request, b"honest otherwise")
    peer.connection.send([whole[:9], whole[9:]])


def in_endless_fragments(peer: Peer, _request: Request) -> None:
    peer.connection.send(iter(lambda: b"", None))


def flood_of_pings(peer: Peer, _request: Request) -> None:
    while True:
        peer.connection.ping(secrets.token_bytes(8))


def unmasked(peer: Peer, _request: Request) -> None:
    peer.connection.socket.sendall(b"\x82\x05hello")


def too_large(size: int) -> Callable[[Peer, Request], bytes]:
    return lambda peer, request: peer.reply(request, bytes(size))


def honest(peer: Peer, request: Request) -> bytes:
    return peer.reply(request, b"honest")


def forged(_peer: Peer, request: Request) -> bytes:
    return request.short_id + bytes(64) + b"forged"


@pytest.mark.parametrize(
    ("misbehave", "words"),
    [
        pytest.param(send(too_large(CONTRIBUTION + SMALL + 1)), "exceeds limit of 108260 bytes", id="too large"),
        pytest.param(send(forged), "a reply that is not signed with the sender's key", id="forged"),
        pytest.param(send(b"????" + bytes(64)), "an answer that nobody asked for", id="to nothing"),
        pytest.param(send("text"), "not whole or not binary", id="text"),
        pytest.param(in_fragments, "not whole or not binary", id="fragments"),
        pytest.param(in_endless_fragments, "not whole or not binary", id="endless fragments"),
        pytest.param(flood_of_pings, "too many pings", id="pings"),
        pytest.param(unmasked, "incorrect masking", id="unmasked"),
    ],
)
def test_a_client_that_misbehaves_is_not_waited_for(at: Linked, misbehave: Misbehave, words: str) -> None:
    with at.client(1), at.peer(0) as peer:
        at.until_present(1)
        asking = at.asking(0, 1)
        with suppress(ConnectionClosed, OSError):  # the link may close the line while its peer still sends
            misbehave(peer, peer.request())
        assert set(asking.result(PATIENCE)) == {1}
        assert set(at.link.present()) == {1}, "it has no seconds of grace either"
        assert at.link.counts["refused"] == 1
        (told,) = at.told
        assert told.startswith("client 0 is disconnected: ")
        assert words in told


@pytest.mark.parametrize("second", [honest, forged], ids=["the same", "forged"])
def test_a_second_answer_ends_the_connection(at: Linked, second: Callable[[Peer, Request], bytes]) -> None:
    with at.peer(0) as peer:
        asking = at.asking(0)
        request = peer.request()
        with suppress(ConnectionClosed):
            send(honest, second)(peer, request)
        assert asking.result(PATIENCE) == {0: b"honest"}
        until(lambda: not at.link.present())
        assert at.told == ["client 0 is disconnected: an answer that nobody asked for"]


def test_a_large_answer_that_comes_late_is_accepted_also_in_a_phase_of_small_ones(at: Linked) -> None:
    small = encode(Introduce("a plan", 1, bytes(32), 0))
    with at.peer(0) as peer:
        large = peer.reply(late(at, peer), bytes(CONTRIBUTION))
        peer.give_sign_of_life()
        asking = at.pool.submit(at.link.carry, {0: small}, RUN)
        request = peer.request()
        peer.connection.send(large)
        peer.connection.send(peer.reply(request, b"in time"))
        assert asking.result(PATIENCE) == {0: b"in time"}
        asking = at.pool.submit(at.link.carry, {0: small}, RUN)
        with suppress(ConnectionClosed):
            peer.answer(bytes(CONTRIBUTION))
        assert asking.result(PATIENCE) == {}
    assert len(at.told) == 1


@pytest.mark.parametrize("tls", [True, False])
def test_a_slow_reader_is_dropped_at_the_deadline_and_costs_nothing_else(keys: Keys, tls: bool) -> None:
    with linked(keys, 1, tls=tls, hold=True, seconds=DEADLINE) as at, at.peer(0) as peer:
        at.clients[1].line.allow(40_000_000)
        connection = at.link._exchanges.connections[0]
        with peer.connection.protocol_mutex:  # it reads no more than its machine's buffers take
            asking = at.asking(0, 1, size=30_000_000)
            until(lambda: any(1 in exchange.replies for exchange in at.link._exchanges._open))
            assert connection.unsent > 10_000_000
            at.turn(DEADLINE)
            assert set(asking.result(PATIENCE)) == {1}
            assert at.told == ["client 0 reads too slowly; its connection is closed"]
            assert set(at.ask(0, 1)) == {1}
            assert set(at.link.present()) == {1}


def test_a_client_that_never_answers_is_remembered_in_bounded_memory(at: Linked) -> None:
    with at.peer(0) as peer:
        requests = []
        for number in range(2 * MOST_UNANSWERED):
            requests.append(late(at, peer, number))
            peer.give_sign_of_life()
        assert len(at.link._exchanges._unanswered[0]) == MOST_UNANSWERED
        peer.connection.send(peer.reply(requests[0], b"very late"))
        until(lambda: not at.link.present())
        assert at.told == ["client 0 is disconnected: an answer that nobody asked for"]


def test_a_client_that_comes_and_goes_collects_neither_sockets_nor_lines_in_the_log(at: Linked) -> None:
    """It says goodbye each time, and keeps its socket open."""
    with ExitStack() as stack:
        for number in range(20):
            peer = stack.enter_context(at.peer(0, process=number.to_bytes(16, "big")))
            stack.enter_context(peer.connection.protocol_mutex)  # it closes nothing by itself
            if number % 4 == 1:
                peer.connection.protocol.send_close(GOODBYE)
                peer.connection.send_data()
            until(lambda: len(at.link._port._all) <= 3)
        assert len(at.told) == 1
