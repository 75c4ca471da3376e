"""Who is left out for how long, and who can be named for sums that were spoilt unseen."""

from itertools import combinations

from hypothesis import given, strategies as st

from baffle.aggregation.server.faults import LONGEST, MOST_CORNERED, SHORTEST, Faults
from tests.support.clocks import FakeClock


def test_each_time_is_twice_as_long_up_to_a_day_and_ends() -> None:
    clock, told = FakeClock(), list[str]()
    faults = Faults(clock.now, told.append)
    for times in range(15):
        seconds = min(SHORTEST * 2**times, LONGEST)
        faults.charge(3, "it lied")
        faults.charge(3, "it lied again, before anybody knew")  # the same offence
        assert told[times:] == [f"client 3 is left out for {seconds:g} s: it lied"]
        clock.sleep(seconds - 1)
        assert faults.barred == {3: "it lied"}
        clock.sleep(1)
        assert faults.barred == {}
        assert faults.known == {3}
    faults.forget(3)
    assert not faults.known


def test_a_client_that_was_left_out_before_a_restart_is_known_and_not_left_out() -> None:
    clock, told = FakeClock(), list[str]()
    faults = Faults(clock.now, told.append)
    faults.remember([2])
    assert (faults.known, faults.barred) == ({2}, {})
    faults.charge(2, "it lied")
    faults.remember([2])
    assert told == ["client 2 is left out for 60 s: it lied"]
    assert faults.barred == {2: "it lied"}


def test_without_a_clock_a_client_stays_out() -> None:
    faults = Faults()
    faults.charge(1, "it lied")
    assert faults.barred == {1: "it lied"}


CLIENTS = range(7)


@given(
    st.integers(1, MOST_CORNERED + 1),
    st.lists(st.frozensets(st.sampled_from(CLIENTS), min_size=1), max_size=6),
)
def test_who_is_cornered_is_in_every_explanation(liars: int, spoilt: list[frozenset[int]]) -> None:
    """By looking at all sets of so many liars, of which each spoilt sum must hold one."""
    faults = Faults(liars=liars)
    for clients in spoilt:
        faults.note_spoilt(clients)
    explanations = [
        set(some) for some in combinations(CLIENTS, liars) if all(not clients.isdisjoint(some) for clients in spoilt)
    ]
    expected = set.intersection(*explanations) if explanations and spoilt and liars <= MOST_CORNERED else set()
    assert faults.cornered().keys() == expected
    if explanations and spoilt:
        assert set(faults.suspects) == set.intersection(*map(set, spoilt))


def test_nobody_is_named_where_nobody_knows_how_many_lie() -> None:
    """Two liars could otherwise have a third client named."""
    faults = Faults()
    for clients in ({1, 5}, {2, 5}):
        faults.note_spoilt(clients)
    assert faults.cornered() == {}
    assert faults.suspects == [5]


def test_a_client_that_is_named_explains_its_sums() -> None:
    faults = Faults(liars=1)
    for clients in ({1, 2}, {1, 3}):
        faults.note_spoilt(clients)
    assert faults.cornered() == {1: "2 spoilt sums have no other explanation if at most 1 clients lie"}
    faults.charge(1, "it has spoilt two sums")
    assert faults.suspects == []
    faults.note_spoilt({4})
    faults.forget(4)
    assert faults.cornered() == {}
