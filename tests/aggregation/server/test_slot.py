"""The server's half of a slot refuses bad messages without being changed by them, and notices wrong shares."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest
from msgspec.structs import replace

from baffle.aggregation.messages import BOX_BYTES, Sealed, Unmasked
from baffle.aggregation.server.slot import Dealt, Recovery
from baffle.aggregation.shares import PRIME, SHARE_BYTES, new_secret, split
from baffle.core.ring import add
from baffle.errors import AbortError, RefusalError
from tests.support.federation import LENGTH, about, new_federation, random_vector, shares_of, unmasked_by


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
    for message in (replace(sealed, commitment=bytes(32)), replace(sealed, boxes=sealed.boxes[:-1] + b"x")):
        with pytest.raises(RefusalError, match="other shares before"):
            server.take_sealed(3, message)
    assert (server.commitments[3], server.sealed[3][-1][-1:]) == (sealed.commitment, sealed.boxes[-1:])


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


@pytest.mark.parametrize("liars", [(0,), (0, 1, 2, 3)])
@pytest.mark.parametrize("dealt", [(SMALL,), (SMALL, BEYOND)])
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


# Secrets are recovered from shares, and clients that gave wrong ones are found.

DEALER, T, HOLDERS = 2, 5, range(9)


class Secret:
    """A secret, and the shares of it that a dealer has dealt."""

    def __init__(self) -> None:
        self.secret = new_secret()
        pairs = split(self.secret, self.secret, T, [holder + 1 for holder in HOLDERS])
        self.shares = {holder: first for holder, (first, _) in zip(HOLDERS, pairs, strict=True)}
        self.dealt = Dealt(DEALER, self.secret.__eq__, lambda holder, share: share == self.shares[holder])

    def with_wrong(self, *holders: int) -> Mapping[int, bytes]:
        return self.shares | {holder: new_secret() for holder in holders}


@pytest.mark.parametrize("same_holders", [False, True])
def test_shares_that_were_never_dealt_do_not_count(same_holders: bool) -> None:
    for wrong in ((), (0,), (8,), (0, 1, 3, 8)):
        secret, recovery = Secret(), Recovery(7, T, same_holders)
        assert recovery.secret(secret.with_wrong(*wrong), secret.dealt) == secret.secret
        if same_holders:
            how = f"in round 7 it released a share that client {DEALER} had not dealt to it"
            assert recovery.lies == dict.fromkeys(wrong, how)


def test_a_share_that_is_not_needed_is_found_out_half_of_the_time() -> None:
    """In a large graph only a threshold of the shares is looked at, but nobody knows which."""
    caught = 0
    for _ in range(200):
        secret, recovery = Secret(), Recovery(7, T, False)
        assert recovery.secret(secret.with_wrong(8), secret.dealt) == secret.secret
        caught += bool(recovery.lies)
    assert 50 < caught < 180


@pytest.mark.parametrize("same_holders", [False, True])
def test_a_dealer_whose_shares_give_another_secret_is_named_alone(same_holders: bool) -> None:
    secret, other, recovery = Secret(), Secret(), Recovery(7, T, same_holders)
    dealt = Dealt(DEALER, secret.secret.__eq__, other.dealt.share)
    with pytest.raises(AbortError, match="client 2 dealt shares that do not give what it had committed to"):
        recovery.secret(other.shares, dealt)
    assert recovery.lies == {DEALER: "in round 7 it dealt shares that do not give what it had committed to"}
