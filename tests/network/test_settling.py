"""What a server settles when it knows its clients."""

from collections.abc import Callable

import pytest

from baffle.errors import PlanError
from baffle.network.joining import Introduction
from baffle.network.settling import settle
from baffle.plan import Plan, change
from baffle.schedule import tiers_of


@pytest.fixture
def four(tiny: Callable[..., Plan]) -> Plan:
    return tiny('secure.mode="on"', "federation.clients=4")


def introductions(*affords: int) -> dict[int, Introduction]:
    return {number: Introduction(10 + number, k, 0) for number, k in enumerate(affords)}


def test_the_server_settles_the_plan_from_the_clients_introductions(four: Plan) -> None:
    plan, tiers = settle(four, introductions(0, 3, 9, 4))
    assert tiers == (4, 3, 4, 4)
    assert [(tier.k, tier.share) for tier in plan.federation.tiers] == [(3, 1 / 4)]
    assert plan.ring.n_max == 13
    tiered = change(four, ["federation.tiers=[{k=1, share=0.25}]"])
    assert settle(tiered, introductions(0, 0, 0, 0))[1] == tuple(tiers_of(tiered))
    uniform = change(four, ['federation.weighting="uniform"'])
    assert settle(uniform, introductions(0))[0].ring.n_max == 1
    fixed = change(four, ["ring.n_max=7"])
    assert settle(fixed, introductions(0))[0].ring.n_max == 7


def test_a_tier_whose_last_directions_would_be_seen_is_refused(four: Plan) -> None:
    with pytest.raises(PlanError, match=r"only 2 clients afford 4 directions.*expected at least 3.*set probe.k=3"):
        settle(four, introductions(0, 2, 3, 4))
    without_secure_sums = change(four, ['secure.mode="off"'])
    assert settle(without_secure_sums, introductions(0, 2, 3, 4))[1] == (4, 2, 3, 4)
