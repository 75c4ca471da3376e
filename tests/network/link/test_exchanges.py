"""Who is waited for and who is not: clients that leave, break off, stall, come late or misbehave."""

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from websockets.exceptions import ConnectionClosed

from baffle.core.messages import encode
from baffle.network.joining import Introduce
from baffle.network.link import exchanges
from baffle.network.link.envelope import Request
from baffle.network.link.exchanges import GRACE, MOST_UNANSWERED
from baffle.network.link.handshake import GOODBYE
from baffle.network.link.limits import SMALL
from tests.support.links import RUN, Client, Keys, Peer, linked, proved, question, until

CONTRIBUTION = 100_000

SOON = 10.0
"""Seconds within which something ends at once, on a machine however busy; the deadlines here are longer."""


@pytest.fixture
def long_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody who waits for the seconds of grace is done soon."""
    monkeypatch.setattr(exchanges, "GRACE", 2 * SOON)


@pytest.mark.usefixtures("long_grace")
def test_the_goodbye_of_a_client_is_not_waited_for(keys: Keys) -> None:
    with linked(keys) as at, ThreadPoolExecutor() as pool, proved(at.address, keys.clients[0]) as peer:
        asking = pool.submit(at.ask, 0)
        peer.request()
        begun = time.monotonic()
        peer.connection.close(GOODBYE)
        assert asking.result() == {}
        assert time.monotonic() - begun < SOON
        assert not at.link.present()


@pytest.mark.usefixtures("long_grace")
def test_a_goodbye_counts_even_if_the_socket_stays_open(keys: Keys) -> None:
    with linked(keys) as at, ThreadPoolExecutor() as pool, proved(at.address, keys.clients[0]) as peer:
        asking = pool.submit(at.ask, 0)
        peer.request()
        peer.connection.protocol.send_close(GOODBYE)
        begun = time.monotonic()
        with peer.connection.protocol_mutex:
            peer.connection.send_data()
            assert asking.result() == {}
        assert time.monotonic() - begun < SOON


def test_a_client_whose_line_breaks_has_some_seconds_to_come_back(keys: Keys) -> None:
    with linked(keys) as at, ThreadPoolExecutor() as pool:
        with proved(at.address, keys.clients[0]) as peer:
            asking = pool.submit(at.ask, 0)
            first = peer.request()
            peer.connection.close_socket()
        begun = time.monotonic()
        time.sleep(0.1)
        assert set(at.link.present()) == {0}
        with proved(at.address, keys.clients[0]) as peer:
            again = peer.request()
            assert again.frame == first.frame
            peer.connection.close_socket()
        assert asking.result() == {}
        assert GRACE <= time.monotonic() - begun < GRACE + SOON
        assert not at.link.present()


def test_the_seconds_of_grace_begin_anew_with_each_break(keys: Keys) -> None:
    with linked(keys) as at, ThreadPoolExecutor() as pool:
        with proved(at.address, keys.clients[0]) as peer:
            asking = pool.submit(at.ask, 0)
            peer.request()
            peer.connection.close_socket()
        for _ in range(2):
            time.sleep(0.7 * GRACE)
            with proved(at.address, keys.clients[0]) as peer:
                peer.request()
                peer.connection.close_socket()
        time.sleep(0.7 * GRACE)
        with proved(at.address, keys.clients[0]) as peer:
            peer.connection.send(peer.reply(peer.request(), b"at last"))
            assert asking.result() == {0: b"at last"}


def test_a_client_that_comes_back_during_an_exchange_is_asked_although_its_line_was_broken_before(keys: Keys) -> None:
    with linked(keys) as at, ThreadPoolExecutor() as pool:
        with proved(at.address, keys.clients[0]) as peer:
            peer.connection.close_socket()
        until(lambda: not at.link._exchanges.connections)
        asking = pool.submit(at.ask, 0)
        time.sleep(0.2)
        with proved(at.address, keys.clients[0]) as peer:
            peer.connection.send(peer.reply(peer.request(), b"here"))
            assert asking.result() == {0: b"here"}


@pytest.mark.slow
def test_a_stopped_process_is_left_out_and_not_asked_again_before_it_gives_a_sign_of_life(
    keys: Keys, tmp_path: Path
) -> None:
    with linked(keys, seconds=1.0) as at, Client(at.address, keys.clients[1]):
        folder = keys.server.certificate.parent.parent / "client-0"
        script = (
            "import sys\nfrom pathlib import Path\nfrom baffle.network.keys import ClientKeys\n"
            "from baffle.network.link.client import Line, client_tls\n"
            "own = ClientKeys.load(Path(sys.argv[2]))\n"
            "with Line(sys.argv[1], own, client_tls(own), print) as line:\n"
            "    for request in line.requests():\n        line.reply(request, b'here')\n"
        )
        with (tmp_path / "log").open("wb") as log:
            process = subprocess.Popen([sys.executable, "-c", script, at.address, str(folder)], stdout=log, stderr=log)
        try:
            at.until_present(0, 1)
            assert set(at.ask(0, 1)) == {0, 1}
            os.kill(process.pid, signal.SIGSTOP)
            begun = time.monotonic()
            assert set(at.ask(0, 1)) == {1}
            assert time.monotonic() - begun > 0.9
            sent = at.link.counts["sent bytes"]
            begun = time.monotonic()
            for number in range(5):
                assert set(at.ask(0, 1, number=number)) == {1}
            assert time.monotonic() - begun < 0.9, "nobody waits for it"
            assert at.link.counts["late"] == 1
            assert at.link.counts["sent bytes"] - sent < 6 * (len(question(0)) + 117), "it is not even asked"
            os.kill(process.pid, signal.SIGCONT)
            until(lambda: set(at.ask(0, 1)) == {0, 1})
        finally:
            process.kill()
            process.wait()
    assert not at.told


def test_an_answer_after_its_deadline_is_ignored_and_not_held_against_the_client(keys: Keys) -> None:
    with linked(keys, seconds=0.1) as at, proved(at.address, keys.clients[0]) as peer:
        requests = []
        for number in range(4):
            assert at.ask(0, number=number) == {}
            requests.append(peer.request())
            peer.connection.ping()  # a sign of life
            time.sleep(0.05)
        for request in requests:
            peer.connection.send(peer.reply(request, b"late"))
        time.sleep(0.1)
        assert 0 in at.link.present()
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
    def pieces() -> Iterator[bytes]:
        while True:
            yield b""

    peer.connection.send(pieces())


def flood_of_pings(peer: Peer, _request: Request) -> None:
    while True:
        peer.connection.ping(secrets.token_bytes(8))


def flood_of_pongs(peer: Peer, _request: Request) -> None:
    while True:
        peer.connection.pong(b"unasked")


def unmasked(peer: Peer, _request: Request) -> None:
    peer.connection.socket.sendall(b"\x82\x05hello")


def too_large(size: int) -> Callable[[Peer, Request], bytes]:
    return lambda peer, request: peer.reply(request, bytes(size))


def honest(peer: Peer, request: Request) -> bytes:
    return peer.reply(request, b"honest")


def other(peer: Peer, request: Request) -> bytes:
    return peer.reply(request, b"another")


def forged(_peer: Peer, request: Request) -> bytes:
    return request.short_id + bytes(64) + b"forged"


@pytest.mark.usefixtures("long_grace")
@pytest.mark.parametrize(
    ("misbehave", "words"),
    [
        (send(too_large(CONTRIBUTION + SMALL + 1)), "exceeds limit of 108260 bytes"),
        (send(too_large(150_000_000)), "exceeds limit of 108260 bytes"),
        (send(forged), "a reply that is not signed with the sender's key"),
        (send(b"????" + bytes(64)), "an answer that nobody asked for"),
        (send(b""), "an answer that nobody asked for"),
        (send(b"\x00"), "an answer that nobody asked for"),
        (send("text"), "not whole or not binary"),
        (in_fragments, "not whole or not binary"),
        (in_endless_fragments, "not whole or not binary"),
        (flood_of_pings, "too many pings"),
        (flood_of_pongs, "too many pings"),
        (unmasked, "incorrect masking"),
    ],
    ids=[
        *("too large", "150 MB", "forged", "to nothing", "empty", "one byte", "text", "fragments", "endless fragments"),
        *("pings", "pongs", "unmasked"),
    ],
)
def test_who_misbehaves_is_disconnected_and_not_waited_for(keys: Keys, misbehave: Misbehave, words: str) -> None:
    with (
        linked(keys) as at,
        Client(at.address, keys.clients[1]),
        proved(at.address, keys.clients[0]) as peer,
        ThreadPoolExecutor() as pool,
    ):
        at.link.expect(CONTRIBUTION)
        at.until_present(1)
        begun = time.monotonic()
        asking = pool.submit(at.ask, 0, 1)
        with suppress(ConnectionClosed, OSError):  # the link may close the line while its peer still sends
            misbehave(peer, peer.request())
        assert set(asking.result()) == {1}
        assert time.monotonic() - begun < SOON
        assert set(at.link.present()) == {1}, "it has no seconds of grace either"
        assert at.link.counts["refused"] == 1
        (told,) = at.told
        assert told.startswith("client 0 is disconnected: ")
        assert words in told


@pytest.mark.parametrize("second", [honest, other, forged], ids=["the same", "another", "forged"])
def test_the_first_answer_counts_and_a_second_one_ends_the_connection(
    keys: Keys, second: Callable[[Peer, Request], bytes]
) -> None:
    with linked(keys) as at, proved(at.address, keys.clients[0]) as peer, ThreadPoolExecutor() as pool:
        asking = pool.submit(at.ask, 0)
        request = peer.request()
        with suppress(ConnectionClosed):
            send(honest, second)(peer, request)
        assert asking.result() == {0: b"honest"}
        until(lambda: not at.link.present())
        assert at.told == ["client 0 is disconnected: an answer that nobody asked for"]


def test_nothing_after_a_wrong_frame_is_read(keys: Keys) -> None:
    with linked(keys) as at, proved(at.address, keys.clients[0]) as peer, ThreadPoolExecutor() as pool:
        asking = pool.submit(at.ask, 0)
        request = peer.request()
        with peer.connection.protocol_mutex:  # all in one piece
            for answer in (forged, honest):
                peer.connection.protocol.send_binary(answer(peer, request))
            peer.connection.send_data()
        assert asking.result() == {}
        assert at.link.counts["refused"] == 1


def test_the_answer_to_one_client_is_no_answer_of_another(keys: Keys) -> None:
    with (
        linked(keys) as at,
        proved(at.address, keys.clients[0]) as first,
        proved(at.address, keys.clients[1]) as second,
        ThreadPoolExecutor() as pool,
    ):
        asking = pool.submit(at.ask, 0, 1)
        mine, yours = first.request(), second.request()
        stolen = second.reply(yours, b"mine, I say")
        first.connection.send(mine.short_id + stolen[4:])
        second.connection.send(stolen)
        assert asking.result() == {1: b"mine, I say"}
        assert at.told == ["client 0 is disconnected: a reply that is not signed with the sender's key"]


def test_a_large_answer_that_comes_late_is_forgiven_also_in_a_phase_of_small_ones(keys: Keys) -> None:
    small = encode(Introduce("a plan", 1, bytes(32), 0))
    with linked(keys, seconds=0.2) as at, proved(at.address, keys.clients[0]) as peer, ThreadPoolExecutor() as pool:
        at.link.expect(CONTRIBUTION)
        assert at.ask(0) == {}
        late = peer.reply(peer.request(), bytes(CONTRIBUTION))
        peer.connection.ping()
        time.sleep(0.1)
        asking = pool.submit(at.link.carry, {0: small}, RUN)
        request = peer.request()
        peer.connection.send(late)
        peer.connection.send(peer.reply(request, b"in time"))
        assert asking.result() == {0: b"in time"}
        with suppress(ConnectionClosed):
            asking = pool.submit(at.link.carry, {0: small}, RUN)
            peer.connection.send(peer.reply(peer.request(), bytes(CONTRIBUTION)))
        assert asking.result() == {}
    assert len(at.told) == 1


def test_a_slow_reader_is_dropped_at_the_deadline_and_costs_nothing_else(keys: Keys) -> None:
    with linked(keys, seconds=2) as at, Client(at.address, keys.clients[1]) as client:
        client.line.allow(40_000_000)
        at.until_present(1)
        with proved(at.address, keys.clients[0]) as peer, peer.connection.protocol_mutex:
            # it reads no more than its machine's buffers take
            assert set(at.ask(0, 1, size=30_000_000)) == {1}
            assert at.told == ["client 0 reads too slowly; its connection is closed"]
            begun = time.monotonic()
            assert set(at.ask(0, 1)) == {1}
            assert time.monotonic() - begun < 1.5
            assert set(at.link.present()) == {1}


@pytest.mark.parametrize("tls", [True, False])
def test_what_a_slow_reader_leaves_is_counted(keys: Keys, tls: bool) -> None:
    with linked(keys, tls=tls) as at, proved(at.address, keys.clients[0], tls=tls) as peer:
        at.until_present(0)
        connection = at.link._exchanges.connections[0]
        with peer.connection.protocol_mutex, ThreadPoolExecutor() as pool:
            asking = pool.submit(at.ask, 0, size=30_000_000)
            until(lambda: connection.unsent > 10_000_000)
            connection._loop.call_soon_threadsafe(connection.drop)
            assert asking.result() == {}


def test_a_client_that_never_answers_is_remembered_in_bounded_memory(keys: Keys) -> None:
    with linked(keys, seconds=0.01) as at, proved(at.address, keys.clients[0]) as peer:
        requests = []
        for number in range(2 * MOST_UNANSWERED):
            assert not at.ask(0, number=number)
            requests.append(peer.request())
            peer.connection.ping().wait(5)
        assert len(at.link._exchanges._unanswered[0]) == MOST_UNANSWERED
        peer.connection.send(peer.reply(requests[0], b"very late"))
        until(lambda: not at.link.present())
        assert at.told == ["client 0 is disconnected: an answer that nobody asked for"]


def test_a_client_that_comes_and_goes_collects_neither_sockets_nor_lines_in_the_log(keys: Keys) -> None:
    """It says goodbye each time, and keeps its socket open."""
    with linked(keys) as at, ExitStack() as sockets:
        for number in range(20):
            peer = sockets.enter_context(proved(at.address, keys.clients[0], process=number.to_bytes(16, "big")))
            sockets.enter_context(peer.connection.protocol_mutex)  # it closes nothing by itself
            if number % 4 == 1:
                peer.connection.protocol.send_close(GOODBYE)
                peer.connection.send_data()
            until(lambda: len(at.link._port._all) <= 3, 1)
        assert len(at.told) == 1
