"""Rounds of a secure sum over a network: two exchanges each, whichever clients come, go, restart or send nonsense."""

import secrets
from collections.abc import Iterator

import numpy as np
import pytest
from msgspec import msgpack
from msgspec.structs import replace

from baffle.aggregation.candid import CandidSum
from baffle.aggregation.client.refusals import MOST_QUERIES
from baffle.aggregation.context import sign, signed, state_text
from baffle.aggregation.messages import NO_SHARE, Advertisement, Turned, Unmasked
from baffle.aggregation.shares import SHARE_BYTES
from baffle.core.messages import Abstention, Contribution, decode, encode
from baffle.core.ring import add
from baffle.errors import RefusalError
from tests.support.federation import LENGTH, about, random_vector
from tests.support.rounds import Rounds

GARBAGE = [
    b"",
    b"\xc1",
    b"\x90",
    bytes(1000),
    b"\x91" * 100_000,
    encode(Abstention(0)),
    encode(Contribution(0, b"123")),
    encode(Contribution(0, bytes(4))),
    encode(Contribution(99, bytes(4 * LENGTH))),
    encode(Turned(None, None)),
    encode(Turned(Unmasked(0, b"", bytes(SHARE_BYTES)), None)),
    encode(Turned(Unmasked(0, NO_SHARE * 3, NO_SHARE), None)),
    encode(about(0)),
]


@pytest.fixture(autouse=True, scope="module")
def _few_keys() -> Iterator[None]:
    """Lists of keys for few slots are quicker to make."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("baffle.aggregation.client.session.KEYS_AT_ONCE", 8)
        yield


def phases(rounds: Rounds) -> list[set[str]]:
    return [set(exchange.values()) for exchange in rounds.exchanges]


def test_a_steady_round_takes_two_exchanges() -> None:
    rounds = Rounds(5)
    rounds.play(0)
    assert phases(rounds) == [{"hello"}, {"seal"}, {"vector"}, {"unmask"}]
    for number in range(1, 6):
        total, events = rounds.play(number)
        assert total is not None
        assert total.contributors == 5
        assert total.weight == 15
        assert set(events.values()) == {"contributed"}
        assert phases(rounds) == [{"vector"}, {"unmask"}]


def test_key_lists_are_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baffle.aggregation.client.session.KEYS_AT_ONCE", 3)
    rounds = Rounds(3)
    hellos = []
    for number in range(8):
        total, _ = rounds.play(number)
        assert total is not None
        assert total.contributors == 3
        hellos.append(sum("hello" in phase for phase in phases(rounds)))
    assert hellos == [1, 0, 1, 0, 0, 1, 0, 0]


def test_the_last_round_opens_no_other() -> None:
    rounds = Rounds(3)
    rounds.participants = lambda number: range(3) if number < 2 else ()
    assert rounds.play(0)[0] is not None
    assert rounds.play(1)[0] is not None
    assert len(rounds.exchanges) == 2


def test_rounds_of_changing_clients() -> None:
    participants = [(0, 1, 2), (3, 4, 5), (0, 3, 4, 5), (1, 2, 3), (0, 1, 2, 3, 4, 5), (0, 5, 2)]
    rounds = Rounds(6, participants=lambda number: participants[number % 6])
    for number in range(12):
        total, events = rounds.play(number)
        assert total is not None, events
        assert total.contributors == len(participants[number % 6])


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


@pytest.mark.parametrize("phase", ["vector", "unmask"])
def test_a_round_goes_on_without_a_client_that_drops(phase: str) -> None:
    rounds = Rounds(5)
    for number in range(6):
        rounds.network.deaf = lambda client, at, number=number: client == number % 5 and at == phase  # type: ignore[misc]
        total, events = rounds.play(number)
        assert total is not None, events
        if phase == "vector":
            assert events[number % 5] == "missing"
            assert total.contributors == 4


def test_a_client_that_is_always_away_costs_no_round() -> None:
    rounds = Rounds(5)
    rounds.network.deaf = lambda client, _phase: client == 4
    for number in range(4):
        total, events = rounds.play(number)
        assert total is not None, (number, events)
        assert total.contributors == 4
        assert events[4] == "missing"


def test_a_client_that_is_away_for_one_round_comes_back() -> None:
    rounds = Rounds(5)
    counts = []
    for number in range(6):
        rounds.network.deaf = lambda client, _phase, away=number == 2: away and client == 4  # type: ignore[misc]
        total, events = rounds.play(number)
        assert total is not None, (number, events)
        counts.append(total.contributors)
    assert counts[:3] == [5, 5, 4]
    assert counts[-1] == 5


def test_a_client_that_restarts_comes_back() -> None:
    rounds = Rounds(5)
    rounds.play(0)
    rounds.federation.sessions[2] = rounds.federation.new_session(2)
    totals = [rounds.play(number)[0] for number in range(1, 5)]
    assert all(total is not None for total in totals)
    assert [total.contributors for total in totals if total][-2:] == [5, 5]


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


def test_too_small_a_next_round_does_not_cost_this_one() -> None:
    rounds = Rounds(4, participants=lambda number: range(4) if number < 1 else (0,))
    total, events = rounds.play(0)
    assert total is not None, events
    assert rounds.play(1)[0] is None


def test_a_threshold_that_does_not_fit_the_next_round_does_not_cost_this_one() -> None:
    rounds = Rounds(5, participants=lambda number: range(5) if number < 1 else range(3), threshold=4)
    total, events = rounds.play(0)
    assert total is not None, events


def test_a_client_whose_keys_do_not_reach_the_slot_is_left_out() -> None:
    """A signed list that is too short must not keep the other clients from opening the slot."""
    rounds = Rounds(5)
    federation = rounds.federation

    def too_short(client: int, phase: str, data: bytes) -> bytes:
        if client != 4 or phase != "hello":
            return data
        advertisement = decode(data, Advertisement)
        return encode(
            sign(federation.identities[4], federation.run, replace(advertisement, first=0, keys=advertisement.keys[:1]))
        )

    rounds.participants = lambda number: range(5) if number >= 7 else ()
    rounds.network.spoil = too_short
    total, events = rounds.play(7)
    assert total is not None, events
    assert total.contributors == 4


def test_a_client_that_signs_in_anothers_name_is_left_out() -> None:
    rounds = Rounds(5)
    federation = rounds.federation

    def as_another(client: int, phase: str, data: bytes) -> bytes:
        if client != 4 or phase != "hello":
            return data
        return encode(sign(federation.identities[4], federation.run, replace(decode(data, Advertisement), sender=0)))

    rounds.network.spoil = as_another
    total, events = rounds.play(0)
    assert total is not None, events
    assert total.contributors == 4


@pytest.mark.parametrize("part", ["channel", "keys"])
def test_a_client_with_keys_of_low_order_is_left_out(part: str) -> None:
    rounds = Rounds(5)
    federation = rounds.federation

    def low_order(client: int, phase: str, data: bytes) -> bytes:
        if client != 4 or phase != "hello":
            return data
        advertisement = decode(data, Advertisement)
        if part == "channel":
            bad = replace(advertisement, channel=bytes(32))
        else:
            bad = replace(advertisement, keys=(bytes(32), *advertisement.keys[1:]))
        return encode(sign(federation.identities[4], federation.run, bad))

    rounds.network.spoil = low_order
    total, events = rounds.play(0)
    assert total is not None, events
    assert total.contributors == 4


@pytest.mark.parametrize("phase", ["hello", "seal", "vector", "unmask"])
@pytest.mark.parametrize("garbage", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_never_raises_and_never_counts(phase: str, garbage: bytes) -> None:
    rounds = Rounds(4)
    rounds.network.spoil = lambda client, at, data: garbage if client == 1 and at == phase else data
    total, events = rounds.play(0)
    assert total is not None, events
    assert total.contributors == (4 if phase == "unmask" else 3)
    if phase == "vector":
        assert events[1] not in ("contributed", "missing")
    rounds.network.spoil = lambda _client, _phase, data: data
    rounds.play(1)
    rounds.play(2)


@pytest.mark.parametrize("phase", ["hello", "seal", "vector", "unmask"])
def test_garbage_from_all_ends_the_round_only(phase: str) -> None:
    rounds = Rounds(4)
    rounds.network.spoil = lambda _client, at, data: secrets.token_bytes(50) if at == phase else data
    total, events = rounds.play(0)
    assert total is None
    assert "contributed" not in events.values()
    rounds.network.spoil = lambda _client, _phase, data: data
    rounds.play(1)
    total, events = rounds.play(2)
    assert total is not None, events


@pytest.mark.parametrize(
    ("phase", "contributors", "reason"),
    [
        ("hello", 4, "keys of client 0"),
        ("seal", None, "neighbours of client 1 answered"),
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


def test_events_say_how_each_client_ended_the_round() -> None:
    rounds = Rounds(6)

    def spoil(client: int, phase: str, data: bytes) -> bytes | None:
        match client, phase:
            case 0, "vector":
                return encode(Abstention(0))
            case 1, "vector":
                return None
            case _:
                return data

    rounds.network.spoil = spoil
    total, events = rounds.play(0)
    assert total is not None
    assert events == {
        0: "abstained",
        1: "missing",
        **dict.fromkeys(range(2, 6), "contributed"),
    }


PHASE = {"hello": "keys", "seal": "share", "vector": "vector", "agree": "agree", "unmask": "unmask"}


@pytest.mark.parametrize("phase", PHASE)
def test_an_abstention_is_counted_in_every_phase(phase: str) -> None:
    rounds = Rounds(6, agreement=True)
    rounds.network.spoil = lambda client, at, data: encode(Abstention(0)) if (client, at) == (0, phase) else data
    collected = rounds.play_groups(0)
    assert set(collected.refusals) == {(0, "abstained")}
    assert collected.abstained == {PHASE[phase]: len(collected.refusals)}
    assert collected.silent == {}


def test_a_part_of_a_turn_that_a_client_refuses_is_an_abstention() -> None:
    rounds = Rounds(6)

    def without_shares(client: int, phase: str, data: bytes) -> bytes:
        if (client, phase) == (0, "unmask"):
            return encode(replace(decode(data, Turned), unmasked=None))
        return encode(replace(decode(data, Turned), sealed=None)) if (client, phase) == (1, "seal") else data

    rounds.network.spoil = without_shares
    collected = rounds.play_groups(0)
    assert sorted(collected.refusals) == [(0, "abstained"), (1, "abstained"), (1, "abstained")]
    assert collected.abstained == {"share": 2, "unmask": 1}  # client 1 also refuses to open the next round
    assert collected.events == {1: "abstained", **dict.fromkeys((0, 2, 3, 4, 5), "contributed")}


def test_only_a_simulation_knows_why_a_client_abstained() -> None:
    rounds = Rounds(4)
    rounds.play(0)
    requests = [dict.fromkeys(range(4), about(0, weights_hash=b"x" * 32))]
    rounds.network.tell = lambda _client, _why: None
    assert set(rounds.sum.collect(requests, rounds.network).events.values()) == {"abstained"}
    candid = CandidSum(rounds.sum)
    rounds.network.tell = lambda client, why: candid.log_of(client)(why)
    collected = candid.collect(requests, rounds.network)
    assert all(event == "abstained: slot 0 has been used for another request" for event in collected.events.values())
    assert dict(collected.refusals) == collected.events


def test_a_message_of_a_made_up_type_is_quoted_safely() -> None:
    rounds, made_up = Rounds(6), msgpack.encode(["\x1b[2J" + "x" * 100_000])
    rounds.network.spoil = lambda client, phase, data: made_up if (client, phase) == (0, "vector") else data
    ((_, why),) = rounds.play_groups(0).refusals
    assert why.isprintable()
    assert len(why) < 400


def test_an_abandoned_sum_says_why() -> None:
    rounds = Rounds(4)
    rounds.network.deaf = lambda client, phase: phase == "unmask" and client > 0
    total, events = rounds.play(0)
    assert total is None
    assert len(events) > 1
    assert all("abandoned" in event for event in events.values())


@pytest.mark.parametrize("phase", ["hello", "seal"])
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


def test_a_restarted_server_gets_keys_again() -> None:
    rounds = Rounds(4)
    rounds.play(0)
    again = Rounds(4)
    again.federation = again.network.federation = rounds.federation
    again.sum = again.new_server()
    again.play(1)
    total, events = again.play(2)
    assert total is not None, events
    assert total.contributors == 4


# Rounds that fail after shares were released, and are followed by others about the same weights.

SAME = bytes(range(32))


def fail_to_unmask(rounds: Rounds, number: int) -> None:
    """All clients release their shares, and too few of these reach the server."""
    rounds.network.spoil = lambda client, phase, data: None if phase == "unmask" and client else data
    assert rounds.play(number, about(number, weights_hash=SAME))[0] is None
    rounds.network.spoil = lambda _client, _phase, data: data


@pytest.mark.parametrize("agreement", [False, True])
def test_a_round_after_released_shares_goes_on_at_the_same_weights(agreement: bool) -> None:
    rounds = Rounds(5, agreement=agreement)
    fail_to_unmask(rounds, 0)
    assert all(session._memory.released(SAME) == 1 for session in rounds.federation.sessions.values())
    rounds.participants = lambda number: range(5) if number != 1 else ()
    total, events = rounds.play(2, about(2, weights_hash=SAME))
    assert total is not None, events
    assert total.contributors == 5


@pytest.mark.parametrize("fruitless", [True, False])
def test_weights_are_asked_about_three_times_at_most_whatever_became_of_the_sums(fruitless: bool) -> None:
    rounds = Rounds(5, participants=lambda number: range(5) if number % 2 == 0 else ())
    for number in range(0, 2 * MOST_QUERIES, 2):
        if fruitless:
            fail_to_unmask(rounds, number)
        else:
            assert rounds.play(number, about(number, weights_hash=SAME))[0] is not None
    number = 2 * MOST_QUERIES
    total, events = rounds.play(number, about(number, weights_hash=SAME))
    assert total is None
    assert len(events) == 5
    assert all(f"asked about {MOST_QUERIES} times" in event for event in events.values())
    assert rounds.play(number + 2)[0] is not None


@pytest.mark.parametrize("agreement", [False, True])
def test_clients_that_are_told_another_past_give_noise(agreement: bool) -> None:
    rounds = Rounds(5, agreement=agreement)
    requests = {client: about(3, chain=(b"\1" if client == 2 else b"\0") * 32) for client in range(5)}
    collected = rounds.sum.collect([requests], rounds.network)
    assert collected.sums == (None,)
    assert "contributed" not in collected.events.values()


def test_where_clients_agree_their_signatures_of_the_state_are_collected() -> None:
    rounds, chain = Rounds(5, agreement=True), b"\7" * 32
    rounds.network.spoil = lambda client, phase, data: None if (client, phase) == (4, "agree") else data
    collected = rounds.play_groups(0, about(0, chain=chain))
    assert collected.states.keys() == {0, 1, 2, 3}
    text = state_text(rounds.federation.run, 0, chain)
    assert all(signed(rounds.federation.directory[c], state, text) for c, state in collected.states.items())
    assert not any(signed(rounds.federation.directory[4], state, text) for state in collected.states.values())


def test_without_agreement_nothing_is_signed() -> None:
    assert not Rounds(5).play_groups(0).states


# Attacks on the server by single clients.


def require_recovery(rounds: Rounds) -> None:
    """Require that the run goes on once the attack is over."""
    rounds.network.spoil = lambda _client, _phase, data: data
    rounds.play(1)
    total, events = rounds.play(2)
    assert total is not None, events
    assert total.contributors == 5


@pytest.mark.parametrize(
    ("place", "added"),
    [
        (0, 2**30),
        (0, -(2**30)),
        (2, 2**31),
        (LENGTH, 2**20),
        (LENGTH, -(2**20)),
        (LENGTH + 1, 1),
        (LENGTH + 1, -1),
        (LENGTH + 2, 2**20),
        (LENGTH + 2, -LENGTH),
        (LENGTH + 3, 2**31),
    ],
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
    require_recovery(rounds)


def test_a_second_vector_of_one_client_is_refused_and_the_first_counts() -> None:
    federation = Rounds(4).federation
    federation.advertise()
    server, plain = federation.until_masked(about(0))
    with pytest.raises(RefusalError, match="another vector before"):
        server.take_vector(2, random_vector(), LENGTH)
    unmask = server.unmask()
    for client in federation.everybody:
        server.take_unmasked(client, federation.sessions[client].unmask(unmask))
    assert np.array_equal(server.total(), add(list(plain.values())))


def test_silence_and_refusals_are_counted_by_phase() -> None:
    rounds = Rounds(12, agreement=True)
    away = {"hello": 0, "vector": 1}
    rounds.network.deaf = lambda client, phase: away.get(phase) == client
    rounds.network.spoil = lambda client, phase, data: b"?" if (client, phase) == (2, "agree") else data
    collected = rounds.play_groups(0)
    assert collected.silent["vector"] == 1
    assert collected.silent["keys"] >= 1
    assert collected.silent.keys() == {"keys", "vector"}
    assert [client for client, _ in collected.refusals] == [2]
