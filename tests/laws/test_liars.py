"""Clients that lie about shares or secrets: the sum is right or there is none, no honest client is named, and the run
goes on without those that are."""

import pytest
from hypothesis import given, settings, strategies as st

from baffle.aggregation.messages import BOX_BYTES
from baffle.core.ports import Collected
from tests.support.lies import (
    Change,
    beyond_the_prime,
    committing_otherwise,
    dealing_bad_boxes,
    dealing_other_secrets,
    dealing_wrong_shares,
    flipped,
    made_up,
    with_other_shares,
)
from tests.support.rounds import Rounds

pytestmark = pytest.mark.usefixtures("few_keys")

Wrong = dict[int, dict[int, Change]]  # holder → dealer → how the holder changes its share of the dealer's secret

random_changes = st.one_of(st.integers(0, 157).map(beyond_the_prime), st.just(made_up))
changes = st.one_of(st.integers(0, 127).map(flipped), random_changes)


def named(collected: Collected) -> set[int]:
    return {client for client, _ in collected.refusals}


def play_with_wrong_shares(rounds: Rounds, wrong: Wrong, dropped: set[int]) -> Collected:
    """Round 0. `Rounds` compares its sum with the plain one."""
    rounds.network.deaf = lambda client, phase: client in dropped and phase == "vector"
    rounds.network.spoil = lambda client, phase, reply: (
        with_other_shares(rounds.federation.sessions[client], reply, wrong[client])
        if client in wrong and phase == "unmask"
        else reply
    )
    return rounds.play_groups(0)


def require_the_run_goes_on_without(rounds: Rounds, n: int, liars: set[int]) -> None:
    """The honest clients have their next sums, if they are enough, and nobody asks the liars anything."""
    rounds.network.deaf = lambda _client, _phase: False
    rounds.network.spoil = lambda _client, _phase, reply: reply
    honest = set(range(n)) - liars
    for number in (1, 2):
        collected = rounds.play_groups(number)
        if len(honest) >= rounds.policy.least_threshold(rounds.policy.graph(tuple(range(n)), number), n):
            (total,) = collected.sums
            assert total is not None, collected.events
            assert total.contributors == len(honest)
        assert not named(collected)
        assert not liars & {client for exchange in rounds.exchanges for client in exchange}
        assert all(collected.events[liar].startswith("left out: in round 0 it") for liar in liars)


@st.composite
def wrong_shares(draw: st.DrawFn, *, too_many: bool) -> tuple[int, bool, set[int], Wrong]:
    """The number of clients, whether they agree on survivors, those that drop, and wrong shares: of each secret at most
    as many as are spare, or any number. A single bit is wrong in one share of a secret at most: two such
    lies may cancel each other."""
    n, agreement = draw(st.integers(3, 9)), draw(st.booleans())
    t = 2 * n // 3 + 1 if agreement else n // 2 + 1
    dropped = draw(st.sets(st.integers(0, n - 1), max_size=n - max(t, 2)))
    alive = [client for client in range(n) if client not in dropped]
    wrong: Wrong = {}
    for dealer in range(n):
        most = len(alive) if too_many else len(alive) - t
        for number, holder in enumerate(draw(st.sets(st.sampled_from(alive), max_size=most))):
            wrong.setdefault(holder, {})[dealer] = draw(random_changes if number else changes)
    return n, agreement, dropped, wrong


@given(wrong_shares(too_many=False))
@settings(max_examples=60, deadline=None)
def test_as_many_wrong_shares_as_there_are_spare_ones_cost_no_sum_and_name_exactly_the_liars(
    case: tuple[int, bool, set[int], Wrong],
) -> None:
    """At any places, of any secrets, one's own included. (Correcting errors without knowing where they are could stand
    only half as many.)"""
    n, agreement, dropped, wrong = case
    rounds = Rounds(n, agreement=agreement)
    collected = play_with_wrong_shares(rounds, wrong, dropped)
    assert collected.sums[0] is not None, collected.events
    assert named(collected) == set(wrong)
    require_the_run_goes_on_without(rounds, n, set(wrong))


def test_lies_that_cancel_each_other_leave_the_sum_right() -> None:
    """Shares that are wrong by 1 at the points 3 and 4 of 7, where Lagrange's coefficients are 35 and −35. Half of the
    time both errors have the same sign: the secret is right, so nobody needs to be named."""
    for _ in range(8):
        collected = play_with_wrong_shares(Rounds(7, agreement=True), {2: {5: flipped(0)}, 3: {5: flipped(0)}}, set())
        assert collected.sums[0] is not None, collected.events
        assert named(collected) in (set(), {2, 3})


@given(wrong_shares(too_many=True))
@settings(max_examples=60, deadline=None)
def test_any_number_of_wrong_shares_gives_no_wrong_sum_and_names_nobody_else(
    case: tuple[int, bool, set[int], Wrong],
) -> None:
    n, agreement, dropped, wrong = case
    rounds = Rounds(n, agreement=agreement)
    assert named(play_with_wrong_shares(rounds, wrong, dropped)) <= set(wrong)


@given(st.integers(3, 9), st.data())
@settings(max_examples=50, deadline=None)
def test_dealers_of_other_secrets_are_all_named_at_once(n: int, data: st.DataObject) -> None:
    """Alive or dropped. Without their secrets there is no sum, unless only the seed of a client that drops is wrong."""
    rounds = Rounds(n)
    everybody = st.sets(st.integers(0, n - 1), max_size=n - (n // 2 + 1))
    of_both, of_seeds, dropped = data.draw(everybody), data.draw(everybody), data.draw(everybody)

    def lie(client: int, phase: str, reply: bytes) -> bytes:
        session = rounds.federation.sessions[client]
        if phase == "share" and client in of_both:
            return dealing_other_secrets(session, reply)
        return committing_otherwise(reply) if phase == "share" and client in of_seeds else reply

    rounds.network.spoil = lie
    rounds.network.deaf = lambda client, phase: client in dropped and phase == "vector"
    collected = rounds.play_groups(0)
    liars = of_both | of_seeds - dropped
    assert named(collected) == liars
    assert (collected.sums[0] is None) == bool(liars)
    if len(liars) == 1:
        assert f"client {min(liars)} dealt shares" in collected.events[min(set(range(n)) - dropped)]
    require_the_run_goes_on_without(rounds, n, liars)


@given(st.integers(3, 9), st.data())
@settings(max_examples=50, deadline=None)
def test_a_dealer_that_deals_wrong_shares_to_some_is_named_and_they_are_not(n: int, data: st.DataObject) -> None:
    """The holders release what they were dealt. Up to half of the spare shares may be wrong without harm to the sum."""
    rounds = Rounds(n)
    dealer = data.draw(st.integers(0, n - 1))
    dropped = data.draw(st.sets(st.integers(0, n - 1), max_size=n - (n // 2 + 1)))
    holders = data.draw(st.sets(st.integers(0, n - 1).filter(lambda holder: holder != dealer), min_size=1))
    rounds.network.spoil = lambda client, phase, reply: (
        dealing_wrong_shares(rounds.federation.sessions[client], reply, sorted(holders))
        if client == dealer and phase == "share"
        else reply
    )
    rounds.network.deaf = lambda client, phase: client in dropped and phase == "vector"
    collected = rounds.play_groups(0)
    wrong, spare = holders - dropped, n - len(dropped) - (n // 2 + 1)
    assert named(collected) == ({dealer} if wrong else set())
    if 2 * len(wrong) <= spare:
        assert collected.sums[0] is not None, collected.events
    require_the_run_goes_on_without(rounds, n, named(collected))


@given(st.integers(3, 9), st.booleans(), st.integers(0, BOX_BYTES - 1), st.data())
@settings(max_examples=50, deadline=None)
def test_boxes_that_cannot_be_opened_count_against_the_dealer_only_if_they_are_too_many(
    n: int, agreement: bool, byte: int, data: st.DataObject
) -> None:
    rounds = Rounds(n, agreement=agreement)
    spare = n - (2 * n // 3 + 1 if agreement else n // 2 + 1)
    dealer = data.draw(st.integers(0, n - 1))
    holders = data.draw(st.sets(st.integers(0, n - 1).filter(lambda holder: holder != dealer)))
    rounds.network.spoil = lambda client, phase, reply: (
        dealing_bad_boxes(rounds.federation.sessions[client], reply, sorted(holders), byte)
        if client == dealer and phase == "share"
        else reply
    )
    collected = rounds.play_groups(0)
    too_many = len(holders) > spare
    assert (collected.sums[0] is None) == too_many, collected.events
    assert named(collected) == ({dealer} if too_many else set())
    require_the_run_goes_on_without(rounds, n, named(collected))
