"""Schedules of the rate: the shapes that their names say, in the same bits everywhere."""

import math

import numpy as np
import pytest

from baffle.core.rates import SCHEDULES, cos
from tests.protocol.learning import share_of_rate

VALUES = [
    ("warm-up", 4, 0.1, [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]),
    ("cosine", 4, 0.0, [1.0, 0.8535534, 0.5, 0.14644661, 0.0, 0.0]),
    ("cosine", 2, 0.5, [1.0, 0.75, 0.5, 0.5, 0.5, 0.5]),
    ("steps", 2, 0.5, [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]),
    ("constant", 1, 0.1, [1.0] * 6),
]


@pytest.mark.parametrize(("name", "rounds", "factor", "values"), VALUES)
def test_a_schedule_has_the_shape_of_its_name(name: str, rounds: int, factor: float, values: list[float]) -> None:
    found = [np.float32(SCHEDULES[name](number, rounds, factor)) for number in range(6)]
    np.testing.assert_array_equal(found, np.array(values, np.float32))


def test_the_cosine_is_one_to_the_last_bits_and_needs_no_library() -> None:
    for x in np.linspace(0, math.pi, 1001).tolist():
        assert abs(cos(x) - math.cos(x)) < 2e-15


def test_a_schedule_stays_a_share_however_long_a_run_is() -> None:
    for name, share in SCHEDULES.items():
        for number in (0, 1, 10**6, 2**62):
            for rounds, factor in ((1, 0.0), (7, 1.0), (2**62, 0.999999)):
                assert 0 <= share(number, rounds, factor) <= 1, (name, number, rounds, factor)


def test_the_bits_of_the_protocol_page_are_those_of_the_package() -> None:
    for name, share in SCHEDULES.items():
        for number in range(200):
            plan = {"update.schedule": name, "update.schedule_rounds": 37, "update.schedule_factor": 0.3}
            assert share_of_rate(plan, number) == np.float32(share(number, 37, 0.3))
