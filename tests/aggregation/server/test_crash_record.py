"""A server that crashes while it asks for shares asks for the same sum again, and for no other."""

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import pytest
from msgspec.structs import replace

from baffle.aggregation.messages import Turned, Unmask, decode_request, phase_of
from baffle.aggregation.server.crash_record import CrashFile, SlotRecord, decode_record, encode_record, restore_slot
from baffle.core.messages import RoundRequest, decode, encode
from baffle.core.ports import Collected
from baffle.errors import MessageError, RefusalError, RunFolderError
from tests.support.federation import about, weights_after
from tests.support.lies import made_up, with_other_shares
from tests.support.memory import at_most
from tests.support.rounds import MemoryStore, Rounds

pytestmark = pytest.mark.usefixtures("few_keys")

N = 8
GROUPS = [[0, 2, 5, 7], [1, 3, 4, 6]]
SETTINGS: dict[str, dict[str, object]] = {
    "one sum": {},
    "agreement": {"agreement": True},
    "groups": {"groups": lambda _: GROUPS},
    "groups agreement": {"groups": lambda _: GROUPS, "agreement": True},
}


class CrashError(Exception):
    """The server has crashed."""


def rounds_of(name: str) -> Rounds:
    return Rounds(N, crash_store=MemoryStore(), **SETTINGS[name])  # type: ignore[arg-type]


@dataclass
class Crashing:
    """A network whose server crashes in a given phase, after the given number of clients have answered."""

    rounds: Rounds
    phase: str
    answered: int

    def exchange(self, requests: Mapping[int, bytes]) -> Mapping[int, bytes]:
        if self.phase in {phase_of(decode_request(data)) for data in requests.values()}:
            self.rounds.network.exchange(dict(list(requests.items())[: self.answered]))
            raise CrashError
        return self.rounds.network.exchange(requests)


def crash(rounds: Rounds, number: int, phase: str, answered: int) -> None:
    asked = [dict.fromkeys(group, about(number)) for group in rounds.groups(number)]
    with pytest.raises(CrashError):
        rounds.sum.collect(asked, Crashing(rounds, phase, answered))
    rounds.sum = rounds.new_server()


def _recorded(rounds: Rounds) -> tuple[MemoryStore, bytes, SlotRecord]:
    assert rounds.crash_store is not None
    assert rounds.crash_store.data is not None
    (slot,) = decode_record(rounds.crash_store.data).slots
    assert slot is not None
    return rounds.crash_store, rounds.crash_store.data, slot


def contributed(collected: Collected) -> list[int]:
    return [client for client, event in collected.events.items() if event == "contributed"]


@pytest.mark.parametrize(
    ("name", "phase"), [*((name, "unmask") for name in SETTINGS), ("agreement", "agree"), ("groups agreement", "agree")]
)
@pytest.mark.parametrize(("answered", "at"), [(0, 0), (3, 2), (N, 0)])
def test_after_a_crash_the_same_sum_comes_out(name: str, phase: str, answered: int, at: int) -> None:
    """`play_groups` compares each sum with the plain sum over the clients that contributed."""
    rounds = rounds_of(name)
    for number in range(at):
        rounds.play_groups(number)
    rounds.network.deaf = lambda client, phase: client == 5 and phase == "vector"
    crash(rounds, at, phase, answered)
    rounds.network.deaf = lambda _client, _phase: False
    collected = rounds.play_groups(at)
    assert contributed(collected) == [c for g in rounds.groups(at) for c in g if c != 5]
    assert "vector" not in {phase for exchange in rounds.exchanges for phase in exchange.values()}
    rounds.play_groups(at + 1)
    assert None not in rounds.play_groups(at + 2).sums


@pytest.mark.parametrize("name", SETTINGS)
def test_however_often_a_server_crashes_clients_resend_the_same_bytes(name: str) -> None:
    rounds = rounds_of(name)
    said: dict[int, set[bytes]] = {client: set() for client in range(N)}

    def listen(client: int, phase: str, data: bytes) -> bytes:
        unmasked = decode(data, Turned).unmasked if phase == "unmask" else None
        if unmasked:
            said[client].add(encode(unmasked))
        return data

    rounds.network.spoil = listen
    for answered in (0, 2, N):
        crash(rounds, 0, "unmask", answered)
    assert len(contributed(rounds.play_groups(0))) == N
    assert [len(sent) for sent in said.values()] == [1] * N


def test_a_crash_before_anything_was_recorded_costs_the_round_only() -> None:
    rounds = rounds_of("one sum")
    rounds.play(0)
    crash(rounds, 1, "vector", N)
    assert decode_record(_recorded(rounds)[1]).round == 0
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
    whole_round = {"keys", "share", "vector", "unmask"}
    assert phases_asked == (whole_round if request.round == 2 else {"keys"})
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
    store, data, slot = _recorded(rounds)
    fewer = replace(slot, senders=slot.senders[:-1], vectors=slot.vectors[: -len(slot.vectors) // N])
    store.write(encode_record(replace(decode_record(data), slots=(fewer,))))
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


def _collect_again(rounds: Rounds) -> Collected:
    rounds.sum = rounds.new_server()
    return rounds.sum.collect([dict.fromkeys(range(N), about(0))], rounds.network)


def test_a_record_that_was_cut_off_or_changed_costs_the_round_only() -> None:
    rounds = rounds_of("one sum")
    crash(rounds, 0, "unmask", 0)
    store, data, _ = _recorded(rounds)
    for spoilt in (b"", data[:50], data[:-1], data[:-1] + bytes([data[-1] ^ 1])):
        store.data = spoilt
        with pytest.raises(MessageError, match="damaged"):
            decode_record(store.data)
        assert _collect_again(rounds).sums == (None,)
    store.data = data
    assert _collect_again(rounds).sums[0] is not None


STRANGER = 1 << 21


def test_a_record_that_does_not_fit_its_slot_is_not_used() -> None:
    """Its hash is right, so its writer meant it."""
    rounds = rounds_of("one sum")
    crash(rounds, 0, "unmask", 0)
    store, data, slot = _recorded(rounds)
    whole, opening = decode_record(data), slot.opening
    members, vectors = "not members of its slot, or lacks some", "bytes of vectors for"
    misfits = [
        (replace(slot, participants=(*slot.participants[:-1], STRANGER)), members),
        (replace(slot, senders=(*slot.senders[:-1], STRANGER)), members),
        (replace(slot, opening=replace(opening, advertisements=opening.advertisements[1:])), members),
        (replace(slot, opening=replace(opening, members=(*range(N), N))), members),
        (replace(slot, senders=()), vectors),
        *((replace(slot, vectors=slot.vectors[:-lacking]), vectors) for lacking in (1, 3, 4)),
        (replace(slot, commitments=slot.commitments[:-32]), "bytes of commitments"),
        (replace(slot, digests=slot.digests[:-1]), "digests of other shares"),
        (replace(slot, digests=(slot.digests[0][:-1], *slot.digests[1:])), "digests of other shares"),
        (replace(slot, opening=replace(opening, threshold=1)), "a threshold of 1"),
        (replace(slot, opening=replace(opening, advertisements=(b"", *opening.advertisements[1:]))), "Advertisement"),
    ]
    for misfit, why in misfits:
        with pytest.raises(MessageError, match=why):
            restore_slot(rounds.federation.run, misfit, rounds.policy)
        store.data = encode_record(replace(whole, slots=(misfit,)))
        assert _collect_again(rounds).sums[0] is None
    store.data = data
    assert _collect_again(rounds).sums[0] is not None


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


def test_a_hostile_record_is_refused() -> None:
    for data in (b"short", sha256(b"\xdd\xff\xff\xff\xff").digest() + b"\xdd\xff\xff\xff\xff"):
        with at_most(1 << 20), pytest.raises(MessageError):
            decode_record(data)
