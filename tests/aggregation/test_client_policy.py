"""What clients insist on: who may be summed with whom, and how many must hold a secret."""

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baffle.aggregation.client_policy import ClientPolicy, Groups, checked_slot
from baffle.aggregation.graph import COMPLETE_UP_TO
from baffle.aggregation.messages import Opening
from baffle.errors import RefusalError
from tests.support.federation import Federation, about
from tests.support.rounds import Rounds

HALVES = [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]
ENDS = [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


def halves_then_ends(number: int) -> Groups:
    return [HALVES, ENDS, []][min(number, 2)]


@pytest.fixture(autouse=True, scope="module")
def _few_keys() -> Iterator[None]:
    """Lists of keys for few slots are quicker to make."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("baffle.aggregation.client.session.KEYS_AT_ONCE", 8)
        yield


def opening(slot: int, members: tuple[int, ...], threshold: int = 3, floor: int = 2) -> Opening:
    return Opening(slot, members, threshold, floor, ())


@pytest.mark.parametrize("members", [(0, 2, 4, 6, 8), (1, 3, 5, 7, 9), (0, 2, 4, 6), (1, 3, 9)])
def test_a_group_of_the_round_or_a_part_of_one_is_taken(members: tuple[int, ...]) -> None:
    policy = ClientPolicy(groups_of=halves_then_ends)
    assert checked_slot(opening(0, members), policy).opening.members == members


@pytest.mark.parametrize(
    ("slot", "members"),
    [
        (0, (0, 1, 2)),
        (0, (0, 2, 4, 6, 8, 9)),
        (0, tuple(range(10))),
        (0, (0, 1, 2, 3, 4)),
        (1, (0, 2, 4, 6, 8)),
        (1, (4, 5, 6)),
        (0, (10, 11, 12)),
        (0, (0, 2, 10)),
        (2, (0, 2, 4)),
        (2, tuple(range(10))),
        (2**62, (0, 2, 4)),
    ],
)
def test_members_of_two_groups_of_another_round_or_of_none_are_refused(slot: int, members: tuple[int, ...]) -> None:
    policy = ClientPolicy(groups_of=halves_then_ends)
    with pytest.raises(RefusalError, match="does not sum these clients together"):
        checked_slot(opening(slot, members, len(members) // 2 + 1), policy)


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


@pytest.mark.parametrize("n", [2, 3, 50, COMPLETE_UP_TO, COMPLETE_UP_TO + 1, 301])
def test_the_graph_is_complete_where_clients_must_agree(n: int) -> None:
    members = tuple(range(n))
    drawn = ClientPolicy(agreement=True).graph(members, 0)
    assert drawn.k == n - 1
    assert drawn.neighbours[0] == list(range(1, n))
    assert (ClientPolicy().graph(members, 0).k < n - 1) == (n > COMPLETE_UP_TO)


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


@given(st.integers(2, 60), st.integers(0, 61))
@settings(max_examples=60)
def test_more_than_half_of_the_holders_are_the_least_otherwise(n: int, threshold: int) -> None:
    policy = ClientPolicy(groups_of=lambda _: [list(range(n))])
    if 2 * threshold > n and threshold <= n:
        checked_slot(opening(0, tuple(range(n)), threshold), policy)
    else:
        with pytest.raises(RefusalError, match="threshold"):
            checked_slot(opening(0, tuple(range(n)), threshold), policy)


def test_a_slot_with_a_planned_threshold_that_its_members_cannot_reach_is_not_opened() -> None:
    rounds = Rounds(6, threshold=5)
    rounds.network.deaf = lambda client, phase: client > 3 and phase == "hello"
    assert rounds.play(0)[0] is None


def test_a_threshold_that_the_plan_names_is_the_least_that_clients_take() -> None:
    """The noise of private sums counts on it."""
    policy = ClientPolicy(threshold=5)
    assert checked_slot(opening(0, (0, 1, 2, 3, 4), threshold=5), policy).opening.threshold == 5
    with pytest.raises(RefusalError, match="a threshold of 4 with 4 neighbours, expected 5 to 5"):
        checked_slot(opening(0, (0, 1, 2, 3, 4), threshold=4), policy)
