"""A contribution's layout, its scale, and what encoding and decoding refuse."""

from fractions import Fraction

import numpy as np
import pytest

from baffle.core.arrays import I32
from baffle.core.ring import ELEMENT, EXTRAS, GUARD, LOSS_MAX, Ring, RingVector, Sum, add
from baffle.errors import MessageError

RING = Ring(clients=10, n_max=100, clip=4.0)


def signed(vector: RingVector) -> list[int]:
    return [int(element) for element in vector.view(np.int32)]


def changed(vector: RingVector, position: int, value: int) -> RingVector:
    vector = vector.copy()
    vector[position] = value % 2**32
    return vector


@pytest.mark.parametrize(
    ("ring", "exponent"),
    [
        (Ring(1, 1, 1.0), 28),
        (Ring(1, 1, 0.5), 29),
        (Ring(10, 100, 4.0), 17),
        (Ring(10, 100, 4.0, Fraction(5)), 14),
        (Ring(1000, 100_000, 100.0), -5),
    ],
)
def test_the_scale_is_the_largest_power_of_two_that_leaves_room(ring: Ring, exponent: int) -> None:
    assert ring.exponent == exponent
    assert ring.scale == 2.0**exponent


def test_a_contribution_holds_values_weight_one_clipped_and_loss() -> None:
    vector = RING.encode(np.array([0.5, -1.0, 4.0]), 3, weight=7, loss=2.0)
    assert vector.dtype == np.uint32
    assert len(vector) == 3 + EXTRAS
    s = 2**17
    assert signed(vector)[:6] == [7 * s // 2, -7 * s, 28 * s, 7, 1, 0]
    assert signed(vector)[6] == 7 * 2 * 2**13  # the loss's own scale: ⌊log₂((2²⁹ − 10) / (64 · 10 · 100))⌋ = 13


def test_the_losss_scale_does_not_depend_on_what_bounds_the_values() -> None:
    for ring in (Ring(10, 100, 4.0), Ring(10, 100, 1000.0), Ring(10, 100, 4.0, Fraction(16))):
        assert signed(ring.encode(np.zeros(2), 2, weight=3, loss=-1.0))[-1] == -3 * 2**13


def test_a_contribution_reads_back() -> None:
    total = RING.decode(RING.encode(np.array([0.5, -1.0, 4.0]), 3, weight=7, loss=2.0), 1)
    assert (total.totals / (RING.scale * total.weight)).tolist() == [0.5, -1.0, 4.0]
    assert total.totals.dtype == np.int32
    assert total[1:] == (7, 1, 0, 2.0)


def test_rounding_is_to_nearest_and_ties_go_to_even() -> None:
    coarse = Ring(clients=1, n_max=1, clip=float(2**28))
    assert coarse.scale == 1.0
    values = np.array([0.4, 0.5, 0.6, 1.5, 2.5, -0.5, -1.5, -2.6])
    assert signed(coarse.encode(values, 8, 1, 0.0))[:8] == [0, 0, 1, 2, 2, 0, -2, -3]


def test_a_slow_client_counts_each_direction_more_and_leaves_the_rest_at_zero() -> None:
    ring = Ring(10, 100, 4.0, tier_factor=Fraction(4))
    fast = signed(ring.encode(np.full(8, 0.5), 8, 5, 1.0))
    slow = signed(ring.encode(np.full(2, 0.5), 8, 5, 1.0))
    assert slow[:8] == [4 * fast[0], 4 * fast[1], 0, 0, 0, 0, 0, 0]
    assert slow[8:] == fast[8:]


def test_clipped_values_are_bounded_and_counted() -> None:
    vector = RING.encode(np.array([4.0, 4.001, -9.0, 1e300, -1e300]), 5, 1, 0.0)
    assert signed(vector)[:5] == [2**19, 2**19, -(2**19), 2**19, -(2**19)]
    assert RING.decode(vector, 1).clipped == 4


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_becomes_zeros_of_weight_0_that_count_as_clipped(bad: float) -> None:
    nothing = [0, 0, 0, 1, 2, 0]
    assert signed(RING.nothing(2)) == nothing
    assert signed(RING.encode(np.array([1.0, bad]), 2, 1, 0.5)) == nothing
    assert signed(RING.encode(np.array([1.0, 1.0]), 2, 7, bad, clipped_before=1)) == nothing


def test_a_sum_of_nothing_is_no_sum() -> None:
    total = add([RING.nothing(2)] * 3)
    RING.check(total, 3)
    with pytest.raises(MessageError, match=r"no client's loss was finite"):
        RING.decode(total, 3)


def test_values_clipped_on_the_way_are_counted_too_up_to_the_length() -> None:
    assert RING.decode(RING.encode(np.array([9.0, 0.0, 0.0]), 3, 1, 0.0, clipped_before=1), 1).clipped == 2
    assert RING.decode(RING.encode(np.array([9.0, 0.0, 0.0]), 3, 1, 0.0, clipped_before=40), 1).clipped == 3


@pytest.mark.parametrize(("loss", "reported"), [(1e9, LOSS_MAX), (-1e9, -LOSS_MAX), (-0.25, -0.25)])
def test_the_reported_loss_is_bounded(loss: float, reported: float) -> None:
    assert RING.decode(RING.encode(np.zeros(2), 2, 100, loss), 1).loss == reported


@pytest.mark.parametrize("weight", [0, -1, 101])
def test_a_weight_outside_its_bounds_is_refused(weight: int) -> None:
    with pytest.raises(MessageError, match=f"1 to 100, got {weight}"):
        RING.encode(np.zeros(2), 2, weight, 0.0)


def test_the_sum_wraps_around() -> None:
    a, b = np.array([2**32 - 1, 5], np.uint32), np.array([3, 2**32 - 5], np.uint32)
    total = add([a, b, a])
    assert total.dtype == np.uint32
    assert total.tolist() == [1, 5]


def test_a_sum_of_contributions_adds_weights_and_averages_losses() -> None:
    vectors = [RING.encode(np.array([1.0, -0.5]), 2, 30, 1.0), RING.encode(np.array([-1.0, 0.5]), 2, 10, 3.0)]
    total = RING.decode(add(vectors), 2)
    assert (total.totals / RING.scale).tolist() == [20.0, -10.0]
    assert (total.weight, total.contributors) == (40, 2)
    assert total.loss == pytest.approx(1.5)


def test_the_wire_form_is_little_endian() -> None:
    assert np.array([1, 2**32 - 2], np.uint32).astype(ELEMENT).tobytes().hex() == "01000000feffffff"


GOOD = RING.encode(np.array([1.0, -1.0]), 2, 50, 1.0)
WEIGHT, ONES, CLIPPED = -4, -3, -2


@pytest.mark.parametrize(
    ("vector", "contributors", "fault"),
    [
        (GOOD, 2, "claims 1 contributors"),
        (changed(GOOD, ONES, 2), 1, "claims 2 contributors"),
        (changed(GOOD, ONES, -1), 1, "claims -1 contributors"),
        (changed(GOOD, WEIGHT, 0), 1, "more than 0 clients can send"),
        (changed(RING.nothing(2), -1, 1), 1, "mean loss"),
        (changed(GOOD, WEIGHT, 101), 1, "sample weight 101"),
        (changed(GOOD, WEIGHT, -5), 1, "sample weight -5"),
        (changed(GOOD, 0, GUARD // 10 + 1), 1, "more than 1 clients can send"),
        (changed(GOOD, 1, -(GUARD // 10) - 1), 1, "more than 1 clients can send"),
        (changed(GOOD, 1, -(2**31)), 1, "a total of 2147483648"),
        (changed(GOOD, CLIPPED, 3), 1, "claims 3 clipped values of 2"),
        (changed(GOOD, CLIPPED, -1), 1, "claims -1 clipped"),
    ],
)
def test_a_sum_that_honest_clients_cannot_have_made_is_refused(
    vector: RingVector, contributors: int, fault: str
) -> None:
    with pytest.raises(MessageError, match=fault):
        RING.decode(vector, contributors)


@pytest.mark.parametrize(
    "vector",
    [changed(GOOD, 0, GUARD // 10), changed(GOOD, 0, -(GUARD // 10)), changed(GOOD, CLIPPED, 2)],
)
def test_what_honest_clients_can_make_is_read(vector: RingVector) -> None:
    assert isinstance(RING.decode(vector, 1), Sum)


def test_totals_are_read_as_signed_numbers() -> None:
    totals: I32 = RING.decode(GOOD, 1).totals
    assert totals.tolist() == [50 * 2**17, -50 * 2**17]


@pytest.mark.parametrize(("values", "length"), [(0, 8), (1, 8), (9, 8)])
def test_more_or_fewer_values_than_a_tier_holds_are_refused(values: int, length: int) -> None:
    ring = Ring(3, 10, 1.0, Fraction(4))
    with pytest.raises(MessageError, match=f"expected 2 to 8 values, got {values}"):
        ring.encode(np.zeros(values), length, 1, 0.0)


@pytest.mark.parametrize(("size", "contributors"), [(6, 0), (3, 1), (6, -1)])
def test_what_is_no_sum_is_refused(size: int, contributors: int) -> None:
    with pytest.raises(MessageError, match="not a sum"):
        RING.decode(np.zeros(size, np.uint32), contributors)


def test_a_loss_that_nobody_can_have_is_refused() -> None:
    vector = RING.encode(np.zeros(2), 2, 5, 0.0)
    vector[-1] = 2**31 - 1
    with pytest.raises(MessageError, match="mean loss"):
        RING.decode(vector, 1)
