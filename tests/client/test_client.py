"""The half of a client that talks: its replies, and when it abstains."""

from collections.abc import Callable

import numpy as np
import pytest

from baffle.client.client import Client, contribution_bytes
from baffle.client.replica import Replica
from baffle.core.messages import (
    Abstention,
    CatchUp,
    decode_reply,
    encode,
)
from baffle.core.ring import EXTRAS
from baffle.plan import Plan
from tests.support.one_client import BACKPROP, CENTRAL, EPOCH, FORWARD, OWN, Bowl, Setting, plan_for


@pytest.mark.parametrize("loss", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("level", [["federation.epochs=1"], EPOCH])
@pytest.mark.parametrize("estimator", [FORWARD, CENTRAL, BACKPROP])
def test_a_client_whose_loss_is_not_finite_abstains_and_says_why(
    tiny: Callable[..., Plan], level: list[str], estimator: list[str], loss: float
) -> None:
    reply = Setting(plan_for(tiny, *level, *estimator), Bowl(5, loss=loss)).reply(3)
    assert isinstance(reply, Abstention)
    assert reply.round == 3
    assert "loss" in reply.reason
    assert str(loss) in reply.reason


@pytest.mark.parametrize("settings", [FORWARD, OWN, EPOCH, BACKPROP])
def test_a_reply_is_four_bytes_per_value_and_a_constant(tiny: Callable[..., Plan], settings: list[str]) -> None:
    setting = Setting(plan_for(tiny, *settings), Bowl(5))
    for number in (0, 2**40):
        assert len(setting.client.answer(setting.request(number))) == contribution_bytes(setting.trajectory)
    constant = contribution_bytes(setting.trajectory) - 4 * (setting.trajectory.length + EXTRAS)
    assert 0 < constant < 64


def test_a_request_of_another_plan_is_answered_with_a_refusal(tiny: Callable[..., Plan]) -> None:
    setting, other_plan = Setting(plan_for(tiny), Bowl(5)), Setting(plan_for(tiny, "probe.k=5"), Bowl(5))
    reply = decode_reply(setting.client.answer(other_plan.request()))
    assert isinstance(reply, Abstention)
    assert "another plan" in reply.reason


def test_what_is_no_request_is_refused(tiny: Callable[..., Plan]) -> None:
    for data in (b"noise", b"", encode(Abstention(0, "no request")), encode(CatchUp("outcomes", 0, ()))):
        reply = decode_reply(Setting(plan_for(tiny), Bowl(5)).client.answer(data))
        assert isinstance(reply, Abstention)
        assert "expected a message of type Request" in reply.reason


def test_a_client_without_a_worker_refuses_to_compute(tiny: Callable[..., Plan]) -> None:
    setting = Setting(plan_for(tiny), Bowl(5))
    reply = decode_reply(Client(Replica(setting.trajectory), None).answer(setting.request()))
    assert isinstance(reply, Abstention)
    assert "no samples and no runtime" in reply.reason
