"""Messages: their types and rounds, any msgpack reader can read them, and malformed ones are refused."""

import subprocess
import sys

import msgspec
import numpy as np
import pytest
from hypothesis import given, strategies as st

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
    first_number,
    tag_of,
)
from baffle.errors import MessageError

CATCH_UP = CatchUp("outcomes", 3, (b"one", b"", b"three"))
GROUP = Group(5, b"\1\0\0\0\xff\xff\xff\xff", 40)
EVERY: list[Message] = [
    GROUP,
    Outcome(0, "skipped", ()),
    Outcome(2**40, "scalars", (GROUP,)),
    Outcome(7, "vector", (GROUP, GROUP)),
    CATCH_UP,
    RoundRequest(4, bytes(32), bytes(32), b"\xff" * 32, CATCH_UP),
    Contribution(4, b"\0" * 12),
    Abstention(4),
]
NAMES = [f"{type(message).__name__}-{i}" for i, message in enumerate(EVERY)]


@given(st.integers(0, 2**63 - 1))
def test_the_round_of_a_message_can_be_told_without_reading_it(number: int) -> None:
    for message in (RoundRequest(number, bytes(32), bytes(32), bytes(32), CATCH_UP), Abstention(number)):
        assert first_number(encode(message)) == number


@given(st.binary(max_size=40))
def test_what_is_no_message_has_a_round_nevertheless(data: bytes) -> None:
    assert 0 <= first_number(data) < 2**63
    assert {tag_of(other) for other in (b"", b"\x91", b"noise", b"\x91\xc0", b"\xa3abc")} == {""}
    assert first_number(b"\x92\xa5hello\xd3" + data[:8].ljust(8, b"\xff")) < 2**63


@pytest.mark.parametrize("message", EVERY, ids=NAMES)
def test_a_message_tells_its_type_is_refused_as_any_other_and_cannot_be_changed(message: Message) -> None:
    data = encode(message)
    assert tag_of(data) == msgspec.msgpack.decode(data)[0]
    for kind in {type(other) for other in EVERY} - {type(message)}:
        with pytest.raises(MessageError, match=f"expected a message of type {kind.__name__}"):
            decode(data, kind)
    with pytest.raises(AttributeError, match="immutable"):
        setattr(message, message.__struct_fields__[0], 0)


def test_a_reply_is_a_contribution_or_an_abstention() -> None:
    for reply in (Contribution(1, b"\0\0\0\0"), Abstention(1)):
        assert decode_reply(encode(reply)) == reply
    with pytest.raises(MessageError, match="type Reply"):
        decode_reply(encode(GROUP))


def test_totals_are_little_endian_signed_numbers_and_elements_unsigned_ones() -> None:
    numbers = GROUP.numbers()
    assert numbers.dtype == np.int32
    assert numbers.tolist() == [1, -1]
    assert Contribution(0, GROUP.totals).elements().tolist() == [1, 2**32 - 1]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_a_vector_of_broken_elements_is_refused(size: int) -> None:
    with pytest.raises(MessageError, match=f"{size} bytes are not whole elements"):
        Contribution(0, bytes(size)).elements()
    with pytest.raises(MessageError, match=f"{size} bytes are not whole elements"):
        Group(0, bytes(size), 1).numbers()


@pytest.mark.parametrize(
    "data",
    [
        *(["outcome", number, "skipped", []] for number in (-1, 2**63, 1.0, True, None, "1")),
        ["outcome", 1, "other", []],
        ["outcome", 1, "skipped", [["outcome", 1, b"", 1]]],
        ["outcome", 1, "skipped", [["group", 1, "text", 1]]],
        {"type": "outcome", "round": 1, "kind": "skipped"},
    ],
)
def test_a_malformed_outcome_is_refused(data: object) -> None:
    with pytest.raises(MessageError, match="expected a message of type Outcome"):
        decode(msgspec.msgpack.encode(data), Outcome)


FIRST_TIME = """
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from msgspec import defstruct
from baffle.core.messages import Message, Number, encode, read

sys.setswitchinterval(1e-6)
with ThreadPoolExecutor(4) as pool:
    for _ in range(50):
        inner = defstruct("Inner", [(f"f{i}", Number) for i in range(20)], bases=(Message,), frozen=True, tag="inner")
        outer = defstruct("Outer", [(f"f{i}", inner) for i in range(5)], bases=(Message,), frozen=True, tag="outer")
        data, together = encode(outer(*[inner(*range(20))] * 5)), Barrier(4)
        answers = pool.map(lambda _: (together.wait(), read(data, outer, "Outer"))[1], range(4))
        assert {encode(answer) for answer in answers} == {data}
"""


def test_threads_may_read_the_first_message_of_a_type_at_once() -> None:
    """msgspec prepares a type at its first use, without a lock: simulations ended in a segmentation fault."""
    done = subprocess.run([sys.executable, "-c", FIRST_TIME], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
