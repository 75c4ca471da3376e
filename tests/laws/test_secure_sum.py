"""Whatever is lost or damaged on the way, a secure sum is exactly the sum over the contributors, or there is none."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baffle.aggregation.messages import Turned, cut
from baffle.aggregation.shares import SHARE_BYTES
from baffle.core.groups import Totals, combine_totals
from baffle.core.messages import decode, encode
from baffle.core.ring import add
from tests.support.rounds import Rounds

FAULTS = ["deaf", "lost", "cut", "flipped", "refused", "restarts"]
PHASES = ["hello", "seal", "vector", "agree", "unmask"]
N_MAX, ROUNDS = 7, 4

Fault = tuple[str, int]
Schedule = dict[tuple[int, int, str], Fault]

schedules = st.dictionaries(
    st.tuples(st.integers(0, ROUNDS - 1), st.integers(0, N_MAX - 1), st.sampled_from(PHASES)),
    st.tuples(st.sampled_from(FAULTS), st.integers(0, 2**20)),
    max_size=10,
)


@pytest.fixture(autouse=True, scope="module")
def _few_keys() -> Iterator[None]:
    """Lists of keys for few slots are quicker to make."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("baffle.aggregation.client.session.KEYS_AT_ONCE", 8)
        yield


def flipped(data: bytes, where: int) -> bytes:
    place = where // 8 % len(data)
    return data[:place] + bytes([data[place] ^ 1 << where % 8]) + data[place + 1 :]


def spoilt(phase: str, data: bytes, fault: Fault) -> bytes | None:
    """A reply after a fault. A vector is damaged beyond reading, since within its bounds any vector is valid."""
    kind, where = fault
    match kind:
        case "lost":
            return None
        case "cut":
            return data[: where % len(data)]
        case "flipped":
            return flipped(data, where) if phase != "vector" else data[:-1]
        case "refused":
            return encode(Turned(None, None))
        case _:
            return data


@given(st.integers(2, N_MAX), schedules, st.lists(st.integers(1, 2**N_MAX - 1), min_size=ROUNDS, max_size=ROUNDS))
@settings(max_examples=60, deadline=None)
def test_no_fault_gives_a_wrong_sum(n: int, schedule: Schedule, chosen: list[int]) -> None:
    """`Rounds.play` compares each sum with the plain one."""
    participants = [[c for c in range(n) if mask >> c & 1] or list(range(n)) for mask in chosen]
    rounds = Rounds(n, participants=lambda number: participants[number] if number < ROUNDS else [])
    for number in range(ROUNDS):

        def deaf(client: int, phase: str, number: int = number) -> bool:
            kind, _ = schedule.get((number, client, phase), ("", 0))
            if kind == "restarts":
                rounds.federation.sessions[client] = rounds.federation.new_session(client)
            return kind == "deaf"

        def spoil(client: int, phase: str, data: bytes, number: int = number) -> bytes | None:
            return spoilt(phase, data, schedule.get((number, client, phase), ("", 0)))

        rounds.network.deaf, rounds.network.spoil = deaf, spoil
        rounds.play(number)


@given(st.integers(3, N_MAX), st.data())
@settings(max_examples=40, deadline=None)
def test_wrong_shares_give_no_wrong_sum(n: int, data: st.DataObject) -> None:
    """Some clients drop, and others release shares with single wrong bits."""
    rounds = Rounds(n)
    for number in range(2):
        drops = data.draw(st.sets(st.integers(0, n - 1), max_size=n // 2 - 1 if n > 3 else 0))
        liars = data.draw(st.sets(st.integers(0, n - 1), max_size=2))
        bit, place = data.draw(st.integers(0, 127)), data.draw(st.integers(0, n - 1))

        def spoil(
            client: int,
            phase: str,
            reply: bytes,
            liars: set[int] = liars,
            bit: int = bit,
            place: int = place,
        ) -> bytes:
            turned = decode(reply, Turned) if phase == "unmask" and client in liars else None
            if turned is None or turned.unmasked is None:
                return reply
            held = len(turned.unmasked.shares) // SHARE_BYTES  # fewer when a liar has been left out
            shares = [*cut(turned.unmasked.shares, SHARE_BYTES, held, "shares"), turned.unmasked.own]
            shares[place % len(shares)] = flipped(shares[place % len(shares)], bit)
            lie = type(turned.unmasked)(turned.unmasked.slot, b"".join(shares[:-1]), shares[-1])
            return encode(Turned(lie, turned.sealed))

        rounds.network.spoil = spoil
        rounds.network.deaf = lambda client, phase, drops=drops: client in drops and phase == "vector"  # type: ignore[misc]
        rounds.play(number)


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
    """`Rounds.play_groups` compares the sums of all groups, over one transport, with the plain ones."""
    n = sum(map(len, groups[0]))
    rounds = Rounds(n, groups=lambda number: groups[number] if number < len(groups) else [], agreement=agreement)
    for number in range(len(groups)):

        def fault(client: int, phase: str, number: int = number) -> Fault:
            return schedule.get((number, client, phase), ("", 0))

        def deaf(client: int, phase: str) -> bool:
            kind, _ = fault(client, phase)
            if kind == "restarts":
                rounds.federation.sessions[client] = rounds.federation.new_session(client)
            return kind == "deaf"

        rounds.network.deaf = deaf
        rounds.network.spoil = lambda client, phase, data: spoilt(phase, data, fault(client, phase))
        rounds.play_groups(number)


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
