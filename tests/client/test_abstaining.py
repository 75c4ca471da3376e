"""What a client that abstains says to a server, and how often its own log tells why."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baffle.aggregation.messages import Hello, MaskedRequest, Turn, Unmask
from baffle.client.abstaining import MOST_CHARACTERS, MOST_REASONS, Sparingly, abstention
from baffle.core.messages import Abstention, CatchUp, RoundRequest, contribution_to, decode_reply, encode
from baffle.errors import AbstainedError
from baffle.network.joining import Introduce

REQUEST = RoundRequest(7, bytes(32), bytes(32), bytes(32), CatchUp("outcomes", 0, ()))


@given(st.binary(max_size=60))
def test_whatever_is_asked_an_abstention_can_be_read_and_is_short(data: bytes) -> None:
    for asked in (data, encode(Hello(3))[:-8] + data):
        assert isinstance(decode_reply(abstention(asked)), Abstention)
        assert len(abstention(asked)) == len(encode(Abstention(0)))


def test_it_names_the_round_that_was_asked_about() -> None:
    masked = MaskedRequest(REQUEST, (0, 1, 2), bytes(32), b"")
    for asked in (REQUEST, masked, Hello(7), Turn(Unmask(7, (0, 1), (2,)), None)):
        assert abstention(encode(asked)) == encode(Abstention(7))
    introduce = Introduce("[federation]\nclients = 7\nrounds = 7\n", 7, bytes(32), 7)  # is about no round
    assert abstention(encode(introduce)) == encode(Abstention(0))
    for asked in (REQUEST, masked):
        with pytest.raises(AbstainedError, match=r"^abstained$"):
            contribution_to(REQUEST, abstention(encode(asked)))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr("baffle.client.abstaining.time.monotonic", lambda: now[0])
    return now


def test_a_reason_that_repeats_every_round_is_told_once_in_ten_minutes(clock: list[float]) -> None:
    told: list[str] = []
    tell = Sparingly(told.append)
    for number in range(100):
        tell(f"round {number}: the disk is full")
        tell("the loss is nan")
        clock[0] += 1.0
    assert told == ["round 0: the disk is full", "the loss is nan"]
    clock[0] = 600.0
    tell("round 777: the disk is full")
    assert told[2:] == ["round 777: the disk is full"]
    clock[0] = 601.0
    tell("round 778: the disk is full")
    assert len(told) == 3


@pytest.mark.usefixtures("clock")
def test_only_so_many_reasons_are_remembered() -> None:
    told: list[str] = []
    tell = Sparingly(told.append)
    for number in range(MOST_REASONS + 1):
        tell("x" * number)
    assert len(told) == MOST_REASONS + 1
    tell("x" * MOST_REASONS)
    assert len(told) == MOST_REASONS + 1
    tell("")  # the oldest was forgotten
    assert len(told) == MOST_REASONS + 2


@pytest.mark.usefixtures("clock")
def test_what_a_server_may_have_written_is_cut_and_made_one_line() -> None:
    told: list[str] = []
    tell = Sparingly(told.append)
    tell("no\x1b[2J\nclient 1 takes part" + "x" * 5_000_000)
    (words,) = told
    assert words.startswith("no[2J client 1 takes partxxx")
    assert len(words) == MOST_CHARACTERS
    assert max(map(len, tell._told)) <= MOST_CHARACTERS
