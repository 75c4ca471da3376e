"""Both sides of a slot, driven by hand: sums come out exactly or not at all, and real attacks fail."""

import secrets
from collections.abc import Callable
from itertools import combinations

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from msgspec.structs import replace

from baffle.aggregation.client.marks import Marks
from baffle.aggregation.client.refusals import MOST_QUERIES
from baffle.aggregation.client.session import KEYS_AT_ONCE, ClientSession
from baffle.aggregation.context import box_context, key_context, keys_digest, round_context, sign
from baffle.aggregation.masks import agree, pair_mask, self_mask
from baffle.aggregation.messages import (
    BOX_BYTES,
    NO_SHARE,
    MaskedRequest,
    Opening,
    Sealed,
    Turn,
    Unmask,
    Unmasked,
    cut,
)
from baffle.aggregation.server.slot import ServerSlot
from baffle.aggregation.shares import SHARE_BYTES, combine, weights
from baffle.core.messages import encode
from baffle.core.ring import Ring, RingVector, add
from baffle.errors import AbortError, MessageError, RefusalError
from tests.support.federation import LENGTH, Federation, about, random_vector

COUNTS = [(s, v, u) for s in range(1, 7) for v in range(s + 1) for u in range(v + 1)]


def new_federation(n: int = 4, **settings: object) -> Federation:
    federation = Federation(n, **settings)  # type: ignore[arg-type]
    federation.advertise()
    return federation


def never() -> RingVector:
    raise AssertionError("a vector was computed for a request that must be refused")


def unmasked_by(federation: Federation, server: ServerSlot, answering: tuple[int, ...]) -> None:
    unmask = server.unmask()
    for client in answering:
        server.take_unmasked(client, federation.sessions[client].unmask(unmask))


def asked_of(server: ServerSlot) -> dict[int, MaskedRequest]:
    return server.requests(dict.fromkeys(server.sealed, about(server.slot.number)))


def boxes_of(asked: MaskedRequest) -> list[bytes]:
    return cut(asked.boxes, BOX_BYTES, len(asked.boxes) // BOX_BYTES, "boxes")


def shares_of(released: Unmasked) -> list[bytes]:
    return cut(released.shares, SHARE_BYTES, len(released.shares) // SHARE_BYTES, "shares")


@pytest.mark.parametrize("length", [1, 16, 1003])
@pytest.mark.parametrize("n", [2, 3, 5, 10])
def test_the_sum_is_the_plain_sum(n: int, length: int) -> None:
    federation = new_federation(n)
    for slot in range(3):
        server = federation.sealed(slot)
        plain = federation.masked(server, asked_of(server), federation.everybody, length)
        unmasked_by(federation, server, server.alive or federation.everybody)
        assert np.array_equal(server.total(), add(list(plain.values())))


def test_a_masked_vector_is_neither_plain_nor_repeated() -> None:
    federation = new_federation()
    server, plain = federation.until_masked(about(0))
    assert not any(np.array_equal(server.vectors[client], plain[client]) for client in plain)
    assert not np.array_equal(add(list(server.vectors.values())), add(list(plain.values())))


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
    assert seed is not None
    assert np.array_equal(left, self_mask(seed, context, LENGTH))
    assert all(pair.any() for pair in pairs)


def test_sparse_graphs_give_the_sum_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baffle.aggregation.graph.COMPLETE_UP_TO", 10)
    monkeypatch.setattr("baffle.aggregation.graph.degree", lambda _n, _dropout: 8)
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


def test_boxes_that_are_swapped_or_spoilt_are_missing_shares() -> None:
    federation = new_federation(5)
    for spoilt in range(5):
        federation.advertise(spoilt)
        server = federation.sealed(spoilt)
        requests = asked_of(server)
        for client in range(spoilt):
            first, second, *rest = boxes_of(requests[client])
            flipped = bytes([rest[0][0] ^ 1]) + rest[0][1:]
            requests[client] = replace(requests[client], boxes=b"".join((second, first, flipped, *rest[1:])))
        plain = federation.masked(server, requests, federation.everybody)
        unmasked_by(federation, server, federation.everybody)
        assert server.released[0][1] == NO_SHARE or not spoilt
        try:
            assert np.array_equal(server.total(), add(list(plain.values())))
            assert spoilt < 4
        except AbortError:
            assert spoilt > 2


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


# Attacks on a client: what it is shown.


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


@pytest.mark.parametrize("field", ["round", "key", "trajectory", "weights_hash"])
def test_masks_are_bound_to_the_request(field: str) -> None:
    federation = new_federation(2)
    opening, adverts = federation.opening(0, 0), federation.advertised
    keys = keys_digest(federation.run, adverts.values(), 0)
    request = about(0)
    value: object = 1 if field in ("round", "key") else b"\x01" * 32
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
        round_context(keys, replace(opening, graph_seed=bytes(32)), about(0), federation.everybody),
        round_context(keys, replace(opening, members=(0, 1, 2, 3, 4)), about(0), federation.everybody),
    ]
    assert len(set(contexts)) == len(contexts)


def test_keys_are_bound_to_run_session_slot_and_sender() -> None:
    federation = new_federation(2)
    advertisement = federation.advertised[0]
    contexts = [
        key_context(federation.run, advertisement, 0),
        key_context(bytes(32), advertisement, 0),
        key_context(federation.run, advertisement, 1),
        key_context(federation.run, replace(advertisement, sender=1), 0),
        key_context(federation.run, replace(advertisement, session=bytes(16)), 0),
    ]
    assert len(set(contexts)) == len(contexts)


def test_boxes_are_bound_to_slot_and_direction() -> None:
    one, other = bytes(32), b"\x01" * 32
    contexts = {box_context(one, 0, 1), box_context(one, 1, 0), box_context(one, 0, 2), box_context(other, 0, 1)}
    assert len(contexts) == 4


@pytest.mark.parametrize(
    ("alive", "dropped", "why"),
    [
        ((0, 1, 2, 3), (3,), "alive and dropped"),
        ((0, 1, 2), (2, 3), "alive and dropped"),
        ((0, 1, 2), (), "must be the participants"),
        ((0, 1, 2, 3, 4), (), "must be the participants"),
        ((0, 1, 2), (3, 4), "must be the participants"),
        ((0, 1, 2, 2), (), "must be the participants"),
        ((0, 1, 2, 2), (3,), "must be the participants"),
        ((1, 2, 3), (0,), "expected this client"),
        ((0, 1), (2, 3), "survivors"),
        ((0,), (1, 2, 3), "survivors"),
    ],
)
def test_survivors_that_do_not_add_up_get_no_share(alive: tuple[int, ...], dropped: tuple[int, ...], why: str) -> None:
    federation = new_federation(4)
    server, _ = federation.until_masked(about(0))
    with pytest.raises(RefusalError, match=why):
        federation.sessions[0].unmask(Unmask(0, alive, dropped))
    assert federation.sessions[0].unmask(server.unmask()).slot == 0


def test_survivors_below_the_floor_get_no_share() -> None:
    federation = new_federation(5)
    server = federation.sealed(floor=4)
    federation.masked(server, asked_of(server), federation.everybody)
    with pytest.raises(RefusalError):
        federation.sessions[0].unmask(Unmask(0, (0, 1, 2), (3, 4)))
    assert NO_SHARE not in shares_of(federation.sessions[0].unmask(Unmask(0, (0, 1, 2, 3), (4,))))


def test_a_second_list_of_survivors_gets_no_share() -> None:
    federation = new_federation(4)
    federation.until_masked(about(0))
    first = federation.sessions[0].unmask(Unmask(0, (0, 1, 2, 3), ()))
    with pytest.raises(RefusalError, match="other survivors"):
        federation.sessions[0].unmask(Unmask(0, (0, 1, 2), (3,)))
    assert federation.sessions[0].unmask(Unmask(0, (0, 1, 2, 3), ())) == first


def test_one_share_per_neighbour_is_released_and_never_both() -> None:
    federation = new_federation(4)
    server, _ = federation.until_masked(about(0), sending=(0, 1, 2))
    released = federation.sessions[0].unmask(server.unmask())
    assert len(shares_of(released)) == 3
    other = new_federation(4)
    other.until_masked(about(0))
    assert len(shares_of(other.sessions[0].unmask(Unmask(0, other.everybody, ())))) == 3


def test_nothing_is_unmasked_before_a_vector_was_sent() -> None:
    federation = new_federation(4)
    federation.sealed()
    with pytest.raises(RefusalError, match="no vector"):
        federation.sessions[0].unmask(Unmask(0, federation.everybody, ()))
    with pytest.raises(RefusalError, match="not opened"):
        federation.sessions[0].unmask(Unmask(1, federation.everybody, ()))


def test_a_second_request_under_one_mask_gets_nothing_and_a_resend_the_same_bytes() -> None:
    federation = new_federation(3)
    server = federation.sealed()
    request = asked_of(server)[0]
    first = federation.sessions[0].mask(request, random_vector)
    assert np.array_equal(federation.sessions[0].mask(request, never), first)
    for other in (
        replace(request, request=replace(about(0), key=1)),
        replace(request, request=replace(about(0), skipped=(0,))),
        replace(request, request=about(0, weights_hash=bytes(32))),
        replace(request, participants=(0, 1), boxes=request.boxes[:BOX_BYTES]),
        replace(request, boxes=request.boxes[::-1]),
        replace(request, keys=bytes(32)),
    ):
        with pytest.raises(RefusalError, match="another request"):
            federation.sessions[0].mask(other, never)


def test_a_vector_that_could_not_be_computed_leaves_the_slot_usable() -> None:
    federation = new_federation(3)
    request = asked_of(federation.sealed())[0]

    def fails() -> RingVector:
        raise MessageError("not finite")

    with pytest.raises(MessageError, match="not finite"):
        federation.sessions[0].mask(request, fails)
    assert len(federation.sessions[0].mask(request, random_vector)) == LENGTH


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
    for other in (federation.opening(0, 0, (0, 1, 2)), federation.opening(0, 0, seed=bytes(32))):
        with pytest.raises(RefusalError, match="other members"):
            session.seal(other)


def test_a_slot_without_a_key_is_not_opened() -> None:
    federation = new_federation(3)
    with pytest.raises(RefusalError, match="no key was advertised"):
        federation.sessions[0].seal(federation.opening(KEYS_AT_ONCE, 0))
    with pytest.raises(RefusalError):
        Federation(2).sessions[0].seal(federation.opening(0, 0))


def test_shares_of_a_slot_are_sealed_once_only() -> None:
    """A box's key depends only on session, slot and direction, so a second sealing would repeat key and nonce."""
    federation = new_federation(4)
    session = federation.sessions[0]
    first = session.seal(federation.opening(0, 0))
    session.seal(federation.opening(2, 0))
    try:
        again = session.seal(federation.opening(0, 0))
    except RefusalError:
        return
    assert again == first, "two sets of shares went out under one key and nonce"


def test_shares_of_a_slot_are_sealed_once_only_even_under_new_keys() -> None:
    federation = new_federation(4)
    session = federation.sessions[0]
    first = session.seal(federation.opening(0, 0))
    session.seal(federation.opening(2, 0))
    try:
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
    assert known is not None
    private = X25519PrivateKey.from_private_bytes(known)
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
    assert seed is not None
    context = round_context(asked[4].keys, again.slot.opening, about(0), pair)
    between = pair_mask(agree(private, federation.advertised[5].keys[0]), context, LENGTH, plus=False)
    seen = add([again.vectors[4], np.negative(self_mask(seed, context, LENGTH)), between])
    assert not np.array_equal(seen, plain[4]), "the server has read one client's vector"


# Attacks on a client: asking too often.


def test_more_queries_about_the_same_weights_are_refused() -> None:
    federation, same = new_federation(3), secrets.token_bytes(32)
    for number in range(MOST_QUERIES):
        federation.whole(about(number, weights_hash=same, skipped=range(number)))
    server = federation.sealed(MOST_QUERIES)
    again = about(MOST_QUERIES, weights_hash=same, skipped=range(MOST_QUERIES))
    requests = server.requests(dict.fromkeys(federation.everybody, again))
    with pytest.raises(RefusalError, match=f"{MOST_QUERIES} times"):
        federation.sessions[0].mask(requests[0], never)
    federation.advertise(MOST_QUERIES + 1)
    federation.whole(about(MOST_QUERIES + 1))


def test_queries_about_the_same_weights_are_counted_across_others() -> None:
    """A server cannot reset the count by asking about other weights in between."""
    federation, same, refused = new_federation(3), secrets.token_bytes(32), False
    for number in range(2 * MOST_QUERIES + 1):
        try:
            federation.whole(about(number, weights_hash=None if number % 2 else same, skipped=range(number)))
        except RefusalError:
            refused = True
            break
    assert refused
    assert number == 2 * MOST_QUERIES


def test_two_open_slots_do_not_release_about_the_same_weights_twice() -> None:
    """The difference of two sums about the same weights over different survivors would be one client's vector."""
    federation, same = new_federation(5), secrets.token_bytes(32)
    first, _ = federation.until_masked(about(0, weights_hash=same))
    second, _ = federation.until_masked(about(1, weights_hash=same), sending=(0, 1, 2, 3))
    session = federation.sessions[0]
    session.unmask(first.unmask())
    with pytest.raises(RefusalError, match="which was not skipped"):
        session.unmask(second.unmask())


def test_a_round_that_is_not_after_the_last_one_released_gets_no_shares() -> None:
    federation = new_federation(5)
    first, _ = federation.until_masked(about(0))
    second, _ = federation.until_masked(about(1))
    session = federation.sessions[0]
    session.unmask(second.unmask())
    with pytest.raises(RefusalError, match="round 0 is not after round 1"):
        session.unmask(first.unmask())


def test_many_open_slots_do_not_get_around_the_number_of_queries() -> None:
    federation, same, many = new_federation(3), secrets.token_bytes(32), MOST_QUERIES + 2
    released = 0
    try:
        servers = {slot: federation.sealed(slot) for slot in reversed(range(many))}
        for slot, server in sorted(servers.items()):
            requests = server.requests(
                dict.fromkeys(federation.everybody, about(slot, weights_hash=same, skipped=range(slot)))
            )
            federation.masked(server, requests, federation.everybody)
        for slot in range(many):
            federation.sessions[0].unmask(Unmask(slot, federation.everybody, ()))
            released += 1
    except RefusalError:
        pass
    assert released <= MOST_QUERIES


# Attacks on a client: openings and participants.


@pytest.mark.parametrize(("n", "threshold"), [(2, 1), (4, 2), (5, 2), (6, 3), (6, 0), (4, 5), (4, 2**62), (5, 6)])
def test_an_unsafe_threshold_is_refused(n: int, threshold: int) -> None:
    federation = new_federation(n)
    with pytest.raises(RefusalError, match="threshold"):
        federation.sessions[0].seal(federation.opening(0, 0, threshold=threshold))


@pytest.mark.parametrize("threshold", [4, 5, 6])
def test_a_safe_threshold_is_taken(threshold: int) -> None:
    federation = new_federation(6)
    assert len(federation.sessions[0].seal(federation.opening(0, 0, threshold=threshold)).boxes) == 5 * BOX_BYTES


@pytest.mark.parametrize("floor", [0, 1, 2, 6])
def test_a_floor_below_the_clients_own_is_refused(floor: int) -> None:
    federation = new_federation(5, least_floor=3)
    with pytest.raises(RefusalError, match="floor"):
        federation.sessions[0].seal(federation.opening(0, 0, floor=floor))
    federation.sessions[0].seal(federation.opening(0, 0, floor=3))


@pytest.mark.parametrize("members", [(1, 0, 2), (0, 1, 1), (0, 0, 1, 2), (1, 2, 3), ()])
def test_members_that_are_not_a_set_with_this_client_are_refused(members: tuple[int, ...]) -> None:
    federation = new_federation(4)
    advertisements = [federation.advertised[peer] for peer in sorted(set(members) - {0})]
    opening = Opening(0, members, len(members) // 2 + 1, 2, bytes(32), tuple(map(encode, advertisements)))
    with pytest.raises(RefusalError):
        federation.sessions[0].seal(opening)


@pytest.mark.parametrize(
    ("participants", "boxes"),
    [
        ((0, 1), 1),
        ((1, 2, 3), 3),
        ((0, 2, 1, 3), 3),
        ((0, 1, 1, 2), 3),
        ((0, 1, 2, 3, 4), 3),
        ((0, 1, 2, 3), 2),
        ((0, 1, 2), 3),
        ((0,), 0),
        ((), 0),
    ],
)
def test_participants_that_do_not_fit_are_refused(participants: tuple[int, ...], boxes: int) -> None:
    federation = new_federation(4)
    request = asked_of(federation.sealed())[0]
    with pytest.raises(RefusalError):
        federation.sessions[0].mask(
            replace(request, participants=participants, boxes=request.boxes[: BOX_BYTES * boxes]), never
        )
    federation.sessions[0].mask(request, random_vector)


def test_fewer_participants_than_the_floor_are_refused() -> None:
    federation = new_federation(5)
    request = asked_of(federation.sealed(floor=4))[0]
    with pytest.raises(RefusalError, match="participants"):
        federation.sessions[0].mask(
            replace(request, participants=(0, 1, 2), boxes=request.boxes[: 2 * BOX_BYTES]), never
        )


def test_forged_advertisements_are_refused() -> None:
    federation, stranger = new_federation(3), Ed25519PrivateKey.generate()
    honest, victim = federation.advertised[2], federation.advertised[1]
    own = federation.advertised[0]
    shared = replace(victim, keys=honest.keys)
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
        "the receiver's key": [sign(federation.identities[1], federation.run, replace(victim, keys=own.keys)), honest],
        "one key twice": [sign(federation.identities[1], federation.run, shared), honest],
        "missing": [honest],
        "too few": [
            sign(federation.identities[1], federation.run, replace(victim, first=0, keys=victim.keys[:1])),
            honest,
        ],
        "too late": [sign(federation.identities[1], federation.run, replace(victim, first=3)), honest],
        "low order": [sign(federation.identities[1], federation.run, replace(victim, channel=bytes(32))), honest],
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


def test_an_advertisement_of_a_client_outside_the_slot_is_refused() -> None:
    federation = new_federation(4)
    opening = federation.opening(0, 0, (0, 1, 2), advertisements=[federation.advertised[c] for c in (1, 2, 3)])
    with pytest.raises(RefusalError, match="no peer"):
        federation.sessions[0].seal(opening)


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


# Attacks on the server.


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
        (3, Unmasked(0, b"", bytes(33))),
        (9, Unmasked(0, b"", bytes(33))),
    ]
    for sender, message in refused:
        with pytest.raises(RefusalError):
            server.take_unmasked(sender, message)
    assert not server.released
    for client, message in good.items():
        server.take_unmasked(client, message)
        server.take_unmasked(client, message)
        with pytest.raises(RefusalError, match="other shares"):
            server.take_unmasked(client, replace(message, own=bytes(33)))
    assert np.array_equal(server.total(), add(list(plain.values())))


@pytest.mark.parametrize("wrong", [lambda _: bytes(33), lambda s: s[:-1] + bytes([s[-1] ^ 64]), lambda s: s[::-1]])
def test_wrong_shares_of_a_dropped_key_are_noticed(wrong: Callable[[bytes], bytes]) -> None:
    federation = new_federation(4)
    server, _ = federation.until_masked(about(0), sending=(0, 1, 2))
    unmask = server.unmask()
    for client in (0, 1, 2):
        released = federation.sessions[client].unmask(unmask)
        if client == 1:
            released = replace(released, shares=released.shares[:-SHARE_BYTES] + wrong(released.shares[-SHARE_BYTES:]))
        server.take_unmasked(client, released)
    with pytest.raises(AbortError):
        server.total()


def test_wrong_shares_of_a_self_mask_never_give_a_sum_that_decodes() -> None:
    federation, ring = new_federation(3), Ring(clients=3, n_max=4, clip=1.0)
    vectors = {c: ring.encode(np.full(LENGTH, 0.25), LENGTH, 1 + c, 0.0) for c in federation.everybody}
    server = federation.sealed()
    for client, request in asked_of(server).items():
        masked = federation.sessions[client].mask(request, lambda c=client: vectors[c])  # type: ignore[misc]
        server.take_vector(client, masked, len(masked))
    unmask = server.unmask()
    for client in federation.everybody:
        released = federation.sessions[client].unmask(unmask)
        server.take_unmasked(client, replace(released, own=bytes(33)) if client == 0 else released)
    with pytest.raises(MessageError):
        ring.decode(server.total(), 3)


# What a client remembers.


class Diary:
    """Records marks as they become durable, on a disk that can be full."""

    def __init__(self) -> None:
        self.marks: list[Marks] = []
        self.full = False

    def remember(self, marks: Marks) -> None:
        if self.full:
            raise OSError("disk full")
        self.marks.append(marks)


def with_diary(federation: Federation) -> tuple[ClientSession, Diary]:
    diary = Diary()
    federation.sessions[0] = federation.new_session(0, remember=diary.remember)
    federation.advertise()
    return federation.sessions[0], diary


def test_marks_are_durable_before_what_they_guard_is_sent() -> None:
    federation = Federation(3)
    session, diary = with_diary(federation)
    diary.full = True
    with pytest.raises(OSError, match="full"):
        session.seal(federation.opening(0, 0))
    diary.full = False
    server = federation.sealed()
    requests = asked_of(server)
    assert diary.marks == [Marks(sealed=0)]
    diary.full = True
    with pytest.raises(OSError, match="full"):
        session.mask(requests[0], random_vector)
    diary.full = False
    federation.masked(server, requests, federation.everybody)
    assert diary.marks[1:] == [Marks(sealed=0, slot=0)]
    diary.full = True
    with pytest.raises(OSError, match="full"):
        session.unmask(server.unmask())
    diary.full = False
    session.unmask(server.unmask())
    assert diary.marks[2:] == [Marks(0, 0, 0, {about(0).weights_hash.hex(): (0,)})]
    session.mask(requests[0], never)
    session.unmask(server.unmask())
    assert len(diary.marks) == 3


def test_a_restarted_client_refuses_what_it_did_before() -> None:
    federation = Federation(3)
    _, diary = with_diary(federation)
    same = secrets.token_bytes(32)
    for number in range(MOST_QUERIES):
        federation.whole(about(number, weights_hash=same, skipped=range(number)))
    marks = diary.marks[-1]
    last = MOST_QUERIES - 1
    assert marks == Marks(last, last, last, {same.hex(): tuple(range(MOST_QUERIES))})
    federation.sessions[0] = session = federation.new_session(0, marks)
    with pytest.raises(RefusalError):
        session.advertise(marks.slot)
    federation.advertise(marks.slot + 1)
    with pytest.raises(RefusalError):
        session.seal(federation.opening(marks.slot, 0))
    server = federation.sealed(marks.slot + 1)
    for request in (
        about(marks.round),
        about(0),
        about(marks.round + 1, weights_hash=same),
        about(marks.round + 1, weights_hash=same, skipped=range(MOST_QUERIES)),
    ):
        with pytest.raises(RefusalError):
            session.mask(server.requests(dict.fromkeys(federation.everybody, request))[0], never)
    federation.masked(server, asked_of(server), federation.everybody)


def test_a_turn_does_both_parts_or_says_why_not() -> None:
    federation = new_federation(3)
    session = federation.sessions[0]
    server, _ = federation.until_masked(about(0))
    turned = session.turn(Turn(server.unmask(), federation.opening(1, 0, threshold=1)))
    assert turned.unmasked == session.unmask(server.unmask())
    assert turned.sealed is None
    assert "threshold" in turned.refusal
    turned = session.turn(Turn(Unmask(0, (0, 1), (2,)), federation.opening(1, 0)))
    assert turned.unmasked is None
    assert turned.sealed == session.seal(federation.opening(1, 0))
    assert "other survivors" in turned.refusal
    assert session.turn(Turn(None, None)).refusal == ""
