"""The plain sum: bad replies are refused one by one, and the others are summed."""

from collections.abc import Mapping

import numpy as np
import pytest

from baffle.aggregation.plain import PlainSum
from baffle.core.messages import Abstention, CatchUp, Contribution, Outcome, RoundRequest, decode, encode
from baffle.core.ports import CONTRIBUTED, MISSING, Collected
from baffle.core.ring import ELEMENT, EXTRAS, LOSS_MAX, Ring

LENGTH = 6
RING = Ring(clients=4, n_max=50, clip=10.0)
SUM = PlainSum(RING, LENGTH)
REQUEST = RoundRequest(7, bytes(32), bytes(32), bytes(32), CatchUp("outcomes", 7, ()))


class Wire:
    """Clients with fixed replies. A client without one does not answer."""

    def __init__(self, replies: Mapping[int, bytes]) -> None:
        self.replies = replies
        self.heard: list[dict[int, bytes]] = []

    def exchange(self, requests: Mapping[int, bytes]) -> Mapping[int, bytes]:
        self.heard.append(dict(requests))
        return {client: reply for client, reply in self.replies.items() if client in requests}


def _collect(replies: Mapping[int, bytes], asked: list[int] | None = None) -> Collected:
    return SUM.collect([dict.fromkeys(sorted(replies) if asked is None else asked, REQUEST)], Wire(replies))


def _values(seed: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.random.default_rng(seed).uniform(-9, 9, LENGTH)


def _vector(seed: int, weight: int = 20, loss: float = 1.5) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    vector: np.ndarray[tuple[int], np.dtype[np.uint32]] = RING.encode(_values(seed), LENGTH, weight, loss)
    return vector


def _reply(vector: np.ndarray[tuple[int], np.dtype[np.uint32]], number: int = 7) -> bytes:
    return encode(Contribution(number, vector.astype(ELEMENT).tobytes()))


def test_contributions_are_summed_with_their_weights() -> None:
    """A client that does not answer is missing."""
    weights = {0: 20, 1: 50, 3: 1}
    replies = {client: _reply(_vector(client, weight, 1.0 + client)) for client, weight in weights.items()}
    collected = _collect(replies, [0, 1, 2, 3])
    assert collected.events == dict.fromkeys(weights, CONTRIBUTED) | {2: MISSING}
    assert collected.uplink == {client: len(reply) for client, reply in replies.items()}
    assert collected.downlink.keys() == {0, 1, 2, 3}
    assert collected.sums[0] is not None
    assert (collected.sums[0].weight, collected.sums[0].contributors, collected.sums[0].clipped) == (71, 3, 0)
    assert collected.sums[0].loss == pytest.approx((20 + 100 + 4) / 71, rel=1e-3)
    expected = sum(weight * _values(client) for client, weight in weights.items())
    np.testing.assert_allclose(collected.sums[0].totals / RING.scale, expected, atol=3 / RING.scale)


def _with(place: int, value: int) -> bytes:
    vector = _vector(9)
    vector[place] = np.uint32(value % 2**32)
    return _reply(vector)


BOUND = RING.most(1, weight=20)

BAD = {
    "nothing": (b"", "expected a message of type Reply"),
    "another message": (encode(Outcome(7, "skipped", ())), "expected a message of type Reply"),
    "late": (_reply(_vector(9), 6), "a reply to round 6, expected round 7"),
    "short": (_reply(_vector(9)[:-1]), f"a vector of {LENGTH + EXTRAS - 1} elements, expected {LENGTH + EXTRAS}"),
    "long": (_reply(np.append(_vector(9), np.uint32(0))), f"expected {LENGTH + EXTRAS}"),
    "broken element": (encode(Contribution(7, bytes(41))), "not whole"),
    "abstained": (encode(Abstention(7)), "abstained"),
    "abstained late": (encode(Abstention(6)), "a reply to round 6"),
    "heavier than allowed": (_with(LENGTH, 51), "sample weight 51"),
    "weightless": (_with(LENGTH, 0), "sample weight 0, expected 1 with 1 to 50"),
    "two in one": (_with(LENGTH + 1, 2), "claims 2 contributors"),
    "too many clipped": (_with(LENGTH + 2, LENGTH + 1), "clipped"),
    "of absurd loss": (_with(LENGTH + 3, 2**31 - 1), "loss"),
    "out of bounds": (_with(2, BOUND + 1), "more than 1 clients of sample weight 20 can send"),
    "out of bounds below": (_with(2, -BOUND - 1), "more than 1 clients of sample weight 20 can send"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_reply_is_refused_with_its_reason_and_the_others_count(name: str) -> None:
    data, reason = BAD[name]
    good = {0: _reply(_vector(0)), 2: _reply(_vector(2))}
    collected = _collect({0: good[0], 1: data, 2: good[2]})
    alone = _collect(good)
    assert collected.sums[0] is not None
    assert alone.sums[0] is not None
    np.testing.assert_array_equal(collected.sums[0].totals, alone.sums[0].totals)
    assert collected.sums[0][1:] == alone.sums[0][1:]
    assert collected.events.keys() == {0, 1, 2}
    assert collected.events[0] == collected.events[2] == CONTRIBUTED
    assert reason in collected.events[1]
    assert collected.refusals == [(1, collected.events[1])]
    assert collected.uplink == {0: len(good[0]), 1: len(data), 2: len(good[2])}


@pytest.mark.parametrize("value", [BOUND, -BOUND])
def test_what_honest_clients_can_send_is_taken(value: int) -> None:
    collected = _collect({0: _with(2, value)})
    assert collected.events == {0: CONTRIBUTED}
    extreme = _reply(RING.encode(np.full(LENGTH, 1e300), LENGTH, 50, 1e9))
    collected = _collect(dict.fromkeys(range(4), extreme))
    assert collected.events == dict.fromkeys(range(4), CONTRIBUTED)
    assert collected.sums[0] is not None
    assert collected.sums[0].clipped == 4 * LENGTH


def test_a_client_whose_loss_is_not_finite_contributes_nothing() -> None:
    nothing = _reply(RING.nothing(LENGTH, 10))
    good = {0: _reply(_vector(0)), 2: _reply(_vector(2))}
    collected, alone = _collect({**good, 1: nothing}).sums[0], _collect(good).sums[0]
    assert collected is not None
    assert alone is not None
    np.testing.assert_array_equal(collected.totals, alone.totals)
    assert (collected.weight, collected.loss) == (alone.weight + 10, (40 * 1.5 + 10 * LOSS_MAX) / 50)
    assert (collected.contributors, collected.clipped) == (3, alone.clipped + LENGTH)


def test_if_nobodys_loss_is_finite_there_is_no_sum() -> None:
    requests = [{0: REQUEST, 1: REQUEST}, {2: REQUEST}]
    nothing = _reply(RING.nothing(LENGTH, 20))
    wire = Wire({0: nothing, 1: nothing, 2: _reply(_vector(2))})
    collected = SUM.collect(requests, wire)
    assert collected.sums[0] is None
    assert collected.sums[1] is not None
    why = "the sum was abandoned: no client's loss was finite"
    assert collected.events == {0: why, 1: why, 2: CONTRIBUTED}


def test_without_any_good_reply_there_is_no_sum() -> None:
    size = len(encode(REQUEST))
    nothing = _collect({}, [0, 2])
    assert (nothing.sums, nothing.events) == ((None,), {0: MISSING, 2: MISSING})
    assert (nothing.silent, nothing.refusals) == ({"vector": 2}, [])
    assert (nothing.uplink, nothing.downlink) == ({}, {0: size, 2: size})
    collected = _collect({0: BAD["nothing"][0], 1: BAD["late"][0]})
    assert collected.sums[0] is None
    assert collected.events.keys() == {0, 1}
    assert not {CONTRIBUTED, MISSING} & set(collected.events.values())


def test_each_client_is_asked_once_with_its_own_request_and_its_bytes_are_counted() -> None:
    behind = RoundRequest(7, bytes(32), bytes(32), bytes(32), CatchUp("outcomes", 5, (b"five", b"six")))
    wire = Wire({client: _reply(_vector(client)) for client in range(3)})
    collected = SUM.collect([{0: REQUEST, 1: behind, 2: REQUEST}], wire)
    (heard,) = wire.heard
    assert {client: decode(data, RoundRequest) for client, data in heard.items()} == {0: REQUEST, 1: behind, 2: REQUEST}
    assert collected.downlink == {client: len(data) for client, data in heard.items()}
    assert collected.downlink[1] > collected.downlink[0] == collected.downlink[2]
    assert collected.uplink == {client: len(reply) for client, reply in wire.replies.items()}
