"""A stranger at the port of a server whose run goes on: whatever it sends, it is turned away, and no run is harmed."""

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread

import pytest

from baffle.errors import TransportError
from baffle.journal.audit import verify
from baffle.network.keys.authority import ServerKeys
from baffle.network.link.client import Line
from baffle.network.link.server import Link
from baffle.network.member.policy import Policy
from baffle.plan import Plan
from tests.support.lines_in_memory import Federation, new_keys
from tests.support.links import PATIENCE, until
from tests.support.served import Served

UPGRADE = (
    b"GET /link HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)
WORDS: dict[str, bytes] = {
    "nothing": b"",
    "half a request": b"GET /hea",
    "a body without end": b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 150000000\r\n\r\n" + bytes(100_000),
    "headers without end": b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 10_000,
    "noise": bytes(range(256)) * 50,
    "a websocket and silence": UPGRADE,
    "a websocket and noise": UPGRADE + b"\x82\x7f" + b"\xff" * 8 + bytes(1000),
    "a websocket and a fragment": UPGRADE + b"\x02\x81\x00\x00\x00\x00\x00",
}
"""What a stranger says before it waits."""


@pytest.fixture
def federation(tiny: Callable[..., Plan], tmp_path: Path) -> Federation:
    plan = tiny(
        *('secure.mode="malicious-server"', "federation.weighting=uniform", "rounds=40"),
        *("run.deadline_seconds=3000", "run.evaluate_every=1000"),
    )
    return Federation(new_keys(tmp_path, 3), tmp_path, plan, policy=Policy(without_privacy=True))


@contextmanager
def besieged(address: tuple[str, int], words: bytes) -> Iterator[None]:
    """Strangers that connect again and again, say this and wait, as long as a test lasts."""
    over = Event()

    def call() -> None:
        with ExitStack() as sockets:
            while not over.wait(0.005):
                with suppress(OSError):
                    sockets.enter_context(socket.create_connection(address, 1)).sendall(words)

    thread = Thread(target=call, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(PATIENCE)


QUICK = ("noise", "a websocket and silence")


@pytest.mark.parametrize(
    "words", [words if words in QUICK else pytest.param(words, marks=pytest.mark.slow) for words in WORDS]
)
def test_a_stranger_at_the_port_harms_no_run(federation: Federation, words: str) -> None:
    own = ServerKeys.load(federation.folder / "keys" / "server")
    with Link(own, "localhost", 0, None, PATIENCE, tell=federation.told.append) as link:
        server = Served(federation, own, link)
        with besieged(("localhost", link.port), WORDS[words]):
            clients = [server.join(number) for number in range(3)]
            summary = server.end()
        until(lambda: all(client.ended for client in clients))
    assert [client.fault for client in clients] == [None] * 3
    assert (summary["rounds"], summary["skipped_rounds"], summary["dropouts"]) == (40, 0, 0)
    assert verify(federation.run).weights_sha256 == federation.require_agreement(range(3))


def test_a_stranger_with_a_key_of_its_own_is_asked_nothing(federation: Federation, tmp_path: Path) -> None:
    """Its keys are sound, of another federation; it speaks the whole protocol, and knows this one's roster."""
    own = ServerKeys.load(federation.folder / "keys" / "server")
    posing = replace(federation.keys[0], identity=new_keys(tmp_path / "other", 1)[0].identity)
    with Link(own, "localhost", 0, None, PATIENCE, tell=federation.told.append) as link:
        server = Served(federation, own, link)
        clients = [server.join(number) for number in range(3)]
        until(lambda: server.rounds >= 2)
        with (
            pytest.raises(TransportError, match="refuses this client's key"),
            Line(server.address, posing, None, lambda _words: None) as line,
        ):
            next(line.requests())
        summary = server.end()
        until(lambda: all(client.ended for client in clients))
    assert (summary["rounds"], summary["skipped_rounds"]) == (40, 0)
