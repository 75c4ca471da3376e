"""The messages on the wire and in the journal: frozen structs, encoded as msgpack.

Integers and byte strings are written in their widest msgpack form, so that a message's size depends on how much it
carries and not on the values: 4 bytes a scalar plus a constant, in every round. Any msgpack reader reads them.
"""

from threading import Lock
from typing import Annotated, Any, Literal, TypeVar, cast

import msgspec
import numpy as np

from baffle.core.arrays import I32
from baffle.core.ring import ELEMENT, RingVector
from baffle.errors import AbstainedError, MessageError, one_line

Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]  # a round, a key's number, a weight
Hash = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]  # a SHA-256 hash

_DECODERS: dict[Any, msgspec.msgpack.Decoder[Any]] = {}
_PREPARING = Lock()


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An immutable record, encoded as an array that begins with its type's name."""


class Group(Message, frozen=True, tag="group"):
    """One sum of a round: the number of its directions' key, the totals, and ΣN_c."""

    key: Number
    totals: bytes
    weight: Number

    def numbers(self) -> I32:
        return np.frombuffer(_whole(self.totals), dtype="<i4").astype(np.int32)


class Outcome(Message, frozen=True, tag="outcome"):
    """One round's durable result. A skipped round has no groups and changes nothing."""

    round: Number
    kind: Literal["scalars", "vector", "skipped"]
    groups: tuple[Group, ...]


class CatchUp(Message, frozen=True, tag="catch-up"):
    """How a client that holds the weights before round `since` gets to the present ones.

    `outcomes`: encoded outcomes to replay, in order. `hashed`: the same, and between any two of them the hash of the
    state there, or nothing where the server does not know it. `delta`: the difference of the weights' bit patterns,
    modulo 2³² (a difference of floats would not add up to the same bits). `weights`: all of them. `snapshot`: the whole
    state.
    """

    kind: Literal["outcomes", "hashed", "delta", "weights", "snapshot"]
    since: Number
    items: tuple[bytes, ...]

    def steps(self) -> list[tuple[bytes, bytes]]:
        """The outcomes of a catch-up by outcomes, each with the hash that the server names, or nothing."""
        if self.kind == "outcomes":
            return [(item, b"") for item in self.items]
        if len(self.items) % 2 == 0 or any(len(item) not in (0, 32) for item in self.items[1::2]):
            raise MessageError("expected outcomes, and between any two the hash of a state")
        return list(zip(self.items[0::2], (*self.items[1::2], b""), strict=True))


class RoundRequest(Message, frozen=True, tag="request"):
    """From server to client: probe these weights, to which the run has come by the rounds that `chain` is the hash of.
    Which directions to probe along follows from the round."""

    round: Number
    trajectory: Hash
    chain: Hash
    weights_hash: Hash
    catch_up: CatchUp


class Contribution(Message, frozen=True, tag="contribution"):
    """From client to server: a ring vector."""

    round: Number
    vector: bytes

    def elements(self) -> RingVector:
        return np.frombuffer(_whole(self.vector), dtype=ELEMENT)


class Abstention(Message, frozen=True, tag="abstention"):
    """From client to server: the client does not follow a request about this round. The message is the same for every
    reason; only the client's own log has the reason."""

    round: Number


Reply = Contribution | Abstention

M = TypeVar("M", bound=Message)


def encode(message: Message) -> bytes:
    return msgspec.msgpack.encode(_fixed_width(message))


def tag_of(data: bytes) -> str:
    """The name of an encoded message's type, without reading the rest; empty if it has none."""
    tag = data[2 : 2 + (data[1] & 0x1F)] if data[1:2] and data[0] >> 4 == 0x9 and data[1] >> 5 == 0b101 else b""
    return tag.decode("ascii", errors="ignore")


def first_number(data: bytes) -> int:
    """The first number of an encoded message, its round or slot, read alone; 0 if the data are no such message."""
    at = 0
    while at < len(data) and (data[at] >> 4 == 0x9 or data[at] >> 5 == 0b101 or data[at] == 0xC0):
        at += 1 + (data[at] & 0x1F if data[at] >> 5 == 0b101 else 0)  # into arrays, past short strings and nil
    number = int.from_bytes(data[at + 1 : at + 9], "big", signed=True) if data[at : at + 1] == b"\xd3" else 0
    return max(number, 0)


def decode(data: bytes, kind: type[M]) -> M:
    """Read one message of the given type, and refuse any other."""
    return cast(M, read(data, kind, kind.__name__))


def decode_answer(data: bytes, kind: type[M]) -> M:
    """Read a client's answer of the given type. Raises AbstainedError for an abstention."""
    if tag_of(data) == Abstention.__struct_config__.tag:
        decode(data, Abstention)
        raise AbstainedError
    return decode(data, kind)


def decode_reply(data: bytes) -> Reply:
    return cast(Reply, read(data, Reply, "Reply"))


def contribution_to(request: RoundRequest, data: bytes) -> RingVector:
    """The vector in a reply to a request. Raises AbstainedError for an abstention."""
    reply = decode_reply(data)
    if reply.round != request.round:
        raise MessageError(f"a reply to round {reply.round}, expected round {request.round}")
    if isinstance(reply, Abstention):
        raise AbstainedError
    return reply.elements()


def read(data: bytes, kind: Any, name: str) -> Any:
    """Read one message of a type or of a union of types, which errors call `name`."""
    try:
        return _decoder(kind).decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as fault:
        raise MessageError(f"expected a message of type {name}: {one_line(str(fault))}") from None


def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """msgspec looks at the fields of a struct when it first decodes one, without a lock. A second thread that decodes
    the same struct meanwhile finds it half prepared, and the process crashes. So types are prepared one at a time."""
    if kind not in _DECODERS:
        with _PREPARING:
            _DECODERS[kind] = msgspec.msgpack.Decoder(kind)
    return _DECODERS[kind]


def _whole(data: bytes) -> bytes:
    if len(data) % ELEMENT.itemsize:
        raise MessageError(f"{len(data)} bytes are not whole elements of {ELEMENT.itemsize}")
    return data


def _fixed_width(value: Any) -> Any:
    match value:
        case Message():
            fields = (getattr(value, name) for name in value.__struct_fields__)
            return [value.__struct_config__.tag, *map(_fixed_width, fields)]
        case tuple():
            return _packed(value) or [_fixed_width(item) for item in value]
        case int():
            return msgspec.Raw(b"\xd3" + value.to_bytes(8, "big", signed=True))
        case bytes():
            return msgspec.Raw(b"\xc6" + len(value).to_bytes(4, "big") + value)
        case _:
            return value


_NUMBERS = np.dtype([("tag", "u1"), ("number", ">i8")])


def _packed(items: tuple[Any, ...]) -> msgspec.Raw | None:
    """Many numbers, or many byte strings of one length, encoded at once into the same bytes, because messages between
    hundreds of clients hold such lists. None for other items."""
    kinds = set(map(type, items)) if len(items) >= _MANY else set()
    if kinds == {int}:
        numbers = np.empty(len(items), _NUMBERS)
        numbers["tag"], numbers["number"] = 0xD3, items
        return msgspec.Raw(_array_head(len(items)) + numbers.tobytes())
    if kinds == {bytes} and len(set(map(len, items))) == 1:
        head = b"\xc6" + len(items[0]).to_bytes(4, "big")
        return msgspec.Raw(_array_head(len(items)) + head + head.join(items))
    return None


_MANY = 16  # from this many items on, msgpack writes an array's length into separate bytes


def _array_head(length: int) -> bytes:
    return b"\xdc" + length.to_bytes(2, "big") if length < 1 << 16 else b"\xdd" + length.to_bytes(4, "big")
