"""A contribution's layout, what encoding and decoding refuse, and how the sums of groups are combined."""

from dataclasses import replace
from fractions import Fraction
from random import Random

import numpy as np
import pytest
from hypothesis import given, strategies as st

from baffle.core.arrays import F32, I32
from baffle.core.ring import GUARD, LOSS_MAX, Combine, Ring, RingVector, Totals, add, combine_gradients, combine_totals
from baffle.errors import MessageError

RING = Ring(clients=10, n_max=100, clip=4.0)
SILENT = Ring(clients=10, n_max=100, clip=4.0, silent=True)


def signed(vector: RingVector) -> list[int]:
    return [int(element) for element in vector.view(np.int32)]


def changed(vector: RingVector, position: int, value: int) -> RingVector:
    vector = vector.copy()
    vector[position] = value % 2**32
    return vector


def test_the_losss_scale_does_not_depend_on_what_bounds_the_values() -> None:
    for ring in (Ring(10, 100, 4.0), Ring(10, 100, 1000.0), Ring(10, 100, 4.0, Fraction(16))):
        assert signed(ring.encode(np.zeros(2), 2, weight=3, loss=-1.0))[-1] == -3 * 2**13


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


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_becomes_zeros_of_full_weight_that_count_as_clipped(bad: float) -> None:
    nothing = [0, 0, 7, 1, 2, 7 * 64 * 2**13]
    assert signed(RING.nothing(2, 7)) == nothing
    assert signed(RING.encode(np.array([1.0, bad]), 2, 7, 0.5)) == nothing
    assert signed(RING.encode(np.array([1.0, 1.0]), 2, 7, bad, clipped_before=1)) == nothing
    with_head = replace(RING, head=1)
    assert signed(with_head.encode(np.array([1.0]), 2, 7, 0.5, head=np.array([bad]))) == nothing


def test_a_sum_of_nothing_is_no_sum() -> None:
    total = add([RING.nothing(2, 9)] * 3)
    RING.check(total, 3)
    with pytest.raises(MessageError, match=r"no client's loss was finite"):
        RING.decode(total, 3)
    ahead, behind = (RING.encode(np.full(2, sign * 9.0), 2, 9, 3.0) for sign in (1, -1))
    assert not RING.decode(add([ahead, behind]), 2).totals.any()  # two finite losses, of which nothing is left


def test_in_a_silent_ring_nothing_but_the_totals_depends_on_the_values() -> None:
    said = [SILENT.encode(np.array(values), 2, 1, loss) for values, loss in (([9.0, 1.0], 2.0), ([np.nan, 1.0], 2.0))]
    assert [signed(vector)[2:] for vector in said] == [[1, 1, 0, 0]] * 2
    loud = Ring(10, 100, 4.0).encode(np.array([9.0, 1.0]), 2, 1, 2.0)
    assert signed(said[0])[:2] == signed(loud)[:2]
    assert SILENT.decode(add(said), 2)[1:] == (2, 2, 0, None)
    assert SILENT.decode(said[1], 1)[1:] == (1, 1, 0, None)


def test_values_clipped_on_the_way_are_counted_too_up_to_the_length() -> None:
    assert RING.decode(RING.encode(np.array([9.0, 0.0, 0.0]), 3, 1, 0.0, clipped_before=1), 1).clipped == 2
    assert RING.decode(RING.encode(np.array([9.0, 0.0, 0.0]), 3, 1, 0.0, clipped_before=40), 1).clipped == 3


def test_the_numbers_of_an_exact_head_have_a_clip_of_their_own() -> None:
    ring = Ring(10, 100, 4.0, head=2, head_clip=0.5)
    vector = ring.encode(np.array([3.0]), 3, 2, 0.5, head=np.array([9.0, -0.25]))
    read = ring.decode(vector, 1)
    assert (read.totals[1:] / (2 * ring.head_scale)).tolist() == [0.5, -0.25]
    assert (read.totals[0] / (2 * ring.scale), read.clipped) == (3.0, 1)
    for place in (1, 2):
        with pytest.raises(MessageError, match="can send within their bounds"):
            ring.decode(changed(vector, place, int(ring.head_scale) + 2), 1)


def test_the_steps_of_a_round_are_read_in_a_row() -> None:
    """Each has its scalars and its head; what was clipped adds up, and the loss is the mean."""
    ring = Ring(1, 1, 1.01, head=1, head_clip=1.9, steps=2)
    steps = [ring.encode(np.array([value]), 2, 1, loss, head=np.array([9.0])) for value, loss in ((9, 1.0), (0.5, 3.0))]
    whole = ring.joined(steps, 4)
    read = ring.decode(whole, 1)
    scale, head_scale = ring.scale, ring.head_scale
    assert np.allclose(read.totals.reshape(2, 2) / [scale, head_scale], [[1.01, 1.9], [0.5, 1.9]])
    assert (read.clipped, read.loss) == (3, 2.0)
    for place, most in enumerate([1.01 * scale, 1.9 * head_scale] * 2):
        with pytest.raises(MessageError, match="can send within their bounds"):
            ring.decode(changed(whole, place, int(most) + 2), 1)


@pytest.mark.parametrize(("loss", "reported"), [(1e9, LOSS_MAX), (-1e9, -LOSS_MAX), (-0.25, -0.25)])
def test_the_reported_loss_is_bounded(loss: float, reported: float) -> None:
    assert RING.decode(RING.encode(np.zeros(2), 2, 100, loss), 1).loss == reported


@pytest.mark.parametrize("weight", [0, -1, 101])
def test_a_weight_outside_its_bounds_is_refused(weight: int) -> None:
    with pytest.raises(MessageError, match=f"1 to 100, got {weight}"):
        RING.encode(np.zeros(2), 2, weight, 0.0)
    with pytest.raises(MessageError, match="must be 1 to 1"):
        SILENT.encode(np.zeros(2), 2, 2, 0.0)


GOOD = RING.encode(np.array([1.0, -1.0]), 2, 50, 1.0)
WEIGHT, ONES, CLIPPED, LOSS = -4, -3, -2, -1


@pytest.mark.parametrize(
    ("vector", "contributors", "fault"),
    [
        (changed(GOOD, ONES, -1), 1, "claims -1 contributors"),
        (changed(GOOD, WEIGHT, 0), 1, "sample weight 0, expected 1 with 1 to 100"),
        (changed(GOOD, WEIGHT, 12), 1, "more than 1 clients of sample weight 12"),
        (add([GOOD, changed(GOOD, WEIGHT, -49)]), 2, "sample weight 1, expected 2 with 2 to 200"),
        (changed(GOOD, WEIGHT, 101), 1, "sample weight 101"),
        (changed(GOOD, WEIGHT, -5), 1, "sample weight -5"),
        (changed(GOOD, 1, -(2**31)), 1, "a total of 2147483648"),
        (changed(GOOD, CLIPPED, 3), 1, "claims 3 clipped values of 2"),
        (changed(GOOD, CLIPPED, -1), 1, "claims -1 clipped"),
        (changed(GOOD, LOSS, 2**31 - 1), 1, "mean loss"),
        (np.zeros(6, np.uint32), 0, "not a sum"),
        (np.zeros(3, np.uint32), 1, "not a sum"),
    ],
)
def test_a_sum_that_honest_clients_cannot_have_made_is_refused(
    vector: RingVector, contributors: int, fault: str
) -> None:
    with pytest.raises(MessageError, match=fault):
        RING.decode(vector, contributors)


@pytest.mark.parametrize(("place", "value"), [(WEIGHT, 0), (WEIGHT, 2), (CLIPPED, 1), (LOSS, -1), (0, 2**19 + 2)])
def test_a_silent_ring_takes_no_other_weight_and_nothing_that_is_told(place: int, value: int) -> None:
    vector = SILENT.encode(np.array([4.0, -1.0]), 2, 1, 1.0)
    SILENT.check(vector, 1)
    with pytest.raises(MessageError):
        SILENT.check(changed(vector, place, value), 1)


@pytest.mark.parametrize(("values", "length"), [(0, 8), (1, 8), (9, 8)])
def test_more_or_fewer_values_than_a_tier_holds_are_refused(values: int, length: int) -> None:
    ring = Ring(3, 10, 1.0, Fraction(4))
    with pytest.raises(MessageError, match=f"expected 2 to 8 values, got {values}"):
        ring.encode(np.zeros(values), length, 1, 0.0)
    with pytest.raises(MessageError, match="expected 0 numbers of an exact head, got 1"):
        ring.encode(np.zeros(8), 8, 1, 0.0, head=np.zeros(1))


# Groups

LENGTH = 6
BOUND = GUARD // 16

weights_ = st.integers(1, 100)
honest_totals = st.builds(
    lambda values, weight: Totals((np.array(values) * weight).astype(np.int32), weight),
    st.lists(st.integers(-GUARD // 2000, GUARD // 2000), min_size=LENGTH, max_size=LENGTH),
    weights_,
)
"""Within the ring's bounds: a number per weight, however many weights there are."""
numbers = st.lists(st.integers(-BOUND, BOUND), min_size=LENGTH, max_size=LENGTH)
totals = st.builds(lambda n, w: Totals(np.array(n, np.int32), w), numbers, weights_)
edges = st.builds(
    lambda edge, w: Totals(np.full(LENGTH, edge, np.int32), w), st.sampled_from([-GUARD, GUARD]), weights_
)
gradients = st.lists(st.floats(-1e6, 1e6, width=32), min_size=LENGTH, max_size=LENGTH).map(
    lambda values: np.array(values, np.float32)
)


@given(st.lists(totals, min_size=1, max_size=9))
def test_the_mean_of_all_is_the_sum_of_all(groups: list[Totals]) -> None:
    combined = combine_totals(groups, "mean")
    assert combined.weight == sum(group.weight for group in groups)
    assert combined.numbers.dtype == np.int32
    assert combined.numbers.tolist() == [
        sum(column) for column in zip(*(g.numbers.tolist() for g in groups), strict=True)
    ]


@pytest.mark.parametrize("how", ["mean", "median"])
@given(totals)
def test_one_group_is_itself(how: Combine, group: Totals) -> None:
    combined = combine_totals([group], how)
    assert combined.weight == group.weight
    assert np.array_equal(combined.numbers, group.numbers)
    gradient = group.numbers.astype(np.float32)
    assert np.array_equal(combine_gradients([gradient], [3], how), gradient)


@pytest.mark.parametrize("how", ["mean", "median"])
@given(st.lists(totals, min_size=2, max_size=7), st.randoms())
def test_the_order_of_groups_changes_no_bit_of_totals(how: Combine, groups: list[Totals], random: Random) -> None:
    order = list(groups)
    random.shuffle(order)
    one, other = combine_totals(groups, how), combine_totals(order, how)
    assert one.weight == other.weight
    assert np.array_equal(one.numbers, other.numbers)


@given(st.lists(st.tuples(gradients, weights_), min_size=2, max_size=7), st.randoms())
def test_the_order_of_groups_changes_no_bit_of_a_median_gradient(groups: list[tuple[F32, int]], random: Random) -> None:
    order = list(groups)
    random.shuffle(order)
    combined = [combine_gradients([g for g, _ in some], [w for _, w in some], "median") for some in (groups, order)]
    assert np.array_equal(combined[0], combined[1])
    assert combined[0].dtype == np.float32


@given(st.lists(honest_totals, min_size=2, max_size=6), st.lists(totals | edges, max_size=5), st.randoms())
def test_fewer_than_half_of_the_groups_move_no_median_beyond_the_others(
    honest: list[Totals], liars: list[Totals], random: Random
) -> None:
    """Whatever liars send: each number per weight stays between the smallest and the largest of the others."""
    groups = [*honest, *liars[: len(honest) - 1]]
    random.shuffle(groups)
    combined = combine_totals(groups, "median")
    rows, average = np.stack([group.numbers / group.weight for group in honest]), combined.numbers / combined.weight
    assert (average >= rows.min(axis=0) - 1 / combined.weight).all()
    assert (average <= rows.max(axis=0) + 1 / combined.weight).all()


@given(
    st.lists(gradients, min_size=2, max_size=6), st.sampled_from([-np.inf, np.inf, -3e38, 0.0, 3e38]), st.integers(0, 6)
)
def test_one_gradient_moves_no_median_beyond_the_others(honest: list[F32], value: float, place: int) -> None:
    liar = np.full(LENGTH, value, np.float32)
    combined = combine_gradients([*honest[:place], liar, *honest[place:]], [1] * (len(honest) + 1), "median")
    rows = np.stack(honest)
    assert (combined >= rows.min(axis=0)).all()
    assert (combined <= rows.max(axis=0)).all()


def test_a_mean_weighs_gradients() -> None:
    one, other = np.ones(LENGTH, np.float32), np.full(LENGTH, 4, np.float32)
    assert combine_gradients([one, other], [2, 1], "mean").tolist() == [2.0] * LENGTH
    assert combine_gradients([one, other], [2, 1], "median").tolist() == [2.5] * LENGTH


def test_totals_beyond_the_ring_are_refused() -> None:
    most: I32 = np.full(LENGTH, GUARD, np.int32)
    with pytest.raises(MessageError, match="more than clients can send"):
        combine_totals([Totals(most, 1), Totals(most, 1)], "mean")
    assert combine_totals([Totals(most, 1), Totals(-most, 1)], "mean").numbers.tolist() == [0] * LENGTH


def test_combining_leaves_its_arguments_alone() -> None:
    groups = [Totals(np.arange(LENGTH, dtype=np.int32) * sign, 2) for sign in (3, -1, 2)]
    before = [group.numbers.copy() for group in groups]
    grads = [group.numbers.astype(np.float32) for group in groups]
    for how in ("mean", "median"):
        combine_totals(groups, how)
        combine_gradients(grads, [1, 2, 3], how)
    for group, gradient, old in zip(groups, grads, before, strict=True):
        assert np.array_equal(group.numbers, old)
        assert np.array_equal(gradient, old)
