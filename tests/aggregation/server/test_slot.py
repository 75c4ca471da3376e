"""The server's half of a slot refuses bad messages without being changed by them, and notices wrong shares."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from msgspec.structs import replace

from baffle.aggregation.messages import (
    BOX_BYTES,
    Sealed,
    Unmasked,
)
from baffle.aggregation.shares import PRIME, SHARE_BYTES
from baffle.core.ring import add
from baffle.errors import AbortError, RefusalError
from tests.support.federation import LENGTH, about, random_vector
from tests.support.slots import new_federation, shares_of, unmasked_by


def test_a_bad_vector_is_refused_and_changes_nothing() -> None:
    federation = new_federation(4)
    server, plain = federation.until_masked(about(0), sending=(0, 1, 2))
    vectors = dict(server.vectors)
    for sender, vector in ((3, random_vector(LENGTH - 1)), (3, random_vector(LENGTH + 1)), (9, random_vector())):
        with pytest.raises(RefusalError):
            server.take_vector(sender, vector, LENGTH)
    with pytest.raises(RefusalError, match="another vector"):
        server.take_vector(0, random_vector(), LENGTH)
    server.take_vector(0, vectors[0].copy(), LENGTH)
    assert server.vectors.keys() == vectors.keys()
    unmasked_by(federation, server, (0, 1, 2))
    assert np.array_equal(server.total(), add(list(plain.values())))


def test_bad_sealed_shares_are_refused_and_change_nothing() -> None:
    federation = new_federation(4)
    server = federation.sealed(sealing=(0, 1, 2))
    sealed = federation.sessions[3].seal(federation.opening(0, 3))
    other = federation.sessions[3].seal(federation.opening(1, 3))
    refused: list[tuple[int, Sealed]] = [
        (3, replace(sealed, boxes=sealed.boxes[:-1])),
        (3, replace(sealed, boxes=sealed.boxes[BOX_BYTES:])),
        (3, replace(sealed, boxes=sealed.boxes + sealed.boxes[:BOX_BYTES])),
        (3, other),
        (9, sealed),
        (0, sealed),
    ]
    for sender, message in refused:
        with pytest.raises(RefusalError):
            server.take_sealed(sender, message)
    assert set(server.sealed) == {0, 1, 2}
    server.take_sealed(3, sealed)
    server.take_sealed(3, sealed)


def test_bad_released_shares_are_refused_and_change_nothing() -> None:
    federation = new_federation(4)
    server, plain = federation.until_masked(about(0), sending=(0, 1, 2))
    unmask = server.unmask()
    good = {client: federation.sessions[client].unmask(unmask) for client in (0, 1, 2)}
    refused: list[tuple[int, Unmasked]] = [
        (0, replace(good[0], slot=1)),
        (0, replace(good[0], shares=good[0].shares[SHARE_BYTES:])),
        (0, replace(good[0], shares=good[0].shares[:-1])),
        (0, replace(good[0], shares=b"")),
        (3, good[0]),
        (3, Unmasked(0, b"", bytes(SHARE_BYTES))),
        (9, Unmasked(0, b"", bytes(SHARE_BYTES))),
    ]
    for sender, message in refused:
        with pytest.raises(RefusalError):
            server.take_unmasked(sender, message)
    assert not server.released
    for client, message in good.items():
        server.take_unmasked(client, message)
        server.take_unmasked(client, message)
        with pytest.raises(RefusalError, match="other shares"):
            server.take_unmasked(client, replace(message, own=bytes(SHARE_BYTES)))
    assert np.array_equal(server.total(), add(list(plain.values())))


@pytest.mark.parametrize(
    "wrong", [lambda _: bytes(SHARE_BYTES), lambda s: s[:-1] + bytes([s[-1] ^ 64]), lambda s: s[::-1]]
)
def test_wrong_shares_of_a_dropped_key_are_noticed(wrong: Callable[[bytes], bytes]) -> None:
    federation = new_federation(4)
    server, _ = federation.until_masked(about(0), sending=(0, 1, 2))
    unmask = server.unmask()
    for client in (0, 1, 2):
        released = federation.sessions[client].unmask(unmask)
        if client == 1:
            released = replace(released, shares=released.shares[:-SHARE_BYTES] + wrong(released.shares[-SHARE_BYTES:]))
        server.take_unmasked(client, released)
    with pytest.raises(AbortError, match="2 neighbours of client 3 gave the shares they were dealt, 3 are needed"):
        server.total()
    assert server.lies.keys() == {1}


SMALL, BEYOND = (number.to_bytes(SHARE_BYTES, "big") for number in (5, PRIME + 5))
"""The same share, written in two ways."""


@pytest.mark.parametrize("liars", [(), (0,), (0, 1, 2, 3)])
@pytest.mark.parametrize("dealt", [(SMALL,), (BEYOND,), (SMALL, BEYOND)])
def test_shares_written_beyond_the_prime_change_no_sum(
    monkeypatch: pytest.MonkeyPatch, dealt: Sequence[bytes], liars: tuple[int, ...]
) -> None:
    """All secrets are 5, and so are all their shares; dealers write some of them as the prime plus 5, and so do liars
    that hold them. (True secrets are never so small.)"""

    def constant(_first: bytes, _second: bytes, _t: int, points: Sequence[int]) -> list[tuple[bytes, bytes]]:
        return [(dealt[point % len(dealt)], dealt[-1 - point % len(dealt)]) for point in points]

    monkeypatch.setattr("baffle.aggregation.client.session.new_secret", lambda: SMALL)
    monkeypatch.setattr("baffle.aggregation.client.session.split", constant)
    federation = new_federation(5)
    server, plain = federation.until_masked(about(0), sending=(0, 1, 2, 3))
    unmask = server.unmask()
    for client in (0, 1, 2, 3):
        released = federation.sessions[client].unmask(unmask)
        assert set(shares_of(released)) <= set(dealt)
        server.take_unmasked(client, replace(released, shares=BEYOND * 4, own=BEYOND) if client in liars else released)
    assert np.array_equal(server.total(), add(list(plain.values())))
    assert not server.lies


def test_a_wrong_share_of_ones_own_self_mask_is_noticed_and_not_needed() -> None:
    federation = new_federation(3)
    server, plain = federation.until_masked(about(0))
    unmask = server.unmask()
    for client in federation.everybody:
        released = federation.sessions[client].unmask(unmask)
        server.take_unmasked(client, replace(released, own=bytes(SHARE_BYTES)) if client == 0 else released)
    assert np.array_equal(server.total(), add(list(plain.values())))
    assert server.lies.keys() == {0}


def test_other_boxes_or_another_commitment_after_the_first_are_refused() -> None:
    federation = new_federation(4)
    server = federation.sealed()
    sealed = federation.sessions[3].seal(federation.opening(0, 3))
    for other in (replace(sealed, commitment=bytes(32)), replace(sealed, boxes=sealed.boxes[:-1] + b"x")):
        with pytest.raises(RefusalError, match="other shares before"):
            server.take_sealed(3, other)
    assert (server.commitments[3], server.sealed[3][-1][-1:]) == (sealed.commitment, sealed.boxes[-1:])
