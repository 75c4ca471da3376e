"""The stopwatch: the quickest of a few turns counts, and as many items are done together as time allows."""

import pytest

from baffle.stopwatch import MOST_TURNS, TURNS, Stopwatch
from tests.support.clocks import FakeClock


def test_the_quickest_turn_counts() -> None:
    clock, took = FakeClock(), iter([3.0, 1.0, 2.0])
    assert Stopwatch(clock).least(lambda: clock.sleep(next(took))) == 1.0
    assert clock.time == 6.0


def test_quick_work_has_more_turns() -> None:
    clock, took = FakeClock(), iter([0.5] * 5 + [0.25] * 20)
    assert Stopwatch(clock).least(lambda: clock.sleep(next(took)), budget=2.75) == 0.25
    assert Stopwatch(clock).least(lambda: clock.sleep(next(took)), budget=99.0) == 0.25
    assert len(list(took)) == 25 - 6 - MOST_TURNS


@pytest.mark.parametrize(
    ("fixed", "each", "most", "count"),
    [
        (0.0, 1e-6, 64, 64),  # all of them are quick
        (0.0, 1e-6, 50, 50),  # a bound that is no power of two
        (0.0, 1.0, 64, 1),  # a single one takes too long
        (0.004, 1e-3, 64, 16),  # 20 ms of a budget of 0.1 s are more than a sixth
    ],
)
def test_as_many_items_are_timed_together_as_time_allows(fixed: float, each: float, most: int, count: int) -> None:
    clock, counts = FakeClock(), list[int]()

    def work(items: int) -> None:
        counts.append(items)
        clock.sleep((1.0 if len(counts) == 1 else 0.0) + fixed + each * items)  # a cold start, which does not count

    assert Stopwatch(clock).seconds_each(work, most, 0.1) == pytest.approx(fixed / count + each)
    assert counts[-TURNS:] == [count] * TURNS
