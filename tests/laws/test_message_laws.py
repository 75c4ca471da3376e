"""A message's size depends only on how much it carries, and anything that is not a message is a MessageError."""

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from baffle.aggregation.messages import Sealed
from baffle.core.messages import (
    Abstention,
    CatchUp,
    Contribution,
    Group,
    Message,
    Outcome,
    RoundRequest,
    decode,
    decode_reply,
    encode,
)
from baffle.errors import MessageError

KINDS: list[type[Message]] = [Group, Outcome, CatchUp, RoundRequest, Contribution, Abstention, Sealed]
integers = st.integers(0, 2**63 - 1)
payloads = st.integers(0, 60).flatmap(lambda k: st.binary(min_size=4 * k, max_size=4 * k))
hashes = st.binary(min_size=32, max_size=32)
groups = st.builds(Group, integers, payloads, integers)
catch_ups = st.builds(
    CatchUp,
    st.sampled_from(["outcomes", "hashed", "delta", "weights", "snapshot"]),
    integers,
    st.lists(st.binary(max_size=40), max_size=4).map(tuple),
)
messages: st.SearchStrategy[Message] = st.one_of(
    groups,
    st.builds(Outcome, integers, st.sampled_from(["scalars", "vector", "skipped"]), st.lists(groups).map(tuple)),
    catch_ups,
    st.builds(RoundRequest, integers, hashes, hashes, hashes, catch_ups),
    st.builds(Contribution, integers, payloads),
    st.builds(Abstention, integers),
    st.builds(Sealed, integers, st.binary(max_size=200), hashes),
)
anything = st.recursive(
    st.none() | st.booleans() | integers | st.floats() | st.text(max_size=20) | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
)


def refused_or_read(data: bytes) -> None:
    """Only a MessageError may be raised, and a message that was read encodes to one that reads the same."""
    for kind in KINDS:
        with contextlib.suppress(MessageError):
            message = decode(data, kind)
            again = encode(message)
            assert isinstance(message, kind)
            assert msgspec.msgpack.decode(again, type=kind) == message
    with contextlib.suppress(MessageError):
        assert isinstance(decode_reply(data), Contribution | Abstention)


@settings(deadline=None, max_examples=200)
@given(message=messages)
def test_every_message_reads_back(message: Message) -> None:
    assert decode(encode(message), type(message)) == message


@settings(deadline=None, max_examples=200)
@given(a=integers, b=integers, c=integers, one=hashes, other=hashes, payload=payloads)
def test_a_message_is_four_bytes_a_number_and_a_constant(
    a: int, b: int, c: int, one: bytes, other: bytes, payload: bytes
) -> None:
    def sizes(a: int, b: int, c: int, one: bytes, other: bytes, payload: bytes) -> list[int]:
        outcomes = [Outcome(a, kind, (Group(b, payload, c),)) for kind in ("scalars", "vector")]
        request = RoundRequest(a, one, other, one, CatchUp("delta", b, (payload,)))
        return [len(encode(message)) for message in (Contribution(a, payload), *outcomes, request)]

    constants = sizes(0, 0, 0, bytes(32), bytes(32), b"")
    assert sizes(a, b, c, one, other, payload) == [constant + len(payload) for constant in constants]


@pytest.mark.parametrize("k", [0, 1, 63, 64, 16383, 16384, 1 << 20])
def test_the_constant_is_the_same_for_every_size(k: int) -> None:
    assert len(encode(Contribution(7, bytes(4 * k)))) - 4 * k == len(encode(Contribution(7, b"")))


@settings(deadline=None, max_examples=300)
@given(data=st.binary(max_size=200) | anything.map(msgspec.msgpack.encode))
def test_bytes_without_meaning_and_other_values_are_refused(data: bytes) -> None:
    refused_or_read(data)


@settings(deadline=None, max_examples=200)
@given(message=messages, data=st.data())
def test_a_changed_byte_is_read_or_refused(message: Message, data: st.DataObject) -> None:
    encoded = bytearray(encode(message))
    encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    refused_or_read(bytes(encoded))


@settings(deadline=None, max_examples=60)
@given(message=messages)
def test_every_truncation_and_every_trailing_byte_is_refused(message: Message) -> None:
    encoded = encode(message)
    for data in [*(encoded[:size] for size in range(len(encoded))), encoded + b"\0", encoded + encoded]:
        with pytest.raises(MessageError):
            decode(data, type(message))


@settings(deadline=None, max_examples=100)
@given(message=messages, more=anything, tag=st.text(max_size=10) | st.integers() | st.none())
def test_a_further_field_a_missing_one_and_another_tag_are_refused(message: Message, more: object, tag: object) -> None:
    name, *fields = msgspec.msgpack.decode(encode(message))
    faults = [[name, *fields, more], [name, *fields[:-2]], fields]
    if tag != name and not (isinstance(tag, int) and not -(2**63) <= tag < 2**64):
        faults.append([tag, *fields])
    for fault in faults:
        with pytest.raises(MessageError, match=f"expected a message of type {type(message).__name__}"):
            decode(msgspec.msgpack.encode(fault), type(message))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("open_one", [b"\x91", b"\xdd\0\0\0\1", b"\x81\xa1a", b"\xdf\0\0\0\1\xa1a"])
def test_deep_nesting_is_refused(kind: type[Message], open_one: bytes) -> None:
    tag = msgspec.msgpack.encode(kind.__struct_config__.tag)
    after_a_whole_abstention = b"\x93" + encode(Abstention(1))[1:]
    for start in (b"", b"\x93" + tag + b"\1", b"\x93" + tag, after_a_whole_abstention):
        with pytest.raises(MessageError):
            decode(start + open_one * 100_000 + b"\1", kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "claim", [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff"]
)
def test_a_length_that_is_only_claimed_is_refused(kind: type[Message], claim: bytes) -> None:
    tag = msgspec.msgpack.encode(kind.__struct_config__.tag)
    for start in (b"", b"\x94" + tag + b"\1\1", b"\x93" + tag + b"\1", b"\x94" + tag + b"\1\xa7skipped"):
        with pytest.raises(MessageError):
            decode(start + claim, kind)


@pytest.mark.parametrize("text", [b"\xa2\xff\xfe", b"\xa1\x80", b"\xa3\xed\xa0\x80"])
def test_text_that_is_no_utf_8_is_refused(text: bytes) -> None:
    with pytest.raises(MessageError):
        decode(b"\x94\xa7outcome\1" + text + b"\x90", Outcome)


class Lists(Message, frozen=True, tag="lists"):
    numbers: tuple[int, ...]
    items: tuple[bytes, ...]
    mixed: tuple[int | bytes, ...]


def one_by_one(value: Any) -> Any:
    """The widest form of everything in a message, item after item."""
    if isinstance(value, tuple):
        return [one_by_one(item) for item in value]
    if isinstance(value, int):
        return msgspec.Raw(b"\xd3" + value.to_bytes(8, "big", signed=True))
    return msgspec.Raw(b"\xc6" + len(value).to_bytes(4, "big") + value)


lengths = st.sampled_from([0, 1, 15, 16, 17, 200, 2**16 - 1, 2**16])


@settings(max_examples=50)
@given(lengths, lengths, st.integers(0, 40), st.data())
def test_long_lists_are_written_as_item_after_item(numbers: int, items: int, size: int, data: st.DataObject) -> None:
    few = data.draw(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=5))
    texts = data.draw(st.lists(st.binary(min_size=size, max_size=size), min_size=1, max_size=5))
    odd = data.draw(st.lists(st.binary(max_size=3) | integers, max_size=40))
    message = Lists(
        tuple(few[i % len(few)] for i in range(numbers)), tuple(texts[i % len(texts)] for i in range(items)), tuple(odd)
    )
    expected = ["lists", *map(one_by_one, (message.numbers, message.items, message.mixed))]
    assert encode(message) == msgspec.msgpack.encode(expected)
