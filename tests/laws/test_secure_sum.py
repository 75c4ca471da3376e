"""Whatever is lost or damaged on the way, a secure sum is exactly the sum over the contributors, or there is none."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from baffle.aggregation.messages import Turned
from baffle.core.messages import encode
from baffle.core.ring import Totals, add, combine_totals
from tests.support.rounds import Rounds

pytestmark = pytest.mark.usefixtures("few_keys")

FAULTS = ["deaf", "lost", "cut", "flipped", "refused", "restarts"]
PHASES = ["keys", "share", "vector", "agree", "unmask"]
N_MAX, ROUNDS = 7, 4

Fault = tuple[str, int]
Schedule = dict[tuple[int, int, str], Fault]

schedules = st.dictionaries(
    st.tuples(st.integers(0, ROUNDS - 1), st.integers(0, N_MAX - 1), st.sampled_from(PHASES)),
    st.tuples(st.sampled_from(FAULTS), st.integers(0, 2**20)),
    max_size=10,
)


def spoilt(phase: str, data: bytes, fault: Fault) -> bytes | None:
    """A reply after a fault. A vector is damaged beyond reading, since within its bounds any vector is valid."""
    kind, where = fault
    place = where // 8 % len(data)
    flipped = data[:place] + bytes([data[place] ^ 1 << where % 8]) + data[place + 1 :]
    replies = {"lost": None, "cut": data[: where % len(data)], "refused": encode(Turned(None, None))}
    replies["flipped"] = flipped if phase != "vector" else data[:-1]
    return replies.get(kind, data)


def play(rounds: Rounds, number: int, schedule: Schedule) -> None:
    """A round with these faults. `Rounds` compares the sum of every group with the plain one."""

    def fault(client: int, phase: str) -> Fault:
        return schedule.get((number, client, phase), ("", 0))

    def deaf(client: int, phase: str) -> bool:
        kind, _ = fault(client, phase)
        if kind == "restarts":
            rounds.federation.sessions[client] = rounds.federation.new_session(client)
        return kind == "deaf"

    rounds.network.deaf = deaf
    rounds.network.spoil = lambda client, phase, data: spoilt(phase, data, fault(client, phase))
    rounds.play_groups(number)


@given(st.integers(2, N_MAX), schedules, st.lists(st.integers(1, 2**N_MAX - 1), min_size=ROUNDS, max_size=ROUNDS))
@settings(max_examples=60, deadline=None)
def test_no_fault_gives_a_wrong_sum(n: int, schedule: Schedule, chosen: list[int]) -> None:
    participants = [[c for c in range(n) if mask >> c & 1] or list(range(n)) for mask in chosen]
    rounds = Rounds(n, participants=lambda number: participants[number] if number < ROUNDS else [])
    for number in range(ROUNDS):
        play(rounds, number, schedule)


@given(st.integers(2, N_MAX), st.data())
@settings(max_examples=20, deadline=None)
def test_a_round_that_enough_clients_finish_has_a_sum(n: int, data: st.DataObject) -> None:
    """While a majority stays, lost replies cost the other clients nothing."""
    rounds = Rounds(n)
    for number in range(3):
        order = data.draw(st.permutations(range(n)))
        lost = {client: data.draw(st.sampled_from(["vector", "unmask"])) for client in order[max(2, n // 2 + 1) :]}
        if number < 2:
            lost = dict.fromkeys(lost, "vector")
        rounds.network.spoil = lambda client, phase, reply, lost=lost: None if lost.get(client) == phase else reply  # type: ignore[misc]
        total, events = rounds.play(number)
        assert total is not None, events
        assert total.contributors == n - list(lost.values()).count("vector")


@st.composite
def divided(draw: st.DrawFn) -> list[list[list[int]]]:
    """For each round, all clients divided into groups of any size and order."""
    n, rounds = draw(st.integers(4, 9)), []
    for _ in range(ROUNDS - 1):
        order, count = draw(st.permutations(range(n))), draw(st.integers(1, n // 2))
        rounds.append([sorted(order[group::count]) for group in range(count)])
    return rounds


@given(divided(), schedules, st.booleans())
@settings(max_examples=40, deadline=None)
def test_every_group_has_its_own_exact_sum_or_none(
    groups: list[list[list[int]]], schedule: Schedule, agreement: bool
) -> None:
    n = sum(map(len, groups[0]))
    rounds = Rounds(n, groups=lambda number: groups[number] if number < len(groups) else [], agreement=agreement)
    for number in range(len(groups)):
        play(rounds, number, schedule)


@given(divided(), st.data())
@settings(max_examples=30, deadline=None)
def test_a_group_that_fails_hurts_no_other(groups: list[list[list[int]]], data: st.DataObject) -> None:
    rounds = Rounds(sum(map(len, groups[0])), groups=lambda number: groups[number] if number < len(groups) else [])
    for number, now in enumerate(groups):
        failing = data.draw(st.sets(st.integers(0, len(now) - 1)))
        lost = {client for group in failing for client in now[group]}
        rounds.network.spoil = lambda client, phase, reply, lost=lost: (  # type: ignore[misc]
            None if phase == "vector" and client in lost else reply
        )
        collected = rounds.play_groups(number)
        for index, (group, total) in enumerate(zip(now, collected.sums, strict=True)):
            assert (total is None) == (index in failing), collected.events
            if total is not None:
                assert total.contributors == len(group)
        if len(failing) == len(now):
            return


@given(st.permutations(range(8)), st.sampled_from([1, 2, 3, 4]))
@settings(max_examples=20, deadline=None)
def test_the_sums_of_groups_add_up_to_the_sum_of_all(order: list[int], count: int) -> None:
    rounds = Rounds(8, groups=lambda _: [sorted(order[group::count]) for group in range(count)])
    sums = [total for total in rounds.play_groups(0).sums if total]
    whole = rounds.ring.decode(add([rounds.network.plain[0, client] for client in range(8)]), 8)
    together = combine_totals([Totals(total.totals, total.weight) for total in sums], "mean")
    assert len(sums) == count
    assert np.array_equal(together.numbers, whole.totals)
    assert together.weight == whole.weight
