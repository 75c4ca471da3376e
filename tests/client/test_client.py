"""The half of a client that talks: its replies, and when it abstains."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NoReturn

import numpy as np
import pytest
from hypothesis import given, strategies as st

from baffle.aggregation.messages import Hello, MaskedRequest, Turn, Unmask
from baffle.client.abstaining import MOST_CHARACTERS, MOST_REASONS, RateLimitedLog, abstention
from baffle.client.client import Client, contribution_bytes
from baffle.core.messages import (
    Abstention,
    CatchUp,
    Contribution,
    RoundRequest,
    contribution_to,
    decode_reply,
    encode,
)
from baffle.core.ring import EXTRAS
from baffle.errors import AbstainedError
from baffle.network.joining import Introduce
from baffle.plan import Plan
from tests.support.one_client import BACKPROP, CENTRAL, EPOCH, FORWARD, OWN, SAMPLES, Bowl, Setting, plan_for

MakePlan = Callable[..., Plan]


@pytest.mark.parametrize(("loss", "when"), [(np.nan, "first"), (np.inf, "last"), (-np.inf, "every")])
@pytest.mark.parametrize("level", [["federation.epochs=1"], EPOCH])
@pytest.mark.parametrize("estimator", [FORWARD, CENTRAL, BACKPROP])
def test_a_client_whose_loss_is_not_finite_answers_like_any_other(
    tiny: MakePlan, level: list[str], estimator: list[str], loss: float, when: str
) -> None:
    """Its reply has the usual size and takes the usual forwards. It holds zeros of its weight, and no word goes out."""
    plan, told = plan_for(tiny, *level, *estimator), list[str]()
    sound = Bowl(5)
    usual = Setting(plan, sound)
    size = len(usual.client.answer(usual.request(3)))
    spoilt = Bowl(5, loss=loss, when={"first": 1, "last": sound.forwards, "every": None}[when])
    setting = Setting(plan, spoilt)
    reply = decode_reply(replace(setting.client, tell=told.append).answer(setting.request(3)))
    assert isinstance(reply, Contribution)
    ring, weight = setting.trajectory.ring, setting.trajectory.weight_of(SAMPLES)
    nothing = ring.encode(np.full(setting.trajectory.length, np.nan), setting.trajectory.length, weight, np.nan)
    assert reply == Contribution(3, nothing.tobytes())
    assert len(encode(reply)) == size
    assert (spoilt.forwards, spoilt.batches) == (sound.forwards, sound.batches)
    assert told == []


def test_an_error_of_the_system_is_an_abstention(tiny: MakePlan) -> None:
    setting, told = Setting(plan_for(tiny), Bowl(5)), list[str]()

    @contextmanager
    def borrow() -> Iterator[NoReturn]:
        raise OSError(5, "Input/output error", "/home/alice/samples")
        yield

    client = replace(setting.client, worker=replace(setting.worker, borrow=borrow), tell=told.append)
    assert decode_reply(client.answer(setting.request(3))) == Abstention(3)
    assert told == ["abstained: [Errno 5] Input/output error: '/home/alice/samples'"]


def why(client: Client, data: bytes) -> str:
    """Why a client abstains, from its own log. Its reply is the same for every reason."""
    told = list[str]()
    assert replace(client, tell=told.append).answer(data) == abstention(data)
    (words,) = told
    return words


@pytest.mark.parametrize("settings", [FORWARD, OWN, EPOCH, BACKPROP])
def test_a_reply_is_four_bytes_per_value_and_a_constant(tiny: MakePlan, settings: list[str]) -> None:
    setting = Setting(plan_for(tiny, *settings), Bowl(5))
    for number in (0, 2**40):
        assert len(setting.client.answer(setting.request(number))) == contribution_bytes(setting.trajectory)
    constant = contribution_bytes(setting.trajectory) - 4 * (setting.trajectory.length + EXTRAS)
    assert 0 < constant < 64


def test_what_is_no_request_is_refused(tiny: MakePlan) -> None:
    for data in (b"noise", b"", encode(Abstention(0)), encode(CatchUp("outcomes", 0, ()))):
        assert "expected a message of type Request" in why(Setting(plan_for(tiny), Bowl(5)).client, data)


def test_a_client_without_a_worker_refuses_to_compute(tiny: MakePlan) -> None:
    setting = Setting(plan_for(tiny), Bowl(5))
    assert "no samples and no runtime" in why(Client(setting.client.replica, None), setting.request())


# What a client that abstains says, and how often its own log tells why.

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


class Log:
    """A rate-limited log under a clock that a test sets, and what was told."""

    def __init__(self) -> None:
        self.now, self.told = 0.0, list[str]()
        self.tell = RateLimitedLog(self.told.append, lambda: self.now)


def test_a_reason_that_repeats_every_round_is_told_once_in_ten_minutes() -> None:
    log = Log()
    for number in range(100):
        log.tell(f"round {number}: the disk is full")
        log.tell("the loss is nan")
        log.now += 1.0
    assert log.told == ["round 0: the disk is full", "the loss is nan"]
    log.now = 600.0
    log.tell("round 777: the disk is full")
    assert log.told[2:] == ["round 777: the disk is full"]
    log.now = 601.0
    log.tell("round 778: the disk is full")
    assert len(log.told) == 3


def test_only_so_many_reasons_are_remembered() -> None:
    log = Log()
    for number in range(MOST_REASONS + 1):
        log.tell("x" * number)
    assert len(log.told) == MOST_REASONS + 1
    log.tell("x" * MOST_REASONS)
    assert len(log.told) == MOST_REASONS + 1
    log.tell("")  # the oldest was forgotten
    assert len(log.told) == MOST_REASONS + 2


def test_what_a_server_may_have_written_is_cut_and_made_one_line() -> None:
    log = Log()
    log.tell("no\x1b[2J\nclient 1 takes part" + "x" * 5_000_000)
    (words,) = log.told
    assert words.startswith("no[2J client 1 takes partxxx")
    assert len(words) == MOST_CHARACTERS
