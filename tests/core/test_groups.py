"""Combining the sums of groups: their mean is the sum of all, and no single group moves a median far."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baffle.core.arrays import F32, I32
from baffle.core.groups import Totals, combine_gradients, combine_totals
from baffle.core.ring import GUARD
from baffle.errors import MessageError

LENGTH = 6
BOUND = GUARD // 16

weights_ = st.integers(1, 100)
honest_totals = st.builds(
    lambda values, weight: Totals((np.array(values) * weight).astype(np.int32), weight),
    st.lists(st.integers(-GUARD // 1000, GUARD // 1000), min_size=LENGTH, max_size=LENGTH),
    weights_,
)
"""Within the ring's bounds: a number per weight, however many weights there are."""
numbers = st.lists(st.integers(-BOUND, BOUND), min_size=LENGTH, max_size=LENGTH)
totals = st.builds(lambda n, w: Totals(np.array(n, np.int32), w), numbers, weights_)
gradients = st.lists(st.floats(-1e6, 1e6, width=32), min_size=LENGTH, max_size=LENGTH).map(
    lambda values: np.array(values, np.float32)
)
ODD = st.sampled_from([1, 3, 5, 7])


def averages(groups: Sequence[Totals]) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    rows: np.ndarray[tuple[int, int], np.dtype[np.float64]] = np.stack([g.numbers / g.weight for g in groups])
    return rows


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
def test_one_group_is_itself(how: str, group: Totals) -> None:
    combined = combine_totals([group], how)  # type: ignore[arg-type]
    assert combined.weight == group.weight
    assert np.array_equal(combined.numbers, group.numbers)
    gradient = group.numbers.astype(np.float32)
    assert np.array_equal(combine_gradients([gradient], [3], how), gradient)  # type: ignore[arg-type]


@pytest.mark.parametrize("how", ["mean", "median"])
@given(st.lists(totals, min_size=2, max_size=7), st.randoms(use_true_random=False))
def test_the_order_of_groups_changes_no_bit_of_totals(how: str, groups: list[Totals], random: object) -> None:
    order = list(groups)
    random.shuffle(order)  # type: ignore[attr-defined]
    one, other = combine_totals(groups, how), combine_totals(order, how)  # type: ignore[arg-type]
    assert one.weight == other.weight
    assert np.array_equal(one.numbers, other.numbers)


@given(st.lists(st.tuples(gradients, weights_), min_size=2, max_size=7), st.randoms(use_true_random=False))
def test_the_order_of_groups_changes_no_bit_of_a_median_gradient(groups: list[tuple[F32, int]], random: object) -> None:
    order = list(groups)
    random.shuffle(order)  # type: ignore[attr-defined]
    combined = [combine_gradients([g for g, _ in some], [w for _, w in some], "median") for some in (groups, order)]
    assert np.array_equal(combined[0], combined[1])
    assert combined[0].dtype == np.float32


@given(totals, ODD)
def test_the_median_of_identical_groups_is_their_mean(group: Totals, count: int) -> None:
    combined = combine_totals([group] * count, "median")
    assert combined.weight == count * group.weight
    assert np.array_equal(combined.numbers, group.numbers * count)


@given(gradients, ODD)
def test_the_median_of_identical_gradients_is_the_gradient(gradient: F32, count: int) -> None:
    assert np.array_equal(combine_gradients([gradient] * count, [1] * count, "median"), gradient)
    assert np.array_equal(combine_gradients([gradient] * count, [1] * count, "mean"), gradient)


@given(st.lists(honest_totals, min_size=2, max_size=6), totals, st.integers(0, 6))
def test_one_group_moves_no_median_beyond_the_others(honest: list[Totals], liar: Totals, place: int) -> None:
    """Whatever the liar sends: each number per weight stays between the smallest and the largest of the others."""
    groups = [*honest[:place], liar, *honest[place:]]
    combined = combine_totals(groups, "median")
    rows, rounding = averages(honest), 1 / combined.weight
    average = combined.numbers / combined.weight
    assert (average >= rows.min(axis=0) - rounding).all()
    assert (average <= rows.max(axis=0) + rounding).all()


@given(st.lists(honest_totals, min_size=2, max_size=6), st.sampled_from([-GUARD, GUARD]), weights_)
def test_a_group_at_the_rings_edge_moves_no_median_beyond_the_others(
    honest: list[Totals], edge: int, weight: int
) -> None:
    combined = combine_totals([*honest, Totals(np.full(LENGTH, edge, np.int32), weight)], "median")
    rows, rounding = averages(honest), 1 / combined.weight
    assert (combined.numbers / combined.weight >= rows.min(axis=0) - rounding).all()
    assert (combined.numbers / combined.weight <= rows.max(axis=0) + rounding).all()


@given(
    st.lists(gradients, min_size=2, max_size=6),
    st.sampled_from([-np.inf, np.inf, -3e38, 0.0, 3e38]),
    st.integers(0, 6),
)
def test_one_gradient_moves_no_median_beyond_the_others(honest: list[F32], value: float, place: int) -> None:
    liar = np.full(LENGTH, value, np.float32)
    combined = combine_gradients([*honest[:place], liar, *honest[place:]], [1] * (len(honest) + 1), "median")
    rows = np.stack(honest)
    assert (combined >= rows.min(axis=0)).all()
    assert (combined <= rows.max(axis=0)).all()


@given(st.lists(honest_totals, min_size=3, max_size=7))
@settings(max_examples=50)
def test_fewer_than_half_of_the_groups_move_no_median_beyond_the_others(groups: list[Totals]) -> None:
    liars = [Totals(np.full(LENGTH, GUARD, np.int32), 1)] * ((len(groups) - 1) // 2)
    honest = groups[len(liars) :]
    combined = combine_totals([*liars, *honest], "median")
    rows = averages(honest)
    assert (combined.numbers / combined.weight <= rows.max(axis=0) + 1 / combined.weight).all()


def test_a_mean_is_moved_by_one_group() -> None:
    """What the median is for."""
    honest = [np.ones(LENGTH, np.float32)] * 2
    liar = np.full(LENGTH, 1e6, np.float32)
    assert combine_gradients([*honest, liar], [1, 1, 1], "mean")[0] > 1e5
    assert combine_gradients([*honest, liar], [1, 1, 1], "median")[0] == 1


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
