"""What of a client's reasons a server may know, and how often its own log tells them."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baffle.client.abstaining import MOST_REASONS, UNABLE, Sparingly, abstention
from baffle.core.messages import Abstention
from baffle.errors import BaffleError, ChainError, FullDiskError, MessageError


def every_error(kind: type[BaffleError] = BaffleError) -> Iterator[type[BaffleError]]:
    if kind.__module__ == BaffleError.__module__:
        yield kind
    for narrower in kind.__subclasses__():
        yield from every_error(narrower)


def made(kind: type[BaffleError], text: str) -> BaffleError:
    more: dict[type[BaffleError], object] = {ChainError: 3, FullDiskError: "free some space"}
    return kind(text, more[kind]) if kind in more else kind(text)


ERRORS = sorted(set(every_error()), key=lambda kind: kind.__name__)
ABOUT_MESSAGES = [kind for kind in ERRORS if issubclass(kind, MessageError)]


@given(st.sampled_from([kind for kind in ERRORS if kind not in ABOUT_MESSAGES]), st.text())
def test_of_errors_of_its_own_the_server_learns_nothing(kind: type[BaffleError], text: str) -> None:
    assert abstention(7, made(kind, text)) == Abstention(7, UNABLE)
    assert abstention(7, OSError(28, text, text)) == Abstention(7, UNABLE)


@pytest.mark.parametrize("kind", ABOUT_MESSAGES)
def test_the_server_learns_what_is_wrong_with_what_it_asked(kind: type[BaffleError]) -> None:
    assert abstention(7, made(kind, "slot 3\nis not\x1b after slot 4")) == Abstention(7, "slot 3 is not after slot 4")
    assert len(abstention(7, made(kind, "x" * 10_000)).reason) == 300


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
