"""Masks, keys and boxes are bound to their context: a client that is shown something else gives noise."""

from hashlib import sha256
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from baffle.aggregation.context import (
    box_context,
    key_context,
    keys_digest,
    length_prefixed,
    round_context,
    seed_commitment,
    share_digest,
)
from baffle.core.ring import Ring, add
from baffle.errors import MessageError
from tests.support.federation import LENGTH, about
from tests.support.slots import asked_of, new_federation, unmasked_by


def test_other_keys_of_the_participants_for_one_client_give_noise() -> None:
    federation = new_federation(4)
    server = federation.sealed()
    requests = asked_of(server)
    requests[1] = replace(requests[1], keys=bytes(32))
    plain = federation.masked(server, requests, federation.everybody)
    unmasked_by(federation, server, federation.everybody)
    total = server.total()
    for size in range(1, 5):
        for some in combinations(federation.everybody, size):
            assert not np.array_equal(total, add([plain[client] for client in some]))


def test_other_weights_for_one_client_give_noise() -> None:
    """A client that is shown other weights masks with other streams. No sum over any of the clients comes out."""
    federation, ring = new_federation(4), Ring(clients=4, n_max=4, clip=1.0)
    vectors = {c: ring.encode(np.full(LENGTH, 0.25), LENGTH, 1 + c, 0.0) for c in federation.everybody}
    server = federation.sealed()
    requests = server.requests(
        {c: about(0, weights_hash=b"other weights".ljust(32) if c == 1 else None) for c in federation.everybody}
    )
    for client in federation.everybody:
        masked = federation.sessions[client].mask(requests[client], lambda c=client: vectors[c])  # type: ignore[misc]
        server.take_vector(client, masked, len(masked))
    unmasked_by(federation, server, federation.everybody)
    keys = requests[0].keys
    for shown in (requests[0].request, requests[1].request):
        server.context = round_context(keys, server.slot.opening, shown, federation.everybody)
        total = server.total()
        for size in range(1, 5):
            for some in combinations(federation.everybody, size):
                assert not np.array_equal(total, add([vectors[client] for client in some]))
        with pytest.raises(MessageError):
            ring.decode(total, 4)


@pytest.mark.parametrize("field", ["round", "trajectory", "chain", "weights_hash"])
def test_masks_are_bound_to_the_request(field: str) -> None:
    federation = new_federation(2)
    opening, adverts = federation.opening(0, 0), federation.advertised
    keys = keys_digest(federation.run, adverts.values(), 0)
    request = about(0)
    value: object = 1 if field == "round" else b"\x01" * 32
    other = replace(request, **{field: value})
    assert round_context(keys, opening, request, (0, 1)) != round_context(keys, opening, other, (0, 1))


def test_masks_are_bound_to_the_opening_and_the_participants() -> None:
    federation = new_federation(4)
    opening = federation.opening(0, 0)
    keys = keys_digest(federation.run, federation.advertised.values(), 0)
    contexts = [
        round_context(keys, opening, about(0), federation.everybody),
        round_context(keys, opening, about(0), (0, 1, 2)),
        round_context(
            keys_digest(federation.run, list(federation.advertised.values())[::-1], 0),
            opening,
            about(0),
            federation.everybody,
        ),
        round_context(keys, replace(opening, threshold=4), about(0), federation.everybody),
        round_context(keys, replace(opening, floor=3), about(0), federation.everybody),
        round_context(keys, replace(opening, members=(0, 1, 2, 3, 4)), about(0), federation.everybody),
    ]
    assert len(set(contexts)) == len(contexts)


def test_keys_are_bound_to_run_session_slot_and_sender() -> None:
    federation = new_federation(2)
    session = federation.advertised[0].session
    contexts = [
        key_context(federation.run, session, 0, 0),
        key_context(bytes(32), session, 0, 0),
        key_context(federation.run, session, 0, 1),
        key_context(federation.run, session, 1, 0),
        key_context(federation.run, bytes(16), 0, 0),
    ]
    assert len(set(contexts)) == len(contexts)


def test_boxes_are_bound_to_slot_and_direction() -> None:
    one, other = bytes(32), b"\x01" * 32
    contexts = {box_context(one, 0, 1), box_context(one, 1, 0), box_context(one, 0, 2), box_context(other, 0, 1)}
    assert len(contexts) == 4


@given(st.lists(st.binary(max_size=3), max_size=4), st.lists(st.binary(max_size=3), max_size=4))
def test_other_fields_give_another_length_prefixed_text(some: list[bytes], others: list[bytes]) -> None:
    assert (length_prefixed(*some) == length_prefixed(*others)) == (some == others)


def test_bytes_cannot_move_from_one_field_to_the_next() -> None:
    assert length_prefixed(b"ab", b"c") != length_prefixed(b"a", b"bc") != length_prefixed(b"abc")
    assert length_prefixed(b"ab", b"") == bytes(7) + b"\x02ab" + bytes(8)


def test_a_commitment_is_bound_to_run_slot_sender_and_seed() -> None:
    run, seed = b"r" * 32, b"s" * 16
    text = length_prefixed(run, (5).to_bytes(8, "big"), (7).to_bytes(8, "big"), seed)
    first = seed_commitment(run, 5, 7, seed)
    assert first == sha256(b"baffle/seed/2" + text).digest()
    others = [(bytes(32), 5, 7, seed), (run, 6, 7, seed), (run, 5, 8, seed), (run, 5, 7, bytes(16)), (run, 7, 5, seed)]
    assert len({first, *(seed_commitment(*other) for other in others)}) == 6


def test_a_digest_is_bound_to_run_slot_dealer_holder_place_and_share() -> None:
    run, share = b"r" * 32, b"s" * 16
    first = share_digest(run, 1, 2, 3, 0, share)
    assert len(first) == 8
    others = [
        (bytes(32), 1, 2, 3, 0, share),
        (run, 2, 2, 3, 0, share),
        (run, 1, 3, 3, 0, share),
        (run, 1, 2, 2, 0, share),
        (run, 1, 3, 2, 0, share),
        (run, 1, 2, 3, 1, share),
        (run, 1, 2, 3, 0, bytes(16)),
    ]
    assert len({first, *(share_digest(*other) for other in others)}) == 8


def test_a_client_commits_to_the_seed_that_it_uses() -> None:
    federation = new_federation(3)
    sealed = federation.sessions[1].seal(federation.opening(0, 1))
    assert sealed.commitment == seed_commitment(federation.run, 0, 1, federation.sessions[1]._open[0].seed)
