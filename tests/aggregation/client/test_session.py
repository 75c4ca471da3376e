"""Both sides of a slot, driven by hand: sums come out exactly or not at all, and real attacks fail."""

from collections.abc import Callable

import numpy as np
import pytest
from msgspec.structs import replace

from baffle.aggregation.client.marks import Line, Marked, Marks, Memory
from baffle.aggregation.client_policy import ClientPolicy
from baffle.aggregation.context import round_context, signed, state_text
from baffle.aggregation.masks import agree, pair_mask, self_mask
from baffle.aggregation.messages import NO_SHARE, Turn, Turned, Unmask
from baffle.aggregation.shares import combine, weights
from baffle.core.ring import RingVector, add
from baffle.errors import AbortError, MessageError, RefusalError
from tests.support.federation import (
    LENGTH,
    Federation,
    about,
    asked_of,
    never,
    new_federation,
    unmasked_by,
)

COUNTS = [(3, 3, 3), (4, 3, 3), (6, 3, 3), (4, 4, 3), (6, 5, 3), (4, 4, 4), (6, 5, 4), (6, 6, 6)]


def test_pair_masks_alone_do_not_open_a_vector() -> None:
    """With all of a client's keys its self mask is left, and with its self mask the pairwise masks are left."""
    federation = new_federation(3)
    server = federation.sealed()
    asked = asked_of(server)
    plain = federation.masked(server, asked, federation.everybody)
    context = round_context(asked[0].keys, server.slot.opening, about(0), federation.everybody)
    private = federation.sessions[0]._open[0].private
    pairs = [pair_mask(agree(private, federation.advertised[p].keys[0]), context, LENGTH, plus=False) for p in (1, 2)]
    left = add([server.vectors[0], *pairs, np.negative(plain[0])])
    assert left.any()
    unmasked_by(federation, server, federation.everybody)
    seed = combine(weights([1, 2]), [server.released[0][0], server.released[1][0]])
    assert np.array_equal(left, self_mask(seed, context, LENGTH))
    assert all(pair.any() for pair in pairs)


def test_sparse_graphs_give_the_sum_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baffle.aggregation.client_policy.COMPLETE_UP_TO", 10)
    monkeypatch.setattr("baffle.aggregation.client_policy.degree", lambda _n, _dropout: 8)
    federation = new_federation(24)
    server, plain = federation.until_masked(about(0), sending=[c for c in federation.everybody if c % 8])
    unmasked_by(federation, server, tuple(c for c in federation.everybody if c % 8 and c != 5))
    assert np.array_equal(server.total(), add(list(plain.values())))


@pytest.mark.parametrize(("sealing", "sending", "answering"), COUNTS)
def test_dropouts_end_in_the_sum_or_in_an_abort(sealing: int, sending: int, answering: int) -> None:
    """With 6 members, 4 holders of each secret are needed, so at least 4 must seal, send and answer."""
    federation = new_federation(6)
    order = np.random.default_rng([sealing, sending, answering]).permutation(6).tolist()
    server = federation.sealed(sealing=sorted(order[:sealing]))
    requests = asked_of(server)
    if sealing < 4:
        for client, request in requests.items():
            with pytest.raises(RefusalError):
                federation.sessions[client].mask(request, never)
        return
    plain = federation.masked(server, requests, sorted(order[:sending]))
    if sending < 4:
        with pytest.raises(AbortError):
            server.unmask()
        return
    unmasked_by(federation, server, tuple(sorted(order[:answering])))
    if answering < 4:
        with pytest.raises(AbortError):
            server.total()
    else:
        assert np.array_equal(server.total(), add(list(plain.values())))


def test_boxes_of_another_slot_or_sender_do_not_open() -> None:
    federation = new_federation(3)
    before = asked_of(federation.sealed(0))
    server = federation.sealed(1)
    requests = asked_of(server)
    requests[0] = replace(requests[0], boxes=before[0].boxes)
    requests[1] = replace(requests[1], boxes=requests[2].boxes)
    federation.masked(server, requests, federation.everybody)
    unmasked_by(federation, server, federation.everybody)
    assert server.released[0][1] == server.released[0][2] == NO_SHARE
    assert server.released[1][0] == server.released[1][2] == NO_SHARE
    assert NO_SHARE not in server.released[2].values()


def test_a_slot_is_used_up_even_if_its_vector_could_not_be_computed() -> None:
    """A server that could ask again after a failure would learn from failures."""
    federation = new_federation(3)
    server = federation.sealed()
    request, session = asked_of(server)[0], federation.sessions[0]

    def fails() -> RingVector:
        assert session.marks.slot == 0
        raise MessageError("not finite")

    with pytest.raises(MessageError, match="not finite"):
        session.mask(request, fails)
    for again in (request, server.requests(dict.fromkeys(federation.everybody, about(0, weights_hash=bytes(32))))[0]):
        with pytest.raises(RefusalError, match="slot 0 is not after slot 0"):
            session.mask(again, never)
    federation.whole(about(1))


class Diary(Memory):
    """Records lines as they become durable, on a disk that can be full."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[Line] = []
        self.full = False

    def _write(self, line: Line) -> None:
        if self.full:
            raise OSError("disk full")
        self.written.append(line)


@pytest.mark.parametrize("agreement", [False, True])
def test_marks_are_durable_before_what_they_guard_happens(agreement: bool) -> None:
    federation, diary = Federation(3, policy=ClientPolicy(agreement=agreement)), Diary()
    session = federation.sessions[0] = federation.new_session(0, diary)
    federation.advertise()
    run, about_these = federation.run.hex(), about(0).weights_hash.hex()

    def fails_on_a_full_disk(ask: Callable[[], object]) -> None:
        diary.full = True
        with pytest.raises(OSError, match="full"):
            ask()
        diary.full = False

    fails_on_a_full_disk(lambda: session.seal(federation.opening(0, 0)))
    server = federation.sealed()
    requests = asked_of(server)
    assert diary.written == [Marked(run, Marks(sealed=0))]
    fails_on_a_full_disk(lambda: session.mask(requests[0], never))
    federation.masked(server, requests, federation.everybody)
    expected = [Marked(run, Marks(sealed=0, slot=0))]
    assert diary.written[1:] == expected
    survivors = server.survivors()
    if agreement:
        fails_on_a_full_disk(lambda: session.agree(survivors))
        for client in federation.everybody:
            server.take_agreed(client, federation.sessions[client].agree(survivors), federation.directory[client])
        expected.append(Marked(run, Marks(sealed=0, slot=0, agreed=0, signed=0)))
        assert diary.written[1:] == expected
    fails_on_a_full_disk(lambda: session.unmask(server.unmask()))
    session.unmask(server.unmask())
    expected.append(Marked(run, replace(expected[-1].marks, round=0), about_these))
    assert diary.written[1:] == expected
    session.mask(requests[0], never)
    session.unmask(server.unmask())
    assert diary.written[1:] == expected


def test_the_state_before_a_round_is_signed_once() -> None:
    """Two slots about one round would otherwise give two signatures, about two pasts."""
    federation = Federation(3, policy=ClientPolicy(agreement=True))
    memory = Memory()
    federation.sessions[0] = federation.new_session(0, memory)
    federation.advertise()
    server, _ = federation.until_masked(about(0, chain=b"1" * 32))
    agreed = federation.sessions[0].agree(server.survivors())
    assert signed(federation.directory[0], agreed.state, state_text(federation.run, 0, b"1" * 32))
    assert not signed(federation.directory[0], agreed.state, state_text(federation.run, 0, b"2" * 32))
    federation.advertise(1)
    server, _ = federation.until_masked(about(1))
    memory.remember(federation.run, replace(memory.marks(federation.run), signed=1))
    with pytest.raises(RefusalError, match="the state before round 1 was signed before"):
        federation.sessions[0].agree(server.survivors())
    assert memory.marks(federation.run).agreed == 0


def test_a_turn_does_both_parts_or_tells_why_not() -> None:
    federation, told = new_federation(3), list[str]()
    session = federation.sessions[0]
    server, _ = federation.until_masked(about(0))
    turned = session.turn(Turn(server.unmask(), federation.opening(1, 0, threshold=1)), told.append)
    assert turned.unmasked == session.unmask(server.unmask())
    assert turned.sealed is None
    assert told.pop().startswith("abstained: a threshold of 1")
    turned = session.turn(Turn(Unmask(0, (0, 1), (2,)), federation.opening(1, 0)), told.append)
    assert turned.unmasked is None
    assert turned.sealed == session.seal(federation.opening(1, 0))
    assert told.pop() == "abstained: slot 0 was settled for other survivors before"
    assert session.turn(Turn(None, None), told.append) == Turned(None, None)
    assert told == []
