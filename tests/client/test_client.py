"""The half of a client that talks: its replies, and when it abstains."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NoReturn

import numpy as np
import pytest

from baffle.aggregation.messages import Turn, Turned, Unmask
from baffle.client.abstaining import abstention
from baffle.client.client import Client, contribution_bytes
from baffle.core.messages import (
    Abstention,
    CatchUp,
    Contribution,
    RoundRequest,
    decode,
    decode_reply,
    encode,
)
from baffle.core.ring import EXTRAS, Ring
from baffle.core.state import pack
from baffle.plan import Plan
from tests.support.federation import Federation
from tests.support.one_client import BACKPROP, CENTRAL, EPOCH, FORWARD, OWN, Bowl, Setting, plan_for


@pytest.mark.parametrize("loss", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("level", [["federation.epochs=1"], EPOCH])
@pytest.mark.parametrize("estimator", [FORWARD, CENTRAL, BACKPROP])
@pytest.mark.parametrize("when", ["first", "last", "every"])
def test_a_client_whose_loss_is_not_finite_answers_like_any_other(
    tiny: Callable[..., Plan], level: list[str], estimator: list[str], loss: float, when: str
) -> None:
    """Its reply has the usual size and takes the usual forwards. It holds zeros of weight 0, and no word goes out."""
    plan, told = plan_for(tiny, *level, *estimator), list[str]()
    sound = Bowl(5)
    usual = Setting(plan, sound)
    size = len(usual.client.answer(usual.request(3)))
    spoilt = Bowl(5, loss=loss, when={"first": 1, "last": sound.forwards, "every": None}[when])
    setting = Setting(plan, spoilt)
    reply = decode_reply(replace(setting.client, tell=told.append).answer(setting.request(3)))
    assert isinstance(reply, Contribution)
    length = setting.trajectory.length
    assert reply == Contribution(3, Ring.nothing(length).tobytes())
    assert len(encode(reply)) == size
    assert (spoilt.forwards, spoilt.batches) == (sound.forwards, sound.batches)
    assert told == []


def test_an_error_of_the_system_is_an_abstention(tiny: Callable[..., Plan]) -> None:
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


def test_a_snapshot_that_nothing_proves_is_refused(tiny: Callable[..., Plan]) -> None:
    setting = Setting(plan_for(tiny), Bowl(5))
    unproved = CatchUp("snapshot", 0, (pack(setting.state), bytes(32), b""))
    request = RoundRequest(1, setting.trajectory.digest, bytes(32), setting.state.weights_hash(), unproved)
    assert "a state that nothing proves" in why(setting.client, encode(request))


def test_what_is_refused_in_a_turn_is_told(tiny: Callable[..., Plan]) -> None:
    federation, told = Federation(3), list[str]()
    client = Client(Setting(plan_for(tiny), Bowl(5)).client.replica, None, federation.sessions[0], told.append)
    reply = decode(client.answer(encode(Turn(Unmask(9, (0, 1), (2,)), None))), Turned)
    assert reply == Turned(None, None)
    assert told == ["abstained: slot 9 was not opened"]


@pytest.mark.parametrize("settings", [FORWARD, OWN, EPOCH, BACKPROP])
def test_a_reply_is_four_bytes_per_value_and_a_constant(tiny: Callable[..., Plan], settings: list[str]) -> None:
    setting = Setting(plan_for(tiny, *settings), Bowl(5))
    for number in (0, 2**40):
        assert len(setting.client.answer(setting.request(number))) == contribution_bytes(setting.trajectory)
    constant = contribution_bytes(setting.trajectory) - 4 * (setting.trajectory.length + EXTRAS)
    assert 0 < constant < 64


def test_a_request_of_another_plan_is_answered_with_a_refusal(tiny: Callable[..., Plan]) -> None:
    setting, other_plan = Setting(plan_for(tiny), Bowl(5)), Setting(plan_for(tiny, "probe.k=5"), Bowl(5))
    assert "another plan" in why(setting.client, other_plan.request())


def test_what_is_no_request_is_refused(tiny: Callable[..., Plan]) -> None:
    for data in (b"noise", b"", encode(Abstention(0)), encode(CatchUp("outcomes", 0, ()))):
        assert "expected a message of type Request" in why(Setting(plan_for(tiny), Bowl(5)).client, data)


def test_a_client_without_a_worker_refuses_to_compute(tiny: Callable[..., Plan]) -> None:
    setting = Setting(plan_for(tiny), Bowl(5))
    assert "no samples and no runtime" in why(Client(setting.client.replica, None), setting.request())
