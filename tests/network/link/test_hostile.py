"""Strangers at the port while a run goes on: whatever they send, they are turned away, and nobody else notices."""

import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from websockets.frames import Frame, Opcode

from baffle.core.messages import encode
from baffle.network.link.client import client_tls
from baffle.network.link.handshake import Accepted, Greeting
from tests.support.links import HOST, Client, Keys, Linked, dial, is_closed, linked, new_keys, until
from tests.support.strangers import UPGRADE


@pytest.fixture(scope="module")
def busy(keys: Keys) -> Iterator[Linked]:
    """A link with three clients."""
    with linked(keys) as at, ExitStack() as clients:
        for number in range(3):
            clients.enter_context(Client(at.address, keys.clients[number]))
        at.until_present(0, 1, 2)
        yield at


def masked(opcode: Opcode, data: bytes = b"", *, fin: bool = True) -> bytes:
    """A frame as clients send it, if need be against the rules."""
    length = bytes([0x80 | len(data)]) if len(data) < 126 else b"\xfe" + len(data).to_bytes(2, "big")
    return bytes([fin << 7 | opcode]) + length + bytes(4) + data


def page(path: str, *headers: str, method: str = "GET") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: x", *headers, "", ""]).encode()


GREETING = encode(Greeting(bytes(32), HOST))
ODD = {
    "a page and frames behind it": page("/health") + masked(Opcode.BINARY, GREETING),
    "a page that is not there and a close frame": page("/nothing") + masked(Opcode.CLOSE),
    "a page and another": page("/health") + page("/health"),
    "an upgrade and a close frame": UPGRADE + masked(Opcode.CLOSE),
    "an upgrade and a ping": UPGRADE + masked(Opcode.PING) + masked(Opcode.CLOSE),
    "an upgrade, a close frame and a greeting": UPGRADE + masked(Opcode.CLOSE) + masked(Opcode.BINARY, GREETING),
    "an upgrade twice": UPGRADE + UPGRADE,
    "an upgrade of another path": UPGRADE.replace(b"/link", b"/status"),
    "an upgrade with a body": UPGRADE.replace(b"Host: x", b"Host: x\r\nContent-Length: 9") + b"123456789",
    "an upgrade of another version": UPGRADE.replace(b"Version: 13", b"Version: 12"),
    "two greetings": UPGRADE + 2 * masked(Opcode.BINARY, GREETING),
    "a greeting in pieces": UPGRADE + masked(Opcode.BINARY, GREETING, fin=False) + masked(Opcode.CONT, b""),
    "a greeting as text": UPGRADE + masked(Opcode.TEXT, GREETING),
    "a continuation of nothing": UPGRADE + masked(Opcode.CONT, GREETING),
    "a message of the server": UPGRADE + masked(Opcode.BINARY, encode(Accepted())),
    "a frame without a mask": UPGRADE + Frame(Opcode.BINARY, GREETING).serialize(mask=False),
    "a frame with reserved bits": UPGRADE + b"\xf2\x80\x00\x00\x00\x00",
    "a frame of a kind that does not exist": UPGRADE + b"\x83\x80\x00\x00\x00\x00",
    "a ping that is too long": UPGRADE + b"\x89\xfe\x00\xff" + bytes(4 + 255),
    "a frame of 2⁶³ bytes": UPGRADE + b"\x82\xff" + b"\xff" * 8 + bytes(4),
    "a close frame with half a code": UPGRADE + masked(Opcode.CLOSE, b"\x03"),
    "a close frame with a code that does not exist": UPGRADE + masked(Opcode.CLOSE, b"\x00\x01"),
    "a close frame that is no text": UPGRADE + masked(Opcode.CLOSE, b"\x03\xe8\xff\xfe"),
    "a line without end": b"GET /" + b"x" * 20_000,
    "too many headers": page("/health", *[f"h{n}: v" for n in range(500)]),
    "a header without a name": page("/health", ": nothing"),
    "letters that are no letters": b"GET /h\xc3\xa9alth HTTP/1.1\r\nHost: x\r\n\r\n",
    "another protocol": b"GET /health HTTP/2.0\r\nHost: x\r\n\r\n",
    "a body of 150 MB": page("/health", "Content-Length: 150000000", method="POST") + bytes(30_000),
    "a body of a negative length": page("/health", "Content-Length: -1", method="POST"),
    "a body in chunks": page("/health", "Transfer-Encoding: chunked", method="POST") + b"ffffffff\r\n",
    "a request to a proxy": b"CONNECT example.org:443 HTTP/1.1\r\nHost: example.org\r\n\r\n",
    "only ends of lines": b"\r\n" * 100,
    "the bytes of all kinds": bytes(range(256)),
}


@pytest.mark.parametrize("sent", ODD.values(), ids=ODD)
def test_odd_requests_are_turned_away(busy: Linked, sent: bytes) -> None:
    with dial(busy.address, client_tls(busy.keys.clients[0])) as stranger:
        stranger.sendall(sent)
        assert is_closed(stranger, 3)
    assert set(busy.ask(0, 1, 2)) == {0, 1, 2}
    assert busy.told == []


@pytest.mark.parametrize("path", ["/", "/link", "/status", "/metrics", "/health/", "//health", "/health?x", "*", "x"])
def test_nothing_else_answers(busy: Linked, path: str) -> None:
    for method in ("GET", "POST", "OPTIONS"):
        with dial(busy.address, client_tls(busy.keys.clients[0])) as stranger:
            stranger.sendall(page(path, method=method))
            assert stranger.recv(4096).startswith(b"HTTP/1.1 404 Not Found\r\n")
            assert is_closed(stranger, 3)
    assert busy.told == []


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    before=st.sampled_from([b"", page("/health")[:-2], UPGRADE, UPGRADE + masked(Opcode.BINARY, GREETING)]),
    sent=st.one_of(
        st.binary(max_size=300),
        st.lists(
            st.builds(masked, st.sampled_from(list(Opcode)), st.binary(max_size=130), fin=st.booleans()), max_size=5
        ).map(b"".join),
    ),
)
def test_random_bytes_do_no_harm(busy: Linked, before: bytes, sent: bytes) -> None:
    with dial(busy.address, client_tls(busy.keys.clients[0])) as stranger:
        stranger.sendall(before + sent)
    with dial(busy.address) as stranger:
        stranger.sendall(sent)
    assert set(busy.ask(0, 1, 2)) == {0, 1, 2}
    assert set(busy.link.present()) == {0, 1, 2}
    assert busy.told == []


def test_four_hundred_open_sockets_leave_room_for_a_client_from_elsewhere(keys: Keys) -> None:
    with linked(keys) as at, ExitStack() as crowd:
        for _ in range(400):
            crowd.enter_context(dial(at.address, source="127.0.0.6"))
        begun = time.monotonic()
        with Client(at.address, keys.clients[0]):
            at.until_present(0)
            assert time.monotonic() - begun < 10
            assert len(at.link._port._all) <= at.link._port.door.places + 1


def test_a_flood_from_an_address_that_is_shut_out_does_not_keep_clients_waiting(keys: Keys) -> None:
    with linked(keys) as at, Client(at.address, keys.clients[0]):
        at.until_present(0)
        for _ in range(2000):
            dial(at.address, source="127.0.0.6").close()
        begun = time.monotonic()
        assert set(at.ask(0)) == {0}
        assert time.monotonic() - begun < 5
        with Client(at.address, keys.clients[1]):
            at.until_present(1)
            assert time.monotonic() - begun < 15


@pytest.mark.slow
def test_when_a_server_starts_again_all_its_clients_come_back_at_once(tmp_path: Path) -> None:
    """They are more than there are places in the doorway, all from one address that is not known yet."""
    clients = 300
    keys = new_keys(tmp_path / "keys", clients)
    with linked(keys) as at:
        assert clients > at.link._port.door.places
    with ExitStack() as crowd:
        lines = [crowd.enter_context(Client(at.address, own)) for own in keys.clients]
        until(lambda: all(client.told for client in lines))
        with linked(keys, port=at.link.port) as again:
            until(lambda: len(again.link.present()) == clients, 90)
            assert set(again.ask(*range(clients))) == set(range(clients))
            assert not any(client.fault for client in lines)
            assert not again.told


@contextmanager
def beside(*arguments: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Another Python process, once it has printed a line."""
    process = subprocess.Popen(
        [sys.executable, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[3]
    )
    assert process.stdin
    assert process.stdout
    process.stdout.readline()
    try:
        yield process
    finally:
        process.kill()
        process.stdin.close()
        process.stdout.close()
        process.wait()


def cost_of_exchanges(at: Linked, seconds: float) -> list[float]:
    """CPU seconds of this process for an exchange, in slices of a quarter of a second. Every client must answer."""
    costs = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        used, slice_end, count = time.process_time(), time.monotonic() + 0.25, 0
        while time.monotonic() < slice_end:
            assert set(at.ask(0, 1, 2, number=count)) == {0, 1, 2}
            count += 1
        costs.append((time.process_time() - used) / count)
    return costs


def peak_memory() -> int:
    """Bytes."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return 1024 * int(line.split()[1])


@pytest.mark.slow
@pytest.mark.parametrize(("source", "share"), [("127.0.0.6", 1.1), (HOST, 1.5)], ids=["elsewhere", "shared address"])
def test_strangers_cost_a_run_little_time_and_memory(busy: Linked, source: str, share: float) -> None:
    """Ten kinds of strangers at once, without a pause. CPU time is compared, because the strangers need some, too;
    quiet and loud seconds take turns, because the machine may have other work. In quiet seconds somebody else keeps a
    core as busy as the strangers do: a core whose neighbour is busy is slower. An address that clients have come from
    is never shut out, so strangers there cost more."""
    cost_of_exchanges(busy, 0.5)
    Path("/proc/self/clear_refs").write_text("5")  # peak memory begins anew
    before = peak_memory()
    quiet, loud = [], []
    spin = "print(flush=True)\nwhile True: pass"
    with beside("-m", "tests.support.strangers", str(busy.link.port), source) as strangers, beside("-c", spin) as other:
        os.kill(other.pid, signal.SIGSTOP)
        cost_of_exchanges(busy, 1.5)
        for _ in range(5):
            loud += cost_of_exchanges(busy, 1)
            os.kill(strangers.pid, signal.SIGSTOP)
            os.kill(other.pid, signal.SIGCONT)
            time.sleep(0.1)
            quiet += cost_of_exchanges(busy, 1)
            os.kill(other.pid, signal.SIGSTOP)
            os.kill(strangers.pid, signal.SIGCONT)
    low, _, high = statistics.quantiles(quiet, n=4)
    assert statistics.median(loud) < share * statistics.median(quiet) + (high - low)
    assert peak_memory() - before < 64_000_000
    assert busy.link._port.door.turned_away > 100
    assert busy.told == []
