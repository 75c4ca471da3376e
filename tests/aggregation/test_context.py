"""Masks, keys and boxes are bound to their context: a client that is shown something else gives noise."""

from collections.abc import Callable
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, strategies as st
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
from baffle.aggregation.messages import Opening
from baffle.core.ring import Ring, add
from baffle.errors import MessageError
from tests.support.federation import LENGTH, about, asked_of, new_federation, unmasked_by


@pytest.mark.parametrize("lie", ["weights", "keys"])
def test_other_weights_or_keys_for_one_client_give_noise(lie: str) -> None:
    """A client that is shown something else masks with other streams. No sum over any of the clients comes out."""
    federation, ring = new_federation(4), Ring(clients=4, n_max=4, clip=1.0)
    vectors = {c: ring.encode(np.full(LENGTH, 0.25), LENGTH, 1 + c, 0.0) for c in federation.everybody}
    server = federation.sealed()
    requests = asked_of(server)
    other: dict[str, object] = {"weights": about(0, weights_hash=b"other weights".ljust(32)), "keys": bytes(32)}
    requests[1] = replace(requests[1], **{"request" if lie == "weights" else "keys": other[lie]})
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


RUN, OTHER = b"r" * 32, b"o" * 32
OPENING = Opening(0, (0, 1, 2, 3), 3, 2, ())
BOUND: dict[str, tuple[Callable[..., bytes], list[object], list[object]]] = {
    "key": (key_context, [RUN, b"s" * 16, 0, 0], [OTHER, bytes(16), 1, 2]),
    "box": (box_context, [RUN, 0, 1], [OTHER, 1, 2]),
    "commitment": (seed_commitment, [RUN, 5, 7, b"s" * 16], [OTHER, 6, 8, bytes(16)]),
    "digest": (share_digest, [RUN, 1, 2, 3, 0, b"s" * 16], [OTHER, 2, 3, 2, 1, bytes(16)]),
}
"""A function of a context, its arguments, and another value for each of them."""


@pytest.mark.parametrize("name", BOUND)
def test_keys_boxes_commitments_and_digests_are_bound_to_every_argument(name: str) -> None:
    function, arguments, others = BOUND[name]
    changed = [[*arguments[:at], other, *arguments[at + 1 :]] for at, other in enumerate(others)]
    assert len({function(*each) for each in (arguments, *changed)}) == 1 + len(arguments)


def test_masks_are_bound_to_keys_opening_request_and_participants() -> None:
    openings = [replace(OPENING, **other) for other in ({"members": (0, 1, 2)}, {"threshold": 4}, {"floor": 3})]
    fields: list[dict[str, object]] = [{"round": 1}, {"trajectory": OTHER}, {"chain": OTHER}, {"weights_hash": OTHER}]
    contexts = [
        round_context(RUN, OPENING, about(0), (0, 1, 2, 3)),
        round_context(OTHER, OPENING, about(0), (0, 1, 2, 3)),
        round_context(RUN, OPENING, about(0), (0, 1, 2)),
        *(round_context(RUN, opening, about(0), (0, 1, 2, 3)) for opening in openings),
        *(round_context(RUN, OPENING, replace(about(0), **other), (0, 1, 2, 3)) for other in fields),
    ]
    assert len(set(contexts)) == 10
    advertised = list(new_federation(3).advertised.values())
    assert keys_digest(RUN, advertised, 0) != keys_digest(RUN, advertised[::-1], 0)


@given(st.lists(st.binary(max_size=3), max_size=4), st.lists(st.binary(max_size=3), max_size=4))
def test_other_fields_give_another_length_prefixed_text(some: list[bytes], others: list[bytes]) -> None:
    assert (length_prefixed(*some) == length_prefixed(*others)) == (some == others)
    assert length_prefixed(b"ab", b"") == bytes(7) + b"\x02ab" + bytes(8)
