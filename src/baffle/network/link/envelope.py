"""Signed messages between the server and a client, and how large they may be.

    request   run 32 · id 16 · round 4 · phase 1 · signature 64 · body
    reply     first 4 bytes of the id · signature 64 · body

A signature covers tag, direction, sender, receiver, run, round, phase, id, the hash of the request and the hash of the
body. It names no connection, so a repeated message is the same bytes, and a proxy can change nothing. It is checked
before the body is read.
"""

import secrets
import struct
from dataclasses import dataclass
from hashlib import sha256

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from baffle.aggregation.context import length_prefixed, signed
from baffle.aggregation.messages import BOX_BYTES, MOST_KEYS, SIGNATURE_BYTES
from baffle.aggregation.shares import SHARE_BYTES
from baffle.errors import MessageError

TAG = b"message/2"
TO_CLIENT, TO_SERVER = b"to client", b"to server"

# The kinds of requests, each named by the tag of its message. A request's header holds the index of its kind.
_JOINING = ("introduce", "begin", "openings", "halt", "over")
PHASES = (*_JOINING, "hello", "turn", "request", "masked-request", "agree", "new-roster")

MOST_ROUND = 2**32 - 1

_HEADER = struct.Struct(">32s16sIB")
_SHORT_ID = 4
REQUEST_BYTES = _HEADER.size + SIGNATURE_BYTES  # what a request adds to its body
REPLY_BYTES = _SHORT_ID + SIGNATURE_BYTES  # what a reply adds to its body
SMALL = 8 * 1024  # room for a message without vectors, shares or keys; and for the rest of a message that has them
PLAN_BYTES = SMALL + (4 << 20)  # room for a plan of 2¹⁸ characters, or for a roster with some thousand more clients
KEY_BYTES = 32 + 5
MEMBER_BYTES = 512  # room for a client's commitment and tier in a statement, or for its place in a roster


@dataclass(frozen=True)
class Request:
    """A signed request, in the three parts of its frame: bodies may be large, so none is kept twice."""

    header: bytes
    signature: bytes
    body: bytes

    @property
    def frame(self) -> bytes:
        return self.header + self.signature + self.body

    @property
    def run(self) -> bytes:
        return self.header[:32]

    @property
    def id(self) -> bytes:
        return self.header[32:48]

    @property
    def round(self) -> int:
        return int.from_bytes(self.header[48:52], "big")

    @property
    def phase(self) -> str:
        return PHASES[self.header[52]]

    @property
    def short_id(self) -> bytes:
        """The part of the id by which a reply names this request."""
        return self.id[:_SHORT_ID]

    def hash(self) -> bytes:
        frame = sha256(self.header)
        frame.update(self.signature)
        frame.update(self.body)
        return frame.digest()


def answered_id(frame: bytes) -> bytes:
    """The short id of the request that a frame claims to answer."""
    return frame[:_SHORT_ID]


def ask(identity: Ed25519PrivateKey, receiver: bytes, run: bytes, number: int, phase: str, body: bytes) -> Request:
    """Sign a request about a round to the owner of a key."""
    if phase not in PHASES:
        raise MessageError(f"expected a message of {', '.join(PHASES)}, got {phase!r}")
    if not 0 <= number <= MOST_ROUND:
        raise MessageError(f"expected a round of 0 to {MOST_ROUND}, got {number}")
    header = _HEADER.pack(run, secrets.token_bytes(16), number, PHASES.index(phase))
    own = identity.public_key().public_bytes_raw()
    signature = identity.sign(_text(TO_CLIENT, own, receiver, header, b"", body))
    return Request(header, signature, body)


def read_request(sender: bytes, receiver: bytes, frame: bytes) -> Request:
    """Read a request that the owner of a key must have signed; refuse any other frame."""
    if len(frame) < REQUEST_BYTES:
        raise MessageError(f"a frame of {len(frame)} bytes, expected a request of at least {REQUEST_BYTES}")
    header, signature, body = frame[: _HEADER.size], frame[_HEADER.size : REQUEST_BYTES], frame[REQUEST_BYTES:]
    if not signed(sender, signature, _text(TO_CLIENT, sender, receiver, header, b"", body)):
        raise MessageError("a request that the server has not signed")
    if header[-1] >= len(PHASES):
        raise MessageError(f"a request of kind {header[-1]}, expected 0 to {len(PHASES) - 1}")
    return Request(header, signature, body)


def reply(identity: Ed25519PrivateKey, receiver: bytes, request: Request, body: bytes) -> bytes:
    own = identity.public_key().public_bytes_raw()
    signature = identity.sign(_text(TO_SERVER, own, receiver, request.header, request.hash(), body))
    return request.short_id + signature + body


def read_reply(sender: bytes, receiver: bytes, request: Request, frame: bytes) -> bytes:
    """The body of a reply that the owner of a key must have signed in answer to a request; refuse any other frame."""
    if len(frame) < REPLY_BYTES or answered_id(frame) != request.short_id:
        raise MessageError("a frame that answers another request")
    signature, body = frame[_SHORT_ID:REPLY_BYTES], frame[REPLY_BYTES:]
    if not signed(sender, signature, _text(TO_SERVER, sender, receiver, request.header, request.hash(), body)):
        raise MessageError("a reply that is not signed with the sender's key")
    return body


def _text(direction: bytes, sender: bytes, receiver: bytes, header: bytes, request_hash: bytes, body: bytes) -> bytes:
    run, request_id, number, phase = header[:32], header[32:48], header[48:52], header[52:]
    about = run, number, phase, request_id, request_hash
    return length_prefixed(TAG, direction, sender, receiver, *about, sha256(body).digest())


# Limits follow from a run's plan, so a frame that exceeds them is refused by its length alone


def most_bytes(phase: str, clients: int, contribution: int) -> int:
    """The most bytes of a reply to a request of this kind. Contributions to this run have `contribution` bytes."""
    turn = clients * (BOX_BYTES + SHARE_BYTES)
    more = {"hello": MOST_KEYS * KEY_BYTES, "turn": turn, "request": contribution, "masked-request": contribution}
    return SMALL + more.get(phase, 0)


def most_joining_bytes(clients: int) -> int:
    """The most bytes that a request may have before a client is in a run: a plan, and a list of clients."""
    return PLAN_BYTES + clients * MEMBER_BYTES


def most_request_bytes(clients: int, n_weights: int, contribution: int) -> int:
    """The most bytes that a request to a client may have: a whole state of the weights and what two optimizers' vectors
    and an average add to it; or all outcomes that are smaller than that; with lists of clients and their keys."""
    state = 16 * n_weights + contribution
    lists = clients * (4 * 9 + BOX_BYTES + SIGNATURE_BYTES + 256 * KEY_BYTES)
    return most_joining_bytes(clients) + 2 * state + lists
