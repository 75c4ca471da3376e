"""Strangers at the port of a real link, with and without TLS, while a real client is connected.

They send requests that are cut off or of other pages, damaged openings of websockets, damaged frames, frames that are
too large, handshakes with wrong proofs, records of TLS that are none, random bytes, or nothing at all; some stay for a
while. The client is asked all the while and must answer. When all strangers have gone, the process has as many threads
and open files as before, and the link has told of no mistake.
"""

import socket
import ssl
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from random import Random

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from websockets.frames import Frame, Opcode

from baffle.core.messages import encode
from baffle.errors import BaffleError
from baffle.network.link.handshake import Accepted, Challenge, ClientSide, Greeting, Proof
from fuzzing.checks import ACCEPTED, REFUSED, Tried, violation
from fuzzing.damage import Mutations
from tests.support.links import HOST, UPGRADE, Client, Keys, Linked, dial, linked, new_keys, until

ASK_EVERY = 50
"""After so many strangers the client is asked."""

ANSWER_SECONDS = 10.0
"""It answers in this time, on a busy machine."""

STAY = 40
"""How many strangers stay at the same time."""

LOOKS = 0.02
"""Seconds for which a stranger waits for an answer."""

PATHS = (
    "/",
    "/link",
    "/status",
    "/metrics",
    "/health",
    "/health/",
    "//health",
    "/health?x",
    "*",
    "x",
    "/" + "x" * 9000,
)
METHODS = ("GET", "HEAD", "POST", "OPTIONS", "CONNECT", "get", "\0", "GET" * 400)
HEADERS = (
    "Host: x", "Content-Length: 150000000", "Content-Length: -1", "Content-Length: 9", "Transfer-Encoding: chunked",
    "Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Version: 12",
    "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==", "Sec-WebSocket-Key: x",
    "Sec-WebSocket-Extensions: permessage-deflate", "Sec-WebSocket-Protocol: x", "Authorization: Bearer x",
    "Authorization: Bearer \u00e9", "Origin: http://x", ": x",
    "x", "Expect: 100-continue", "Host: x\r\nHost: y", "X: " + "y" * 9000,
)  # fmt: skip


def _frame(opcode: int, data: bytes = b"", *, fin: bool = True) -> bytes:
    """A frame as clients send it, if need be against the rules."""
    length = bytes([0x80 | len(data)]) if len(data) < 126 else b"\xfe" + len(data).to_bytes(2, "big")
    return bytes([fin << 7 | opcode]) + length + bytes(4) + data


class Stranger:
    """Makes up what strangers send."""

    def __init__(self, draw: Random, keys: Keys) -> None:
        self.draw, self._server = draw, keys.server.identity.public_key().public_bytes_raw()
        self._identity = Ed25519PrivateKey.generate()
        proof = Proof(bytes(32), bytes(16), bytes(64))
        self._frames = [
            encode(one) for one in (Greeting(bytes(32), HOST), proof, Challenge(bytes(32), bytes(64)), Accepted())
        ]
        self._mutations = Mutations(draw, self._frames)
        self.kinds: dict[str, Callable[[], bytes]] = {
            "bytes at random": self._anything,
            "half a request": self._half_request,
            "a request": self._request,
            "a damaged opening": self._opening,
            "damaged frames": self._some_frames,
            "a damaged handshake": self._handshake,
            "a large frame": self._large,
            "nothing": bytes,
        }

    def _anything(self) -> bytes:
        head = self.draw.choice(
            (b"", b"\x16\x03\x01\x02\x00\x01", b"\x17\x03\x03\x40\x00", b"GET /link HTTP/1.1\r\n", UPGRADE)
        )
        return head + self.draw.randbytes(self.draw.choice((1, 10, 100, 3000, 20_000)))

    def _request(self) -> bytes:
        lines = [
            f"{self.draw.choice(METHODS)} {self.draw.choice(PATHS)} HTTP/{self.draw.choice(('1.1', '1.0', '2', 'x'))}"
        ]
        lines += self.draw.choices(HEADERS, k=self.draw.choice((0, 1, 3, 9, 200)))
        return "\r\n".join([*lines, "", ""]).encode() + self.draw.randbytes(self.draw.choice((0, 9)))

    def _half_request(self) -> bytes:
        whole = self.draw.choice((UPGRADE, self._request()))
        return whole[: self.draw.randrange(len(whole))]

    def _opening(self) -> bytes:
        return self._mutations.bytes_of(UPGRADE)

    def _some_frames(self) -> bytes:
        """Frames of every kind, in any order."""
        frames = [self._one_frame() for _ in range(self.draw.choice((1, 2, 5, 150)))]
        if self.draw.random() < 0.2:
            frames.append(Frame(Opcode.BINARY, self._frames[0]).serialize(mask=False))
        sent = b"".join(frames)
        return UPGRADE + (self._mutations.bytes_of(sent) if self.draw.random() < 0.5 else sent)

    def _one_frame(self) -> bytes:
        data = self.draw.choice((b"", self.draw.randbytes(130), self.draw.choice(self._frames)))
        return _frame(self.draw.randrange(16), data, fin=self.draw.random() < 0.8)

    def _handshake(self) -> bytes:
        """Frames of the handshake with other content."""
        first = self._mutations.of(self._frames[0]) if self.draw.random() < 0.6 else self._frames[0]
        second = self._mutations.of(self.draw.choice(self._frames))
        return UPGRADE + b"".join(_frame(Opcode.BINARY, one) for one in (first, second) if len(one) < 1 << 16)

    def _large(self) -> bytes:
        size = self.draw.choice((513, 20_000, 2**31, 2**62, 2**63, 2**64 - 1))
        return UPGRADE + b"\x82\xff" + size.to_bytes(8, "big") + bytes(4) + bytes(min(size, 18_000))

    def prove(self, at: socket.socket) -> bytes:
        """Keep to the handshake up to the proof, which is that of nobody, or damaged."""
        at.sendall(UPGRADE)
        at.recv(4096)
        side = ClientSide(self._identity, self._server, HOST, self.draw.randbytes(16))
        at.sendall(_frame(Opcode.BINARY, side.greeting()))
        answer = at.recv(4096)
        proof = side.proof(answer[2 + 2 * (answer[1] == 126) :])
        sent = proof if self.draw.random() < 0.3 else self._mutations.of(proof)
        if len(sent) < 1 << 16:
            at.sendall(_frame(Opcode.BINARY, sent))
        return sent


def strangers(count: int, seed: int) -> Iterator[Tried]:
    """What strangers send: half of it without TLS, half with it."""
    draw = Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        keys = new_keys(Path(folder) / "keys", 2)
        for tls in (False, True):
            yield from _at_a_link(draw, keys, count // 2 if tls else count - count // 2, tls=tls)


def _at_a_link(draw: Random, keys: Keys, count: int, *, tls: bool) -> Iterator[Tried]:
    where, stranger = f"stranger, {'with' if tls else 'without'} TLS", Stranger(draw, keys)
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with linked(keys, seconds=ANSWER_SECONDS, tls=tls) as at, Client(at.address, keys.clients[0], tls=tls):
        at.until_present(0)
        before = _threads_and_files(at)
        with ExitStack() as stay:
            staying: list[socket.socket] = []
            for number in range(count):
                yield _tried(where, stranger, at, context if tls else None, staying)
                for left in staying[:-STAY]:
                    left.close()
                del staying[:-STAY]
                if number % ASK_EVERY == ASK_EVERY - 1 and (fault := _ask(where, at, number)):
                    yield fault
            for left in staying:
                stay.enter_context(left)
        yield from _afterwards(where, at, before)


def _tried(
    where: str, stranger: Stranger, at: Linked, tls: ssl.SSLContext | None, staying: list[socket.socket]
) -> Tried:
    """Send one thing. Outcomes are the server's: whether it answered anything, or closed the connection, or waits."""
    draw, sent = stranger.draw, b""
    source = HOST if draw.random() < 0.9 else f"127.0.0.{draw.randrange(2, 250)}"
    try:
        raw = dial(at.address, tls if draw.random() < 0.8 else None, source)
    except OSError:  # turned away
        return Tried(where, REFUSED, sent)
    outcome = REFUSED
    try:
        raw.settimeout(5.0)
        kind = draw.choice((*stranger.kinds, "a wrong proof", "a wrong proof"))
        if kind == "a wrong proof":
            sent = stranger.prove(raw)
        else:
            sent = stranger.kinds[kind]()
            raw.sendall(sent)
        if draw.random() < 0.7:
            raw.settimeout(LOOKS)
            outcome = ACCEPTED if raw.recv(4096).startswith(b"HTTP/1.1 200") else REFUSED
    except (OSError, IndexError, BaffleError):  # closed, nothing to read, or no challenge, as a stranger must expect
        pass
    if draw.random() < 0.2:
        staying.append(raw)
    else:
        raw.close()
    return Tried(where, outcome, sent)


def _ask(where: str, at: Linked, number: int) -> Tried | None:
    """The violation if the client's exchange does not come through, soon."""
    began = time.monotonic()
    answered = set(at.ask(0, number=number))
    took = time.monotonic() - began
    if answered == {0} and took < ANSWER_SECONDS:
        return None
    return Tried(where, violation(where, f"the client that is connected was not answered ({took:.0f} s)"), b"")


def _threads_and_files(at: Linked) -> tuple[int, int, int]:
    return threading.active_count(), len(list(Path("/proc/self/fd").iterdir())), len(at.link._port._all)


def _afterwards(where: str, at: Linked, before: tuple[int, int, int]) -> Iterator[Tried]:
    """The violations, if there are any, when all strangers have gone."""

    def has_grown() -> bool:
        return any(now > then for now, then in zip(_threads_and_files(at), before, strict=True))

    with suppress(AssertionError):
        until(lambda: not has_grown())
    if has_grown():
        after = _threads_and_files(at)
        yield Tried(where, violation(where, f"threads, files and connections have grown from {before} to {after}"), b"")
    if fault := _ask(where, at, 0):
        yield fault
    for words in at.told:
        yield Tried(where, violation(where, f"the link tells: {words}"), b"")
