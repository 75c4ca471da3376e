"""Turns real messages into malformed ones."""

from random import Random
from typing import Any, cast

import msgspec

from baffle.core.messages import Message
from baffle.network.link.handshake import Proof
from baffle.network.member.member import FrozenMember
from fuzzing.texts import damaged_text

FEW = 4
"""About as many clients as there are."""

EXTREMES = (0, 1, 2, FEW, FEW - 1, 63, 64, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -1, -(2**63))
OTHERS: tuple[Any, ...] = (
    None,
    True,
    1.5,
    float("nan"),
    "",
    "text",
    b"",
    bytes(31),
    bytes(32),
    bytes(64),
    [],
    [[]],
    {1: 2},
)
HUGE = tuple(head + b"\xff\xff\xff\xff" for head in (b"\xdd", b"\xc6", b"\xdb", b"\xdf", b"\xc9"))
KINDS = tuple(Message.__subclasses__())
TAGS = tuple(cast(str, kind.__struct_config__.tag) for kind in KINDS)
assert {FrozenMember, Proof} <= set(KINDS), "every module that defines messages must have been imported"


class Mutations:
    """Damages messages, at random. A message inside a message, as bytes, is damaged like the message itself, and so is
    the text of a plan."""

    def __init__(self, draw: Random, corpus: list[bytes]) -> None:
        self.draw, self._corpus = draw, corpus
        self._ways = (self._flip, self._cut, self._extend, self._splice, self._huge, self._random, self._nest)

    def of(self, data: bytes) -> bytes:
        return self._tree(data) if self.draw.random() < 0.5 else self.draw.choice(self._ways)(data)

    def bytes_of(self, data: bytes) -> bytes:
        """The same for bytes that need not be a message."""
        return self.draw.choice(self._ways)(data) if data else self._random(data)

    def _flip(self, data: bytes) -> bytes:
        damaged = bytearray(data)
        for _ in range(self.draw.randrange(1, 5) if data else 0):
            damaged[self.draw.randrange(len(data))] ^= 1 << self.draw.randrange(8)
        return bytes(damaged)

    def _cut(self, data: bytes) -> bytes:
        return data[: self.draw.randrange(len(data) or 1)]

    def _extend(self, data: bytes) -> bytes:
        return data + self.draw.randbytes(self.draw.randrange(1, 100))

    def _splice(self, data: bytes) -> bytes:
        other = self.draw.choice(self._corpus)
        return data[: self.draw.randrange(len(data))] + other[self.draw.randrange(len(other)) :]

    def _huge(self, data: bytes) -> bytes:
        place, head = self.draw.randrange(len(data)), self.draw.choice(HUGE)
        return data[:place] + head + data[place + self.draw.choice((0, 1, 5, 9)) :]

    def _random(self, _: bytes) -> bytes:
        return self.draw.randbytes(self.draw.choice((0, 1, 10, 100, 1000)))

    def _nest(self, data: bytes) -> bytes:
        head = self.draw.choice((b"\x91", b"\x92\x01", b"\x81\xa1a", bytes([0x92, 0xA5]) + b"group"))
        return head * self.draw.choice((1, 2, 100, 5000)) + data

    def _tree(self, data: bytes) -> bytes:
        """Well-formed msgpack with other content in one or two places."""
        tree: list[Any] = msgspec.msgpack.decode(data)
        change = self._vary if self.draw.random() < 0.7 else self._change
        for _ in range(self.draw.randrange(1, 3)):
            change(tree)
        return written(tree) if self.draw.random() < 0.8 else msgspec.msgpack.encode(tree)

    def _vary(self, node: list[Any]) -> None:
        """Change the content, but keep the types right."""
        if len(node) > 1 and isinstance(node[0], str):
            place = self.draw.randrange(1, len(node))
            match node[place]:
                case list():
                    self._vary(node[place])
                case int():
                    node[place] = self.draw.choice((*EXTREMES[:9], node[place] + 1))
                case bytes() if node[place]:
                    node[place] = self._inside(node[place])
                case str() if "\n" in node[place]:
                    node[place] = damaged_text(self.draw, node[place])
            return
        place = self.draw.randrange(len(node) + 1)
        match self.draw.choice(("less", "less", "more", "order", "content")):
            case "less":
                del node[place : place + 1]
            case "more":
                node.insert(place, self.draw.choice((*node, self.draw.randrange(FEW + 1))))
            case "order":
                node.reverse()
            case _ if place < len(node):
                self._vary_item(node, place)

    def _vary_item(self, node: list[Any], place: int) -> None:
        match node[place]:
            case list():
                self._vary(node[place])
            case bytes():
                node[place] = self._inside(node[place])
            case _:
                node[place] = self.draw.randrange(FEW + 1)

    def _inside(self, data: bytes) -> bytes:
        """Bytes that may hold a message of their own."""
        return self._tree(data) if is_list(data) and self.draw.random() < 0.8 else self._flip(data)

    def _change(self, node: list[Any]) -> None:
        place = self.draw.randrange(len(node)) if node else 0
        if not node or self.draw.random() < 0.1:
            node.insert(place, copied(self.draw.choice((*EXTREMES[:6], *OTHERS))))
        elif isinstance(node[place], list) and self.draw.random() < 0.8:
            self._change(node[place])
        elif self.draw.random() < 0.15:
            del node[place]
        else:
            node[place] = self._instead(node[place])

    def _instead(self, value: Any) -> Any:
        usual = self.draw.random() < 0.8
        match value:
            case int() if usual:
                return self.draw.choice((*EXTREMES, max(value - 1, 0), min(value + 1, 2**63)))
            case bytes() if usual and value:
                return self.draw.choice((self._flip, self._cut, self._extend, self._inside))(value)
            case str() if usual:
                return damaged_text(self.draw, value) if "\n" in value else self.draw.choice(TAGS)
            case list() if usual and value:
                return self.draw.choice((value[::-1], value + value, value[:1] * len(value), value[1:]))
            case _:
                return copied(self.draw.choice((*EXTREMES, *OTHERS)))


def is_list(data: bytes) -> bool:
    """Whether bytes are a list in msgpack, as messages are."""
    try:
        return bool(data) and data[0] >> 4 == 0x9 and isinstance(msgspec.msgpack.decode(data), list)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return False


def copied(value: Any) -> Any:
    """A copy that is shared with no other object."""
    return [copied(item) for item in value] if isinstance(value, list) else value


def written(value: Any) -> bytes:
    """Msgpack as our own messages are written: statements are refused if they are written in another way."""

    def wide(value: Any) -> Any:
        match value:
            case list():
                return [wide(item) for item in value]
            case bool():
                return value
            case int() if -(2**63) <= value < 2**63:
                return msgspec.Raw(b"\xd3" + value.to_bytes(8, "big", signed=True))
            case bytes():
                return msgspec.Raw(b"\xc6" + len(value).to_bytes(4, "big") + value)
            case _:
                return value

    return msgspec.msgpack.encode(wide(value))


def damaged_file(data: bytes, draw: Random) -> bytes:
    """The data with bytes changed, a piece cut out, repeated or overwritten, or the end missing."""
    changed = bytearray(data)
    start = draw.randrange(len(data))
    stop = start + draw.choice((1, 4, 30, 1000))
    match draw.randrange(6):
        case 0:
            for _ in range(draw.choice((1, 2, 16))):
                changed[draw.randrange(len(data))] = draw.choice((0, 0x7F, 0x80, 0xFF, draw.randrange(256)))
        case 1:
            del changed[start:stop]
        case 2:
            changed[start:start] = changed[start:stop]
        case 3:
            changed[start:stop] = bytes(stop - start)
        case 4:
            changed[start:stop] = draw.randbytes(stop - start)
        case _:
            del changed[start:]
    return bytes(changed)
