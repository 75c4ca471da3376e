"""Messages, the handshake, and signed requests and replies, as docs/protocol.md has them."""

import struct
from collections.abc import Iterable
from hashlib import sha256
from typing import Any, NamedTuple

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

SIZES = {"key": 32, "hash": 32, "session": 16, "signature": 64, "share": 16}

SCHEMA = {
    "link/2/greeting": "nonce:key host:text",
    "link/2/challenge": "nonce:key signature:signature",
    "link/2/proof": "key:key process:session signature:signature",
    "link/2/accepted": "",
    "introduce": "plan:text roster:number roster_hash:hash epoch:number",
    "introduction": "affords:number commitment:hash signature:signature",
    "behind": "",
    "new-roster": "roster:bytes",
    "roster-taken": "",
    "begin": "statement:bytes past:[past-epoch certificate:certificate? answered:number",
    "statement": "protocol:number plan:text initial:hash roster:number roster_hash:hash tiers:[number epoch:number "
    "previous:hash first:number chain:hash commitments:[commitment unopened:[commitment",
    "commitment": "client:number commitment:hash signature:signature",
    "past-epoch": "first:number run:hash salt:hash",
    "certificate": "run:hash round:number chain:hash signers:[number signatures:bytes",
    "ready": "nonce:hash signature:signature held:number answered:number",
    "openings": "run:key nonces:bytes",
    "salted": "salt:hash",
    "unready": "",
    "halt": "request:request",
    "over": "request:request",
    "done": "weights_hash:hash signature:signature",
    "abstention": "round:number",
    "request": "round:number trajectory:hash chain:hash weights_hash:hash catch_up:catch-up",
    "catch-up": "kind:text since:number items:[bytes",
    "outcome": "round:number kind:text groups:[group",
    "group": "key:number totals:bytes weight:number",
    "contribution": "round:number vector:bytes",
    "hello": "slot:number",
    "advertisement": "sender:number session:session channel:key first:number keys:[key signature:signature",
    "turn": "unmask:unmask? opening:opening?",
    "turned": "unmasked:unmasked? sealed:sealed?",
    "opening": "slot:number members:[number threshold:number floor:number advertisements:[bytes",
    "sealed": "slot:number boxes:bytes commitment:key",
    "masked-request": "request:request participants:[number keys:key boxes:bytes",
    "agree": "slot:number alive:[number dropped:[number",
    "agreed": "slot:number signature:signature state:signature",
    "unmask": "slot:number alive:[number dropped:[number signers:[number signatures:bytes",
    "unmasked": "slot:number shares:bytes own:share",
}
"""Tag → fields and their types: `[` before a type is an array of it, `?` after it may be nothing."""

MAY_BE_MISSING: dict[tuple[str, str], Any] = {
    ("begin", "certificate"): None,
    ("begin", "answered"): 0,
    ("unmask", "signers"): [],
    ("unmask", "signatures"): b"",
}


class RefusedError(Exception):
    """What a server sent must not be answered."""


def require(condition: object, why: str) -> None:
    if not condition:
        raise RefusedError(why)


class Message:
    """A message by its tag, with its fields as attributes."""

    def __init__(self, tag: str, *values: Any) -> None:
        self.tag, self.values = tag, dict(zip(fields_of(tag), values, strict=True))

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["values"][name]
        except KeyError:
            raise AttributeError(name) from None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Message) and (self.tag, self.values) == (other.tag, other.values)

    __hash__ = None  # type: ignore[assignment]


def fields_of(tag: str) -> dict[str, str]:
    pairs = (field.split(":") for field in SCHEMA[tag].split())
    return {name: kind for name, kind in pairs}  # noqa: C416 - dict() would lose the types


def encode(value: Any) -> bytes:
    if value is None:
        return b"\xc0"
    if isinstance(value, int):
        return b"\xd3" + struct.pack(">q", value)
    if isinstance(value, bytes):
        return b"\xc6" + struct.pack(">I", len(value)) + value
    if isinstance(value, str):
        return _head(value.encode(), (0xA0, 32), (0xD9, 0xDA, 0xDB)) + value.encode()
    items = [value.tag, *value.values.values()] if isinstance(value, Message) else value
    return _head(items, (0x90, 16), (None, 0xDC, 0xDD)) + b"".join(map(encode, items))


def _head(items: Any, short: tuple[int, int], long: tuple[int | None, int, int]) -> bytes:
    n = len(items)
    if n < short[1]:
        return bytes([short[0] + n])
    if long[0] is not None and n < 1 << 8:
        return bytes([long[0], n])
    return struct.pack(">BH", long[1], n) if n < 1 << 16 else struct.pack(">BI", long[2], n)


def decode(data: bytes, *tags: str) -> Message:
    """The one message in these bytes, if it has one of these tags."""
    value, end = unpack(data, 0)
    require(end == len(data), "bytes behind a message")
    require(isinstance(value, list) and value and value[0] in tags, f"expected one of {tags}")
    return _message(value, value[0])


def unpack(data: bytes, at: int) -> tuple[Any, int]:
    """The MessagePack value at a place, and where it ends."""
    try:
        head = data[at]
        if head >> 4 == 0x9 or head in (0xDC, 0xDD):
            count, at = (head & 0xF, at + 1) if head >> 4 == 0x9 else _length(data, at, head - 0xDB)
            items = []
            for _ in range(count):
                item, at = unpack(data, at)
                items.append(item)
            return items, at
        if head == 0xC0:
            return None, at + 1
        if head == 0xD3:
            return struct.unpack_from(">q", data, at + 1)[0], at + 9
        is_text = head >> 5 == 0b101 or head in (0xD9, 0xDA, 0xDB)
        require(is_text or head in (0xC4, 0xC5, 0xC6), f"a value that begins with {head:#x}")
        short, first = head >> 5 == 0b101, 0xD9 if is_text else 0xC4
        size, at = (head & 0x1F, at + 1) if short else _length(data, at, head - first)
        require(at + size <= len(data), "a message that ends too early")
        part = data[at : at + size]
        return part.decode() if is_text else part, at + size
    except (IndexError, struct.error, UnicodeDecodeError, RecursionError):
        raise RefusedError("not a message") from None


def _length(data: bytes, at: int, log_bytes: int) -> tuple[int, int]:
    kind = (">B", ">H", ">I")[log_bytes]
    return struct.unpack_from(kind, data, at + 1)[0], at + 1 + struct.calcsize(kind)


def _message(value: list[Any], tag: str) -> Message:
    fields = fields_of(tag)
    rest = [MAY_BE_MISSING[tag, name] for name in list(fields)[len(value) - 1 :] if (tag, name) in MAY_BE_MISSING]
    values = [*value[1:], *rest]
    require(value[:1] == [tag] and len(values) == len(fields), f"not the fields of {tag}")
    return Message(tag, *(_checked(item, kind) for item, kind in zip(values, fields.values(), strict=True)))


def _checked(value: Any, kind: str) -> Any:
    if kind.endswith("?"):
        return None if value is None else _checked(value, kind[:-1])
    if kind.startswith("["):
        require(isinstance(value, list), "expected an array")
        return [_checked(item, kind[1:]) for item in value]
    if kind in SIZES:
        require(isinstance(value, bytes) and len(value) == SIZES[kind], f"not a {kind}")
    elif kind in ("number", "bytes", "text"):
        require(isinstance(value, {"number": int, "bytes": bytes, "text": str}[kind]), f"expected {kind}")
        require(kind != "number" or value >= 0, "a number below 0")
    else:
        require(isinstance(value, list), f"expected a {kind}")
        return _message(value, kind)
    return value


def abstention(body: bytes) -> bytes:
    """The refusal of a request, which names the first number in it."""
    at = 0
    while at < len(body) and (body[at] >> 4 == 0x9 or body[at] >> 5 == 0b101 or body[at] == 0xC0):
        at += 1 + (body[at] & 0x1F if body[at] >> 5 == 0b101 else 0)
    number = struct.unpack_from(">q", body, at + 1)[0] if body[at : at + 1] == b"\xd3" and len(body) > at + 8 else 0
    return encode(Message("abstention", max(number, 0)))


def prefixed(*fields: bytes) -> bytes:
    """LP: each field after its length."""
    return b"".join(struct.pack(">Q", len(field)) + field for field in fields)


def u64(*numbers: int) -> bytes:
    return struct.pack(f">{len(numbers)}Q", *numbers)


def counted(numbers: Iterable[int]) -> bytes:
    listed = list(numbers)
    return u64(len(listed), *listed)


def cut(packed: bytes, size: int, count: int) -> list[bytes]:
    require(len(packed) == size * count, f"{len(packed)} bytes, expected {count} items of {size}")
    return [packed[at : at + size] for at in range(0, len(packed), size)]


def is_signed(public: bytes, signature: bytes, text: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, text)
    except (InvalidSignature, ValueError):
        return False
    return True


def public_of(identity: Ed25519PrivateKey) -> bytes:
    return identity.public_key().public_bytes_raw()


# The handshake


def proof(identity: Ed25519PrivateKey, server: bytes, process: bytes, greeting: bytes, challenge: bytes) -> bytes:
    """The third frame of a handshake, from the first two."""
    said, answer = decode(greeting, "link/2/greeting"), decode(challenge, "link/2/challenge")
    text = prefixed(b"link/2/server", answer.nonce, said.nonce, server, said.host.encode())
    require(is_signed(server, answer.signature, text), "this is not the server of the roster")
    frames = sha256(sha256(greeting).digest() + sha256(challenge).digest()).digest()
    own = public_of(identity)
    signature = identity.sign(prefixed(b"link/2/client", frames, own, server, process))
    return encode(Message("link/2/proof", own, process, signature))


# Requests and replies


class Request(NamedTuple):
    frame: bytes

    @property
    def body(self) -> bytes:
        return self.frame[117:]

    def signed_text(self, direction: bytes, sender: bytes, receiver: bytes, answer: bytes | None = None) -> bytes:
        run, name, number, kind = self.frame[:32], self.frame[32:48], self.frame[48:52], self.frame[52:53]
        body, about = (self.body, b"") if answer is None else (answer, sha256(self.frame).digest())
        fields = (b"message/2", direction, sender, receiver, run, number, kind, name, about, sha256(body).digest())
        return prefixed(*fields)


def read_request(server: bytes, own: bytes, frame: bytes) -> Request:
    request = Request(frame)
    require(len(frame) >= 117, "a frame that is too short")
    require(is_signed(server, frame[53:117], request.signed_text(b"to client", server, own)), "not the server's")
    return request


def reply(identity: Ed25519PrivateKey, server: bytes, request: Request, body: bytes) -> bytes:
    text = request.signed_text(b"to server", public_of(identity), server, body)
    return request.frame[32:36] + identity.sign(text) + body
