"""The messages by which a connected client becomes a client of a run."""

from typing import Any

import pytest
from hypothesis import given, strategies as st

from baffle.aggregation.messages import Agree, Hello, MaskedRequest, Opening, Turn, Unmask
from baffle.core.messages import Abstention, CatchUp, Message, RoundRequest, encode, first_number, tag_of
from baffle.errors import MessageError
from baffle.network import joining
from baffle.network.joining import (
    Begin,
    Done,
    Halt,
    Introduce,
    Introduction,
    Openings,
    Over,
    Ready,
    decode_asked,
    expect,
)
from baffle.network.link.envelope import PHASES
from baffle.statement import MOST_PLAN, PastEpoch

HASH, SIGNATURE = bytes(range(32)), bytes(64)
INTRODUCE = Introduce(f"name = '{'x' * 100}'", 1, HASH, 3)
BEGIN = Begin(b"a statement", (PastEpoch(0, HASH, HASH),), answered=2)
OPENINGS = Openings(HASH, b"nonces")
ROSTER = joining.NewRoster(b"a roster")


@given(st.binary(max_size=64))
def test_messages_that_are_not_about_joining_are_not_decoded(data: bytes) -> None:
    assert decode_asked(data) is None
    assert decode_asked(encode(Abstention(0))) is None


@given(st.integers(0, 2**32 - 1))
def test_the_link_finds_the_round_of_every_request(number: int) -> None:
    about = RoundRequest(number, HASH, HASH, HASH, CatchUp("weights", 0, ()))
    opening = Opening(number, (1, 2), 2, 2, ())
    unmask = Unmask(number, (1, 2), ())
    requests: list[Message] = [about, Halt(about), Over(about), MaskedRequest(about, (1, 2), HASH, b""), Hello(number)]
    requests += [Agree(number, (1,), ()), Turn(None, opening), Turn(unmask, None), Turn(unmask, opening)]
    others: list[Message] = [INTRODUCE, ROSTER, BEGIN, OPENINGS]
    assert [decode_asked(encode(request)) for request in others] == others
    assert {first_number(encode(request)) for request in requests} == {number}
    assert {first_number(encode(request)) for request in others} == {0}
    assert {tag_of(encode(request)) for request in (*requests, *others)} == set(PHASES)


@pytest.mark.parametrize(
    "message",
    [
        Introduce("x" * (MOST_PLAN + 1), 1, HASH, 0),
        Introduce("", 1, HASH[1:], 0),
        Introduce("", -1, HASH, 0),
        Begin(b"", (PastEpoch(0, HASH, HASH),) * (joining.MOST_EPOCHS + 1)),
        Begin(b"", (PastEpoch(0, HASH, HASH[1:]),)),
        Openings(HASH[1:], b""),
    ],
)
def test_what_is_beyond_its_bounds_is_no_message(message: Message) -> None:
    with pytest.raises(MessageError, match="expected a message of type Introduce, NewRoster, Begin, Openings, Halt"):
        decode_asked(encode(message))


def test_an_answer_of_another_kind_says_so() -> None:
    answers: dict[Any, Message] = {
        joining.RosterTaken: joining.RosterTaken(),
        Introduction: Introduction(0, HASH, SIGNATURE),
        Ready: Ready(HASH, SIGNATURE, 0, 0),
        joining.Salted: joining.Salted(HASH),
        Done: Done(HASH, SIGNATURE),
    }
    for kind in answers:
        for other, answer in answers.items():
            if other is kind:
                assert expect(kind, encode(answer)) == answer
            else:
                with pytest.raises(MessageError, match=f"expected {kind.__name__}, got {other.__name__}"):
                    expect(kind, encode(answer))
        with pytest.raises(MessageError, match="it did not answer"):
            expect(kind, None)
        with pytest.raises(MessageError, match="got Unready"):
            expect(kind, joining.UNREADY)
        with pytest.raises(MessageError, match="it abstained; its own log says why"):
            expect(kind, encode(Abstention(0)))
    for signature in (b"", bytes(63), bytes(65)):
        with pytest.raises(MessageError):
            expect(Introduction, encode(Introduction(0, HASH, signature)))
