"""What clients insist on: who may be summed with whom, who shares masks with whom, and how many must hold a secret."""

import secrets
from fractions import Fraction
from math import comb

import pytest
from hypothesis import given, settings, strategies as st

from baffle.aggregation.client_policy import (
    COMPLETE_UP_TO,
    DROPOUT,
    FAILURE,
    ClientPolicy,
    Groups,
    checked_slot,
    degree,
    graph,
    liars_among,
    quorum,
)
from baffle.aggregation.messages import Opening
from baffle.errors import RefusalError
from tests.support.federation import Federation, about
from tests.support.rounds import Rounds

SEED = bytes(range(32))


@pytest.mark.parametrize("n", [0, 1, 2, 10, COMPLETE_UP_TO, COMPLETE_UP_TO + 1])
def test_the_graph_is_complete_in_small_rounds_and_where_clients_must_agree(n: int) -> None:
    members = tuple(range(5, 5 + 3 * n, 3))
    for drawn in (graph(members, SEED), ClientPolicy(agreement=True).graph(members, 0))[n > COMPLETE_UP_TO :]:
        assert drawn.k == max(n - 1, 0)
        for member in members:
            assert drawn.neighbours[member] == [other for other in members if other != member]


@pytest.mark.parametrize("n", [201, 202, 333, 1000])
def test_large_rounds_are_regular_and_symmetric(n: int) -> None:
    members = tuple(range(3, 3 + 2 * n, 2))
    drawn = graph(members, SEED)
    assert drawn.k == degree(n, DROPOUT) < n
    neighbours_of = {member: drawn.neighbours[member] for member in members}
    for member, neighbours in neighbours_of.items():
        assert neighbours == sorted(set(neighbours))
        assert len(neighbours) == drawn.k
        assert member not in neighbours
        assert all(member in neighbours_of[other] for other in neighbours)


def test_a_large_graph_is_connected_and_follows_from_its_seed() -> None:
    members = tuple(range(1000))
    drawn = graph(members, SEED)
    reached, edge = {0}, [0]
    while edge:
        new = {peer for member in edge for peer in drawn.neighbours[member]} - reached
        reached |= new
        edge = list(new)
    assert reached == set(members)
    again, other = graph(members, SEED), graph(members, secrets.token_bytes(32))
    assert all(again.neighbours[member] == drawn.neighbours[member] for member in members)
    assert any(other.neighbours[member] != drawn.neighbours[member] for member in members)


def failure(n: int, k: int) -> Fraction:
    """A bound on the probability that some client keeps at most k/2 neighbours, in exact arithmetic."""
    stay = n - round(DROPOUT * n)
    few = sum(comb(stay, kept) * comb(n - 1 - stay, k - kept) for kept in range(k // 2 + 1))
    return n * Fraction(few, comb(n - 1, k))


@pytest.mark.parametrize("n", [400, 1000])
def test_the_degree_is_the_smallest_that_does(n: int) -> None:
    k = degree(n, DROPOUT)
    assert failure(n, k) <= FAILURE < failure(n, k - 2)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 10, 11, 199, 200, 201, 300, 1000])
def test_contradictions_never_reach_the_threshold_twice(n: int) -> None:
    """The k neighbours and the client itself hold shares: too few for t to be told alive and t others dropped."""
    drawn = graph(tuple(range(n)), SEED)
    t, holders = drawn.least_threshold, drawn.k + 1
    assert n > COMPLETE_UP_TO or t == n // 2 + 1
    assert 2 * t - 1 > drawn.k
    assert 2 * t > holders
    assert 2 * (t - 1) <= holders
    assert t <= holders


pytestmark = pytest.mark.usefixtures("few_keys")

HALVES = [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]
ENDS = [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


def halves_then_ends(number: int) -> Groups:
    return [HALVES, ENDS, []][min(number, 2)]


def opening(slot: int, members: tuple[int, ...], threshold: int = 3, floor: int = 2) -> Opening:
    return Opening(slot, members, threshold, floor, ())


def test_members_of_two_groups_of_another_round_or_of_none_are_refused() -> None:
    policy = ClientPolicy(groups_of=halves_then_ends)
    for members in ((0, 2, 4, 6, 8), (1, 3, 9)):
        assert checked_slot(opening(0, members), policy).opening.members == members
    for slot, others in ((0, (0, 1, 2)), (1, (0, 2, 8)), (0, (0, 2, 10)), (2**62, (0, 2, 4))):
        with pytest.raises(RefusalError, match="does not sum these clients together"):
            checked_slot(opening(slot, others, len(others) // 2 + 1), policy)


def test_a_client_seals_for_its_own_group_only() -> None:
    federation = Federation(10, policy=ClientPolicy(groups_of=halves_then_ends))
    federation.advertise()
    for slot, members in ((0, ENDS[0]), (0, range(10)), (1, HALVES[0]), (2, HALVES[0])):
        with pytest.raises(RefusalError, match="does not sum these clients together"):
            federation.sessions[0].seal(federation.opening(slot, 0, members, threshold=len(members) // 2 + 1))
    with pytest.raises(RefusalError, match="does not count this client"):
        federation.sessions[0].seal(federation.opening(0, 0, HALVES[1]))
    federation.sessions[0].seal(federation.opening(0, 0, HALVES[0]))


@pytest.mark.parametrize("agreement", [False, True])
def test_a_server_that_puts_one_client_into_two_groups_gets_one_sum_at_most(agreement: bool) -> None:
    """The difference of a sum over a group and a sum over the group and one more client would be one vector."""
    rounds = Rounds(8, groups=lambda _: [[0, 1, 2, 3], [4, 5, 6, 7]], agreement=agreement)
    honest = rounds.sum.policy
    rounds.sum.policy = ClientPolicy(agreement=agreement, groups_of=None)
    asked = [dict.fromkeys((0, 1, 2, 3), about(0)), dict.fromkeys((3, 4, 5, 6, 7), about(0))]
    collected = rounds.sum.collect(asked, rounds.network)
    assert collected.sums[1] is None
    assert collected.events[4] != "contributed"
    rounds.sum.policy = honest


@given(st.integers(2, 400), st.data())
@settings(max_examples=60)
def test_two_thirds_of_the_company_are_the_least_where_clients_must_agree(n: int, data: st.DataObject) -> None:
    """Two lists of survivors would need 2t signatures, and fewer than a third of the clients give two."""
    company = list(range(n))
    policy = ClientPolicy(agreement=True, groups_of=lambda _: [company])
    members = tuple(range(data.draw(st.integers(2, n))))
    least = 2 * n // 3 + 1
    assert 2 * least > n + (n - 1) // 3
    for threshold in {1, 2, n // 2 + 1, least - 1, least, len(members), len(members) + 1}:
        if least <= threshold <= len(members):
            checked_slot(opening(0, members, threshold), policy)
        else:
            with pytest.raises(RefusalError, match="threshold"):
                checked_slot(opening(0, members, threshold), policy)


@given(st.integers(1, 1000), st.integers(0, 400))
def test_two_quorums_share_an_honest_client_and_the_honest_clients_are_one(n: int, stated: int) -> None:
    """Liars do twice what a client does once, and may leave undone what it does."""
    liars, least = liars_among(n, stated), quorum(n, stated)
    assert 3 * liars < n
    assert liars == (stated if 0 < 3 * stated < n else max(liars_among(n), 0))
    assert 2 * least > n + liars
    assert least <= n - liars
    assert quorum(n) == 2 * n // 3 + 1
    assert least <= quorum(n)


def test_a_stated_number_of_liars_lowers_the_threshold() -> None:
    company = list(range(10))
    for liars, least in ((0, 7), (1, 6), (2, 7), (3, 7)):
        policy = ClientPolicy(agreement=True, groups_of=lambda _: [company], liars=liars)
        checked_slot(opening(0, tuple(company), least), policy)
        with pytest.raises(RefusalError, match=f"expected {least} to 10"):
            checked_slot(opening(0, tuple(company), least - 1), policy)


@given(st.integers(2, 60), st.integers(0, 61))
@settings(max_examples=60)
def test_more_than_half_of_the_holders_are_the_least_otherwise(n: int, threshold: int) -> None:
    policy = ClientPolicy(groups_of=lambda _: [list(range(n))])
    if 2 * threshold > n and threshold <= n:
        checked_slot(opening(0, tuple(range(n)), threshold), policy)
    else:
        with pytest.raises(RefusalError, match="threshold"):
            checked_slot(opening(0, tuple(range(n)), threshold), policy)


def test_a_threshold_that_the_plan_names_is_the_least_that_clients_take() -> None:
    """The noise of private sums counts on it."""
    policy = ClientPolicy(threshold=5)
    assert checked_slot(opening(0, (0, 1, 2, 3, 4), threshold=5), policy).opening.threshold == 5
    with pytest.raises(RefusalError, match="a threshold of 4 with 4 neighbours, expected 5 to 5"):
        checked_slot(opening(0, (0, 1, 2, 3, 4), threshold=4), policy)
