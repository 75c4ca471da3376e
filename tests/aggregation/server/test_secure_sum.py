"""Rounds of a secure sum over a network: two exchanges each, whichever clients come, go, restart or send nonsense."""

import secrets

import pytest
from msgspec.structs import replace

from baffle.aggregation.client.slot import MOST_QUERIES
from baffle.aggregation.context import signed, state_text
from baffle.aggregation.messages import NO_SHARE, PHASES, Agreed, Turned, Unmasked
from baffle.aggregation.shares import SHARE_BYTES
from baffle.core.messages import Abstention, Contribution, decode, encode
from tests.support.federation import LENGTH, about
from tests.support.rounds import Rounds

pytestmark = pytest.mark.usefixtures("few_keys")

GARBAGE = [
    b"",
    b"\x91" * 100_000,
    encode(Abstention(0)),
    encode(Contribution(0, b"123")),
    encode(Contribution(99, bytes(4 * LENGTH))),
    encode(Turned(Unmasked(0, b"", bytes(SHARE_BYTES)), None)),
    encode(Turned(Unmasked(0, NO_SHARE * 3, NO_SHARE), None)),
    encode(Agreed(0, bytes(64), bytes(64))),
]


def phases(rounds: Rounds) -> list[set[str]]:
    return [set(exchange.values()) for exchange in rounds.exchanges]


@pytest.mark.parametrize("agreement", [False, True])
def test_a_steady_round_takes_two_exchanges_and_one_more_to_agree(agreement: bool) -> None:
    rounds, agree = Rounds(5, agreement=agreement), [{"agree"}] * agreement
    rounds.play(0)
    assert phases(rounds) == [{"keys"}, {"share"}, {"vector"}, *agree, {"unmask"}]
    for number in (1, 2):
        total, events = rounds.play(number)
        assert total is not None
        assert (total.contributors, total.weight) == (5, 15)
        assert set(events.values()) == {"contributed"}
        assert phases(rounds) == [{"vector"}, *agree, {"unmask"}]


@pytest.mark.parametrize("following", [(), (0,), (0, 1, 2)])
def test_a_next_round_that_is_none_or_too_small_does_not_cost_this_one(following: tuple[int, ...]) -> None:
    rounds = Rounds(5, participants=lambda number: range(5) if number < 1 else following, threshold=4)
    total, events = rounds.play(0)
    assert total is not None, events
    assert not following or rounds.play(1)[0] is None


def test_key_lists_are_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baffle.aggregation.client.session.KEYS_AT_ONCE", 3)
    rounds = Rounds(3)
    hellos = []
    for number in range(6):
        total, _ = rounds.play(number)
        assert total is not None
        assert total.contributors == 3
        hellos.append(sum("keys" in phase for phase in phases(rounds)))
    assert hellos == [1, 0, 1, 0, 0, 1]


def test_a_client_that_dropped_and_is_chosen_later_is_known_to_all() -> None:
    participants = [(0, 1, 2, 3), (3, 4, 5), (0, 3, 4, 5), (0, 3, 4, 5)]
    rounds = Rounds(6, participants=lambda number: participants[number % 4])
    rounds.network.deaf = lambda client, phase: client == 0 and phase == "vector"
    assert rounds.play(0)[1][0] == "missing"
    rounds.network.deaf = lambda _client, _phase: False
    for number in (1, 2, 3):
        total, events = rounds.play(number)
        assert total is not None, events
        assert total.contributors == len(participants[number])


def test_a_restarted_client_that_the_server_forgets_is_back_a_round_sooner() -> None:
    """It is asked for new keys in round 1, before slot 2 is opened; otherwise its old ones would be used once more."""
    contributors = {}
    for forgets in (False, True):
        rounds = Rounds(5)
        rounds.play(0)
        rounds.federation.sessions[2] = rounds.federation.new_session(2)
        if forgets:
            rounds.sum.forget(2)
        totals = [rounds.play(number)[0] for number in (1, 2, 3)]
        contributors[forgets] = [total.contributors for total in totals if total]
    assert contributors == {False: [4, 4, 5], True: [4, 5, 5]}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("garbage", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_never_raises_and_never_counts(phase: str, garbage: bytes) -> None:
    rounds = Rounds(4, agreement=True)
    rounds.network.spoil = lambda client, at, data: garbage if client == 1 and at == phase else data
    collected = rounds.play_groups(0)
    assert collected.sums[0] is not None, collected.events
    assert collected.sums[0].contributors == (4 if phase in ("agree", "unmask") else 3)
    assert {client for client, _ in collected.refusals} == {1}
    if phase == "vector":
        assert collected.events[1] not in ("contributed", "missing")
    rounds.network.spoil = lambda _client, _phase, data: data
    rounds.play(1)
    rounds.play(2)


@pytest.mark.parametrize("phase", PHASES)
def test_garbage_from_all_ends_the_round_only(phase: str) -> None:
    rounds = Rounds(4, agreement=True)
    rounds.network.spoil = lambda _client, at, data: secrets.token_bytes(50) if at == phase else data
    assert rounds.play(0)[0] is None
    rounds.network.spoil = lambda _client, _phase, data: data
    rounds.play(1)
    assert rounds.play(2)[0] is not None


@pytest.mark.parametrize(
    ("phase", "contributors", "reason"),
    [
        ("keys", 4, "keys of client 0"),
        ("share", None, "neighbours of client 1 answered"),
        ("vector", None, "the sum claims"),
        ("unmask", 5, "contributed"),
    ],
)
def test_replies_of_others_never_count_as_ones_own(phase: str, contributors: int | None, reason: str) -> None:
    """Client 1 repeats the replies of client 0: they do not count, or there is no sum; never a wrong one."""
    rounds = Rounds(5)
    said: dict[str, bytes] = {}

    def echo(client: int, at: str, data: bytes) -> bytes:
        if client == 0:
            said[at] = data
        return said[at] if client == 1 and at == phase else data

    rounds.network.spoil = echo
    total, events = rounds.play(0)
    assert (None if total is None else total.contributors) == contributors
    assert reason in events[1]


@pytest.mark.parametrize("phase", PHASES)
def test_an_abstention_is_counted_in_every_phase(phase: str) -> None:
    rounds = Rounds(6, agreement=True)
    rounds.network.spoil = lambda client, at, data: encode(Abstention(0)) if (client, at) == (0, phase) else data
    collected = rounds.play_groups(0)
    assert set(collected.refusals) == {(0, "abstained")}
    assert collected.abstained == {phase: len(collected.refusals)}
    assert collected.silent == {}
    expected = "abstained" if phase in ("keys", "share", "vector") else "contributed"
    assert collected.events == {0: expected, **dict.fromkeys(range(1, 6), "contributed")}


def test_a_part_of_a_turn_that_a_client_refuses_is_an_abstention() -> None:
    rounds = Rounds(6)

    def without_shares(client: int, phase: str, data: bytes) -> bytes:
        if (client, phase) == (0, "unmask"):
            return encode(replace(decode(data, Turned), unmasked=None))
        return encode(replace(decode(data, Turned), sealed=None)) if (client, phase) == (1, "share") else data

    rounds.network.spoil = without_shares
    collected = rounds.play_groups(0)
    assert sorted(collected.refusals) == [(0, "abstained"), (1, "abstained"), (1, "abstained")]
    assert collected.abstained == {"share": 2, "unmask": 1}  # client 1 also refuses to open the next round
    assert collected.events == {1: "abstained", **dict.fromkeys((0, 2, 3, 4, 5), "contributed")}


def test_only_a_simulation_knows_why_a_client_abstained() -> None:
    rounds = Rounds(4)
    rounds.play(0)
    again = about(0, weights_hash=b"x" * 32)
    alone = rounds.sum.collect([dict.fromkeys(range(4), again)], rounds.network)
    assert set(alone.events.values()) == {"abstained"}
    collected = rounds.play_groups(0, again)
    assert all(event == "abstained: slot 0 has been used for another request" for event in collected.events.values())
    assert dict(collected.refusals) == collected.events


@pytest.mark.parametrize("phase", ["keys", "share"])
def test_a_round_that_never_began_says_why(phase: str) -> None:
    """Clients that did answer are not called missing."""
    rounds = Rounds(4)
    rounds.network.deaf = lambda client, at: at == phase and client > 0
    total, events = rounds.play(0)
    assert total is None
    assert events[1] == "missing"
    assert events[0] not in ("missing", "contributed")


def test_fewer_than_the_floor_give_no_sum() -> None:
    rounds = Rounds(5, floor=4)
    rounds.network.deaf = lambda client, phase: client > 2 and phase == "vector"
    total, events = rounds.play(0)
    assert total is None
    assert not any(phase == {"unmask"} for phase in phases(rounds))
    assert events[4] == "missing"


@pytest.mark.parametrize("fruitless", [(0, 4), (0, 2, 4), ()])
@pytest.mark.parametrize("agreement", [False, True])
def test_weights_are_asked_about_three_times_at_most_whatever_became_of_the_sums(
    agreement: bool, fruitless: tuple[int, ...]
) -> None:
    """In fruitless rounds all clients release their shares, and too few of these reach the server."""
    rounds = Rounds(5, participants=lambda number: range(5) if number % 2 == 0 else (), agreement=agreement)
    same = bytes(range(32))
    for number in range(0, 2 * MOST_QUERIES, 2):
        lost = {1, 2, 3, 4} if number in fruitless else set[int]()
        rounds.network.spoil = lambda client, at, data, lost=lost: None if at == "unmask" and client in lost else data  # type: ignore[misc]
        assert (rounds.play(number, about(number, weights_hash=same))[0] is None) == (number in fruitless)
    rounds.network.spoil = lambda _client, _phase, data: data
    number = 2 * MOST_QUERIES
    total, events = rounds.play(number, about(number, weights_hash=same))
    assert total is None
    assert len(events) == 5
    assert all(f"asked about {MOST_QUERIES} times" in event for event in events.values())
    assert rounds.play(number + 2)[0] is not None


def test_where_clients_agree_their_signatures_of_the_state_are_collected() -> None:
    rounds, chain = Rounds(5, agreement=True), b"\7" * 32
    rounds.network.spoil = lambda client, phase, data: None if (client, phase) == (4, "agree") else data
    collected = rounds.play_groups(0, about(0, chain=chain))
    assert collected.states.keys() == {0, 1, 2, 3}
    text = state_text(rounds.federation.run, 0, chain)
    assert all(signed(rounds.federation.directory[c], state, text) for c, state in collected.states.items())
    assert not any(signed(rounds.federation.directory[4], state, text) for state in collected.states.values())
    assert not Rounds(5).play_groups(0).states


@pytest.mark.parametrize(
    ("place", "added"),
    [(0, 2**30), (2, 2**31), (LENGTH, -(2**20)), (LENGTH + 1, 1), (LENGTH + 2, -LENGTH), (LENGTH + 3, 2**31)],
)
def test_a_vector_out_of_bounds_ends_the_round_only(place: int, added: int) -> None:
    """Masks hide who sent it, but the sum shows that one client did."""
    rounds = Rounds(5)

    def spoil(client: int, phase: str, data: bytes) -> bytes:
        if client != 3 or phase != "vector":
            return data
        vector = decode(data, Contribution).elements().copy()
        vector[place] = (int(vector[place]) + added) % 2**32
        return encode(Contribution(0, vector.tobytes()))

    rounds.network.spoil = spoil
    total, events = rounds.play(0)
    assert total is None
    assert len(events) > 1
    assert all("abandoned" in event for event in events.values())
    rounds.network.spoil = lambda _client, _phase, data: data
    rounds.play(1)
    assert rounds.play(2)[0] is not None


def test_silence_and_refusals_are_counted_by_phase() -> None:
    rounds = Rounds(12, agreement=True)
    away = {"keys": 0, "vector": 1}
    rounds.network.deaf = lambda client, phase: away.get(phase) == client
    rounds.network.spoil = lambda client, phase, data: b"?" if (client, phase) == (2, "agree") else data
    collected = rounds.play_groups(0)
    assert collected.silent["vector"] == 1
    assert collected.silent["keys"] >= 1
    assert collected.silent.keys() == {"keys", "vector"}
    assert [client for client, _ in collected.refusals] == [2]
