"""A server that crashes while it asks for shares asks for the same sum again, and for no other."""

import os
import stat
from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from baffle.aggregation.messages import Advertisement, Turned, Unmask, decode_request
from baffle.aggregation.server.crash_record import CrashFile, SlotRecord, decode_record, encode_record, restore_slot
from baffle.core.messages import RoundRequest, decode, encode
from baffle.core.ports import Collected
from baffle.core.ring import add
from baffle.errors import MessageError, RefusalError, RunFolderError
from tests.support.federation import about, weights_after
from tests.support.lies import made_up, with_other_shares
from tests.support.memory import at_most
from tests.support.rounds import MemoryStore, Rounds, phase_of

N = 8
GROUPS = [[0, 2, 5, 7], [1, 3, 4, 6]]
SETTINGS: dict[str, dict[str, object]] = {
    "one sum": {},
    "agreement": {"agreement": True},
    "groups": {"groups": lambda _: GROUPS},
    "groups agreement": {"groups": lambda _: GROUPS, "agreement": True},
}


@pytest.fixture(autouse=True, scope="module")
def _few_keys() -> Iterator[None]:
    """Lists of keys for few slots are quicker to make."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("baffle.aggregation.client.session.KEYS_AT_ONCE", 8)
        yield


class CrashError(Exception):
    """The server has crashed."""


def rounds_of(name: str) -> Rounds:
    return Rounds(N, crash_store=MemoryStore(), **SETTINGS[name])  # type: ignore[arg-type]


class Crashing:
    """A network whose server crashes in a given phase, after the given number of clients have answered."""

    def __init__(self, rounds: Rounds, phase: str, answered: int) -> None:
        self.rounds = rounds
        self.phase = phase
        self.answered = answered

    def exchange(self, requests: Mapping[int, bytes]) -> Mapping[int, bytes]:
        asked = list(requests.items())
        network = self.rounds.network
        if self.phase in phases(requests):
            network.exchange(dict(asked[: self.answered]))
            raise CrashError
        return network.exchange(requests)


def phases(requests: Mapping[int, bytes]) -> set[str]:
    return {phase_of(decode_request(data)) for data in requests.values()}


def crash(rounds: Rounds, number: int, phase: str, answered: int) -> None:
    asked = [dict.fromkeys(group, about(number)) for group in rounds.groups(number)]
    with pytest.raises(CrashError):
        rounds.sum.collect(asked, Crashing(rounds, phase, answered))
    rounds.sum = rounds.new_server()


def contributed(collected: Collected) -> list[int]:
    return [client for client, event in collected.events.items() if event == "contributed"]


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("answered", [0, 3, N])
@pytest.mark.parametrize("at", [0, 2])
def test_after_a_crash_the_same_sum_comes_out(name: str, answered: int, at: int) -> None:
    """`play_groups` compares each sum with the plain sum over the clients that contributed."""
    rounds = rounds_of(name)
    for number in range(at):
        rounds.play_groups(number)
    rounds.network.deaf = lambda client, phase: client == 5 and phase == "vector"
    crash(rounds, at, "unmask", answered)
    rounds.network.deaf = lambda _client, _phase: False
    collected = rounds.play_groups(at)
    assert contributed(collected) == [c for g in rounds.groups(at) for c in g if c != 5]
    assert "vector" not in {phase for exchange in rounds.exchanges for phase in exchange.values()}
    rounds.play_groups(at + 1)
    assert None not in rounds.play_groups(at + 2).sums


@pytest.mark.parametrize("name", ["agreement", "groups agreement"])
@pytest.mark.parametrize("answered", [0, 3, N])
def test_after_a_crash_while_clients_agree_the_same_sum_comes_out(name: str, answered: int) -> None:
    rounds = rounds_of(name)
    crash(rounds, 0, "agree", answered)
    assert contributed(rounds.play_groups(0)) == [c for g in rounds.groups(0) for c in g]


@pytest.mark.parametrize("name", SETTINGS)
def test_a_server_may_crash_again_and_again(name: str) -> None:
    rounds = rounds_of(name)
    for answered in (0, 2, 5, N):
        crash(rounds, 0, "unmask", answered)
    assert len(contributed(rounds.play_groups(0))) == N


@pytest.mark.parametrize("name", SETTINGS)
def test_clients_resend_the_same_bytes(name: str) -> None:
    rounds = rounds_of(name)
    said: list[dict[int, object]] = []

    def listen(client: int, phase: str, data: bytes) -> bytes:
        if phase == "unmask":
            said[-1][client] = decode(data, Turned).unmasked
        return data

    rounds.network.spoil = listen
    said.append({})
    crash(rounds, 0, "unmask", N)
    said.append({})
    rounds.play_groups(0)
    assert said[0] == said[1]
    assert len(said[0]) == N


def test_a_crash_before_anything_was_recorded_costs_the_round_only() -> None:
    rounds = rounds_of("one sum")
    rounds.play(0)
    crash(rounds, 1, "vector", N)
    assert rounds.crash_store is not None
    assert rounds.crash_store.data is not None
    assert decode_record(rounds.crash_store.data).round == 0
    assert rounds.play(1)[0] is None
    assert rounds.play(2)[0] is not None


OTHER_REQUESTS: dict[str, tuple[RoundRequest, list[list[int]]]] = {
    "another round": (about(2, weights_hash=weights_after(1)), [list(range(N))]),
    "other weights": (about(1, weights_hash=bytes(32)), [list(range(N))]),
    "other groups": (about(1), GROUPS),
}


@pytest.mark.parametrize("name", OTHER_REQUESTS)
def test_a_record_serves_only_its_own_round_weights_and_groups(name: str) -> None:
    """Each request differs from the record in one thing only. A server that used the record all the same would ask for
    shares without asking for vectors. It must begin anew: round 2 then has a sum, and for round 1 clients give no keys,
    because they have used slot 1."""
    rounds = rounds_of("one sum")
    rounds.play(0)
    crash(rounds, 1, "unmask", 0)
    request, groups = OTHER_REQUESTS[name]
    rounds.network.exchanges.clear()
    collected = rounds.sum.collect([dict.fromkeys(group, request) for group in groups], rounds.network)
    phases_asked = {phase for exchange in rounds.network.exchanges for phase in exchange.values()}
    whole_round = {"hello", "seal", "vector", "unmask"}
    assert phases_asked == (whole_round if request.round == 2 else {"hello"})
    assert all((total is not None) == (request.round == 2) for total in collected.sums)


def test_the_record_says_which_group_was_abandoned() -> None:
    rounds = rounds_of("groups")
    rounds.network.deaf = lambda client, phase: client in (1, 3) and phase == "vector"
    crash(rounds, 0, "unmask", 2)
    rounds.network.deaf = lambda _client, _phase: False
    collected = rounds.play_groups(0)
    assert collected.sums[0] is not None
    assert collected.sums[1] is None
    assert sorted(contributed(collected)) == GROUPS[0]


@pytest.mark.parametrize("name", ["one sum", "agreement"])
def test_a_server_that_names_other_survivors_after_a_crash_is_refused(name: str) -> None:
    """It drops one vector to get the sum without it as well: the difference would be that vector."""
    rounds = rounds_of(name)
    crash(rounds, 0, "unmask", N)
    assert rounds.crash_store is not None
    assert rounds.crash_store.data is not None
    record = decode_record(rounds.crash_store.data)
    (slot,) = record.slots
    assert slot is not None
    fewer = replace(slot, senders=slot.senders[:-1], vectors=slot.vectors[: -len(slot.vectors) // N])
    rounds.crash_store.write(encode_record(replace(record, slots=(fewer,))))
    collected = rounds.sum.collect([dict.fromkeys(range(N), about(0))], rounds.network)
    assert collected.sums == (None,)
    assert sum(why == "abstained" for _, why in collected.refusals) >= N - 1
    for client in range(N - 1):
        with pytest.raises(RefusalError, match="other survivors"):
            rounds.federation.sessions[client].unmask(Unmask(0, tuple(range(N - 1)), (N - 1,)))


@pytest.mark.parametrize("name", SETTINGS)
def test_lies_are_told_from_truth_after_a_crash_too(name: str) -> None:
    """Commitments and digests outlive the server: client 2 drops, and client 7 releases a wrong share of its key."""
    rounds = rounds_of(name)
    rounds.network.deaf = lambda client, phase: client == 2 and phase == "vector"
    crash(rounds, 0, "unmask", 3)
    rounds.network.spoil = lambda client, phase, data: (
        with_other_shares(rounds.federation.sessions[7], data, {2: made_up})
        if (client, phase) == (7, "unmask")
        else data
    )
    collected = rounds.play_groups(0)
    assert [client for client, why in collected.refusals if "had not dealt" in why] == [7]
    whole = name in ("one sum", "agreement")  # in a group of four, three shares are needed, and three answer
    assert (collected.sums[0] is not None) == whole
    rounds.network.spoil = lambda _client, _phase, data: data
    assert (
        rounds.play_groups(1).events[7] == "left out: in round 0 it released a share that client 2 had not dealt to it"
    )


def _recorded(rounds: Rounds) -> tuple[MemoryStore, bytes, SlotRecord]:
    assert rounds.crash_store is not None
    assert rounds.crash_store.data is not None
    (slot,) = decode_record(rounds.crash_store.data).slots
    assert slot is not None
    return rounds.crash_store, rounds.crash_store.data, slot


STRANGER = 1 << 21


@pytest.mark.parametrize("lacking", [1, 3, 4])
def test_a_record_whose_vectors_are_not_whole_is_not_used(lacking: int) -> None:
    rounds = rounds_of("one sum")
    crash(rounds, 0, "unmask", 0)
    _, _, slot = _recorded(rounds)
    with pytest.raises(MessageError, match="bytes of vectors for"):
        restore_slot(rounds.federation.run, replace(slot, vectors=slot.vectors[:-lacking]), rounds.policy)


@pytest.mark.parametrize("what", ["participants", "senders", "advertisements"])
def test_a_record_with_other_clients_than_its_slot_has_is_not_used(what: str) -> None:
    """Its hash is right, so whoever wrote it meant it."""
    rounds = rounds_of("one sum")
    crash(rounds, 0, "unmask", 0)
    store, data, slot = _recorded(rounds)
    changes: dict[str, SlotRecord] = {
        "participants": replace(slot, participants=(*slot.participants[:-1], STRANGER)),
        "senders": replace(slot, senders=(*slot.senders[:-1], STRANGER)),
        "advertisements": replace(slot, opening=replace(slot.opening, advertisements=slot.opening.advertisements[1:])),
    }
    store.write(encode_record(replace(decode_record(data), slots=(changes[what],))))
    with pytest.raises(MessageError, match="not members of its slot, or lacks some"):
        restore_slot(rounds.federation.run, changes[what], rounds.policy)
    assert rounds.sum.collect([dict.fromkeys(range(N), about(0))], rounds.network).sums == (None,)


def test_what_is_restored_is_what_was_recorded() -> None:
    rounds = rounds_of("one sum")
    rounds.network.deaf = lambda client, phase: client == 3 and phase == "vector"
    crash(rounds, 0, "unmask", 0)
    _, _, record = _recorded(rounds)
    slot = restore_slot(rounds.federation.run, record, rounds.policy)
    assert (slot.participants, slot.context, slot.alive) == (record.participants, record.context, record.senders)
    assert slot.alive == (0, 1, 2, 4, 5, 6, 7)
    assert slot.survivors().dropped == (3,)
    assert slot.advertisements.keys() == set(range(N))
    assert slot.commitments.keys() == slot.digests.keys() == set(range(N))
    unmask = slot.unmask()
    for client in slot.alive:
        slot.take_unmasked(client, rounds.federation.sessions[client].unmask(unmask))
    assert np.array_equal(slot.total(), add([rounds.network.plain[0, client] for client in slot.alive]))


def _collect_again(rounds: Rounds) -> Collected:
    rounds.sum = rounds.new_server()
    return rounds.sum.collect([dict.fromkeys(range(N), about(0))], rounds.network)


@pytest.mark.parametrize("cut", [0, 1, 2, 50, -1])
def test_a_record_that_was_cut_off_costs_the_round_only(cut: int) -> None:
    rounds = rounds_of("one sum")
    crash(rounds, 0, "unmask", 0)
    store, data, _ = _recorded(rounds)
    store.data = data[:cut]
    with pytest.raises(MessageError, match="damaged"):
        decode_record(store.data)
    assert _collect_again(rounds).sums == (None,)
    store.data = data
    assert _collect_again(rounds).sums[0] is not None


def test_a_record_with_lists_that_do_not_fit_is_refused() -> None:
    rounds = rounds_of("one sum")
    crash(rounds, 0, "unmask", 0)
    store, data, slot = _recorded(rounds)
    whole = decode_record(data)
    for spoilt in (
        replace(slot, senders=()),
        replace(slot, vectors=slot.vectors[:-4]),
        replace(slot, commitments=slot.commitments[:-32]),
        replace(slot, digests=slot.digests[:-1]),
        replace(slot, digests=(slot.digests[0][:-1], *slot.digests[1:])),
        replace(slot, opening=replace(slot.opening, threshold=1)),
        replace(slot, opening=replace(slot.opening, members=(*range(N), N))),
        replace(slot, opening=replace(slot.opening, advertisements=(b"", *slot.opening.advertisements[1:]))),
    ):
        store.data = encode_record(replace(whole, slots=(spoilt,)))
        assert _collect_again(rounds).sums[0] is None
    store.data = data
    assert _collect_again(rounds).sums[0] is not None


def _flipped(data: bytes, bit: int) -> bytes:
    place = bit // 8
    return data[:place] + bytes([data[place] ^ 1 << bit % 8]) + data[place + 1 :]


def _wrong_bit_in_a_vector(slot: SlotRecord) -> SlotRecord:
    return replace(slot, vectors=_flipped(slot.vectors, 3))


def _wrong_bit_in_the_context(slot: SlotRecord) -> SlotRecord:
    return replace(slot, context=_flipped(slot.context, 3))


def _a_dropped_client_forgotten(slot: SlotRecord) -> SlotRecord:
    return replace(slot, participants=slot.senders)


def _senders_in_another_order(slot: SlotRecord) -> SlotRecord:
    return replace(slot, senders=slot.senders[::-1])


def _a_stranger_among_the_participants(slot: SlotRecord) -> SlotRecord:
    return replace(slot, participants=(*slot.participants, 99))


def _another_first_slot(slot: SlotRecord) -> SlotRecord:
    lists = [decode(data, Advertisement) for data in slot.opening.advertisements]
    lists[3] = replace(lists[3], first=10**6)
    return replace(slot, opening=replace(slot.opening, advertisements=tuple(map(encode, lists))))


def _short_vectors(slot: SlotRecord) -> SlotRecord:
    return replace(slot, vectors=slot.vectors[: -4 * len(slot.senders)])


SPOILT = [
    _wrong_bit_in_a_vector,
    _wrong_bit_in_the_context,
    _a_dropped_client_forgotten,
    _senders_in_another_order,
    _a_stranger_among_the_participants,
    _another_first_slot,
    _short_vectors,
]


@pytest.mark.parametrize("spoil", SPOILT)
def test_a_spoilt_record_gives_an_error_or_no_sum_but_no_wrong_one(spoil: Callable[[SlotRecord], SlotRecord]) -> None:
    rounds = rounds_of("one sum")
    rounds.network.deaf = lambda client, phase: client == 3 and phase == "vector"
    crash(rounds, 0, "unmask", 0)
    rounds.network.deaf = lambda _client, _phase: False
    store, data, slot = _recorded(rounds)
    store.data = data[:32] + encode_record(replace(decode_record(data), slots=(spoil(slot),)))[32:]
    try:
        total = _collect_again(rounds).sums[0]
    except MessageError:
        return
    if total is not None:
        right = add([rounds.network.plain[0, client] for client in slot.senders])
        rounds.require_same(total, rounds.ring.decode(right, len(slot.senders)))


def test_a_record_is_its_owners_alone_and_is_not_read_if_it_never_ends(tmp_path: Path) -> None:
    file = CrashFile(tmp_path / "kept")
    assert file.read() is None
    before = os.umask(0)
    file.write(b"vectors")
    os.umask(before)
    assert file.read() == b"vectors"
    assert stat.S_IMODE((tmp_path / "kept").stat().st_mode) == 0o600
    os.truncate(tmp_path / "kept", 1 << 40)
    with at_most(1 << 20), pytest.raises(RunFolderError, match="kept cannot be read: it is longer than"):
        file.read()


@pytest.mark.parametrize(
    "data", [b"", b"short", b"\x93" * 100, sha256(b"\xdd\xff\xff\xff\xff").digest() + b"\xdd\xff\xff\xff\xff"]
)
def test_a_hostile_record_is_refused(data: bytes) -> None:
    with at_most(1 << 20), pytest.raises(MessageError):
        decode_record(data)
