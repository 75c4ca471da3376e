"""The race of rates: it finds the best from anywhere, and the rules that it follows."""

import math

import pytest
from hypothesis import given, strategies as st

from baffle.tune.race import Leg, _climb, _settle, best_rate, extended, legs_of, nearest, series


@given(st.floats(1e-12, 1e12))
def test_the_nearest_value_is_within_half_a_step(value: float) -> None:
    assert abs(math.log(series(nearest(value)) / value)) <= math.log(2.5) / 2 + 1e-9


@given(st.integers(-30, 30), st.integers(-30, 30))
def test_climb_and_settle_find_the_least_loss_from_any_start(best: int, start: int) -> None:
    def loss(number: int) -> float:
        return float((number - best) ** 2) if number <= best + 3 else math.inf

    near = _climb(loss, start) if abs(start - best) <= 34 and start <= best + 3 else best
    assert abs(near - best) <= 1
    settled = _settle(loss, near)
    assert min(settled, key=settled.__getitem__) == best
    assert {best - 1, best + 1} <= settled.keys()


@given(st.floats(-3, 3))
def test_a_parabola_gives_the_rate_between_those_that_were_tried(best: float) -> None:
    rates = [series(number) for number in range(-12, 13)]
    leg = Leg(10, {rate: (math.log10(rate) - best) ** 2 for rate in rates})
    assert math.log10(best_rate(leg)) == pytest.approx(best, abs=0.05)


def test_rates_by_hand() -> None:
    """The series has three values a decade; a rate falls with the root of the rounds; one at the edge stays."""
    assert [series(number) for number in range(-3, 4)] == [0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0]
    assert extended(0.04, 25, 100) == pytest.approx(0.02)
    assert extended(0.04, 100, 100) == 0.04
    assert _climb(lambda number: math.inf if number > -10 else float(-number), 0) in (0, -10)
    assert best_rate(Leg(10, {0.1: 1.0, 0.2: 2.0})) == 0.1
    assert best_rate(Leg(10, {0.1: 2.0, 0.2: 1.0, 0.5: math.inf})) == 0.2


@given(st.integers(1, 100_000))
def test_legs_grow_and_stay_within_the_run(rounds: int) -> None:
    legs = legs_of(rounds)
    assert legs == sorted(legs)
    assert legs[0] >= 1
    assert legs[-1] <= min(rounds, 100)
