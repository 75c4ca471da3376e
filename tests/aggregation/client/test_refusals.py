"""What a client refuses, and what it still answers. Each attack is a request that a server could send."""

import secrets

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec.structs import replace

from baffle.aggregation.client.session import KEYS_AT_ONCE
from baffle.aggregation.client.slot import MOST_QUERIES
from baffle.aggregation.context import key_context, round_context, sign
from baffle.aggregation.masks import agree, mask_key, pair_mask, self_mask
from baffle.aggregation.messages import BOX_BYTES, NO_SHARE, Advertisement, Agree, Opening, Unmask
from baffle.aggregation.shares import combine, weights
from baffle.core.messages import encode
from baffle.core.ring import add
from baffle.errors import RefusalError
from tests.support.federation import (
    LENGTH,
    Federation,
    about,
    asked_of,
    never,
    new_federation,
    random_vector,
    shares_of,
    unmasked_by,
)


@pytest.mark.parametrize(
    ("alive", "dropped", "why"),
    [
        ((0, 1, 2, 3, 4), (4,), "alive and dropped"),
        ((0, 1, 2, 3), (), "must be the participants"),
        ((0, 1, 2, 3, 4, 5), (), "must be the participants"),
        ((0, 1, 2, 3, 3), (), "must be the participants"),
        ((0, 1, 3, 2), (4,), "in order"),
        ((1, 2, 3, 4), (0,), "expected this client"),
        ((0, 1, 2), (3, 4), "3 survivors, expected this client and at least 4"),
    ],
)
def test_survivors_that_do_not_add_up_get_no_share_and_no_signature(
    alive: tuple[int, ...], dropped: tuple[int, ...], why: str
) -> None:
    """The threshold is 3, the floor 4."""
    federation = new_federation(5)
    server = federation.sealed(floor=4)
    session = federation.sessions[0]
    with pytest.raises(RefusalError, match="no vector"):
        session.unmask(Unmask(0, federation.everybody, ()))
    federation.masked(server, asked_of(server), federation.everybody)
    with pytest.raises(RefusalError, match="not opened"):
        session.unmask(Unmask(1, federation.everybody, ()))
    with pytest.raises(RefusalError, match=why):
        session.unmask(Unmask(0, alive, dropped))
    with pytest.raises(RefusalError, match=why):
        session.agree(Agree(0, alive, dropped))
    assert NO_SHARE not in shares_of(session.unmask(Unmask(0, (0, 1, 2, 3), (4,))))


def test_a_second_list_of_survivors_gets_no_share() -> None:
    federation = new_federation(4)
    federation.until_masked(about(0))
    first = federation.sessions[0].unmask(Unmask(0, (0, 1, 2, 3), ()))
    with pytest.raises(RefusalError, match="other survivors"):
        federation.sessions[0].unmask(Unmask(0, (0, 1, 2), (3,)))
    assert federation.sessions[0].unmask(Unmask(0, (0, 1, 2, 3), ())) == first


def test_a_second_request_under_one_mask_gets_nothing_and_a_resend_the_same_bytes() -> None:
    federation = new_federation(3)
    server = federation.sealed()
    request = asked_of(server)[0]
    first = federation.sessions[0].mask(request, random_vector)
    assert np.array_equal(federation.sessions[0].mask(request, never), first)
    for other in (
        replace(request, request=about(0, chain=b"\1" * 32)),
        replace(request, request=about(0, weights_hash=bytes(32))),
        replace(request, participants=(0, 1), boxes=request.boxes[:BOX_BYTES]),
        replace(request, boxes=request.boxes[::-1]),
        replace(request, keys=bytes(32)),
    ):
        with pytest.raises(RefusalError, match="another request"):
            federation.sessions[0].mask(other, never)


def test_a_slot_that_is_over_is_not_opened_or_used_again() -> None:
    federation = new_federation(3)
    federation.whole(about(4))
    session = federation.sessions[0]
    for slot in (0, 3):
        with pytest.raises(RefusalError):
            session.seal(federation.opening(slot, 0))
    for slot in (0, 4):
        with pytest.raises(RefusalError):
            session.advertise(slot)
    federation.advertise(5)
    server = federation.sealed(5)
    asked = asked_of(server)[0]
    with pytest.raises(RefusalError, match="another request"):
        session.mask(replace(asked, request=about(4)), never)
    with pytest.raises(RefusalError, match="not opened"):
        session.mask(replace(asked, request=about(0)), never)
    session.mask(asked, random_vector)


def test_a_slot_is_not_opened_with_other_members() -> None:
    federation = new_federation(4)
    session = federation.sessions[0]
    sealed = session.seal(federation.opening(0, 0))
    assert session.seal(federation.opening(0, 0)) == sealed
    for other in (federation.opening(0, 0, (0, 1, 2)), federation.opening(0, 0, threshold=4)):
        with pytest.raises(RefusalError, match="other members"):
            session.seal(other)


def test_a_slot_without_a_key_is_not_opened() -> None:
    federation = new_federation(3)
    with pytest.raises(RefusalError, match="no key was advertised"):
        federation.sessions[0].seal(federation.opening(KEYS_AT_ONCE, 0))
    with pytest.raises(RefusalError):
        Federation(2).sessions[0].seal(federation.opening(0, 0))


@pytest.mark.parametrize("new_keys", [False, True])
def test_shares_of_a_slot_are_sealed_once_only(new_keys: bool) -> None:
    """A box's key depends only on session, slot and direction, so a second sealing would repeat key and nonce."""
    federation = new_federation(4)
    session = federation.sessions[0]
    first = session.seal(federation.opening(0, 0))
    session.seal(federation.opening(2, 0))
    try:
        if new_keys:
            session.advertise(0)
        again = session.seal(federation.opening(0, 0))
    except RefusalError:
        return
    assert again == first, "two sets of shares went out under one key and nonce"


def test_a_key_that_was_given_away_masks_nothing() -> None:
    """The server calls 4 and 5 dropped, which reveals their keys; then it opens their slot for these two alone."""
    federation = new_federation(6)
    server, _ = federation.until_masked(about(0), sending=(0, 1, 2, 3))
    unmasked_by(federation, server, (0, 1, 2, 3))
    shares = [server.released[holder][4] for holder in (0, 1, 2, 3)]
    known = combine(weights([1, 2, 3, 4]), shares)
    private = mask_key(known, key_context(federation.run, federation.advertised[4].session, 4, 0))
    pair = (4, 5)
    try:
        for client in pair:
            federation.sessions[client].seal(federation.opening(2, client, pair))
        again = federation.sealed(0, pair)
        asked = asked_of(again)
        plain = federation.masked(again, asked, pair)
        unmasked_by(federation, again, pair)
    except RefusalError:
        return
    seed = combine(weights([5, 6]), [again.released[4][4], again.released[5][4]])
    context = round_context(asked[4].keys, again.slot.opening, about(0), pair)
    between = pair_mask(agree(private, federation.advertised[5].keys[0]), context, LENGTH, plus=False)
    seen = add([again.vectors[4], np.negative(self_mask(seed, context, LENGTH)), between])
    assert not np.array_equal(seen, plain[4]), "the server has read one client's vector"


# Attacks on a client: asking too often.


def test_queries_about_the_same_weights_are_counted_across_others() -> None:
    """A server cannot reset the count by asking about other weights in between."""
    federation, same = new_federation(3), secrets.token_bytes(32)
    for number in range(2 * MOST_QUERIES):
        federation.whole(about(number, weights_hash=None if number % 2 else same))
    with pytest.raises(RefusalError, match=f"asked about {MOST_QUERIES} times"):
        federation.whole(about(2 * MOST_QUERIES, weights_hash=same))
    federation.advertise(2 * MOST_QUERIES + 1)
    federation.whole(about(2 * MOST_QUERIES + 1))


def test_two_open_slots_do_not_get_around_the_number_of_queries() -> None:
    """The difference of two sums about the same weights over different survivors would be one client's vector, so what
    is open when the number is reached is refused as well."""
    federation, same = new_federation(5), secrets.token_bytes(32)
    for number in range(MOST_QUERIES - 1):
        federation.whole(about(number, weights_hash=same))
    first, _ = federation.until_masked(about(MOST_QUERIES - 1, weights_hash=same))
    second, _ = federation.until_masked(about(MOST_QUERIES, weights_hash=same), sending=(0, 1, 2, 3))
    session = federation.sessions[0]
    session.unmask(first.unmask())
    with pytest.raises(RefusalError, match=f"asked about {MOST_QUERIES} times; begin with other weights"):
        session.unmask(second.unmask())


def test_a_round_that_is_not_after_the_last_one_released_gets_no_shares() -> None:
    federation = new_federation(5)
    first, _ = federation.until_masked(about(0))
    second, _ = federation.until_masked(about(1))
    session = federation.sessions[0]
    session.unmask(second.unmask())
    with pytest.raises(RefusalError, match="round 0 is not after round 1"):
        session.unmask(first.unmask())


# Attacks on a client: openings and participants.


@pytest.mark.parametrize("floor", [0, 1, 2, 6])
def test_a_floor_below_the_clients_own_is_refused(floor: int) -> None:
    federation = new_federation(5, least_floor=3)
    with pytest.raises(RefusalError, match="floor"):
        federation.sessions[0].seal(federation.opening(0, 0, floor=floor))
    federation.sessions[0].seal(federation.opening(0, 0, floor=3))


@pytest.mark.parametrize("members", [(1, 0, 2), (0, 0, 1, 2), (1, 2, 3), ()])
def test_members_that_are_not_a_set_with_this_client_are_refused(members: tuple[int, ...]) -> None:
    federation = new_federation(4)
    advertisements = [federation.advertised[peer] for peer in sorted(set(members) - {0})]
    opening = Opening(0, members, len(members) // 2 + 1, 2, tuple(map(encode, advertisements)))
    with pytest.raises(RefusalError):
        federation.sessions[0].seal(opening)


@pytest.mark.parametrize(
    ("participants", "boxes"),
    [((1, 2, 3, 4), 4), ((0, 2, 1, 3), 3), ((0, 1, 2, 3, 5), 4), ((0, 1, 2, 3, 4), 3), ((0, 1, 2), 2), ((), 0)],
)
def test_participants_that_do_not_fit_are_refused(participants: tuple[int, ...], boxes: int) -> None:
    """The threshold is 3, the floor 4."""
    federation = new_federation(5)
    request = asked_of(federation.sealed(floor=4))[0]
    other = replace(request, participants=participants, boxes=request.boxes[: BOX_BYTES * boxes])
    with pytest.raises(RefusalError):
        federation.sessions[0].mask(other, never)
    federation.sessions[0].mask(request, random_vector)


def test_forged_advertisements_are_refused() -> None:
    federation, stranger = new_federation(3), Ed25519PrivateKey.generate()
    honest, victim = federation.advertised[2], federation.advertised[1]
    own = federation.advertised[0]

    def signed(**changes: object) -> Advertisement:
        return sign(federation.identities[1], federation.run, replace(victim, **changes))

    forgeries = {
        "signature": [replace(victim, signature=bytes(64)), honest],
        "other keys": [replace(victim, keys=victim.keys[::-1]), honest],
        "other channel": [replace(victim, channel=honest.channel), honest],
        "other session": [replace(victim, session=bytes(16)), honest],
        "other first": [replace(victim, first=1), honest],
        "other sender": [replace(honest, sender=1), honest],
        "another identity": [sign(stranger, federation.run, victim), honest],
        "another run": [sign(federation.identities[1], bytes(32), victim), honest],
        "a stranger": [victim, honest, sign(stranger, federation.run, replace(victim, sender=7))],
        "the receiver": [victim, honest, own],
        "the receiver's key": [signed(keys=own.keys), honest],
        "one key twice": [signed(keys=honest.keys), honest],
        "missing": [honest],
        "too few": [signed(first=0, keys=victim.keys[:1]), honest],
        "too late": [signed(first=3), honest],
        "low order": [signed(channel=bytes(32)), honest],
    }
    for name, advertisements in forgeries.items():
        session = federation.new_session(0)
        session.advertise(0)
        if name == "the receiver's key":
            session = federation.sessions[0]
        with pytest.raises(RefusalError):
            session.seal(federation.opening(2, 0, advertisements=advertisements))
    session = federation.new_session(0)
    session.advertise(0)
    session.seal(federation.opening(2, 0))


def test_a_tier_of_one_is_not_exposed() -> None:
    federation = new_federation(4, tiers={0: 10, 1: 10, 2: 10, 3: 40})
    server, _ = federation.until_masked(about(0))
    for client in federation.everybody:
        with pytest.raises(RefusalError, match="1 survivors evaluate 40"):
            federation.sessions[client].unmask(server.unmask())


def test_a_low_tier_of_one_is_hidden_by_those_above() -> None:
    federation = new_federation(4, tiers={0: 10, 1: 40, 2: 40, 3: 40})
    server, plain = federation.until_masked(about(0))
    unmasked_by(federation, server, federation.everybody)
    assert np.array_equal(server.total(), add(list(plain.values())))
