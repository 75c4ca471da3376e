"""Clipping in integers: no rounding, however unlucky, lets a vector out of its bound."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baffle.core.arrays import I64
from baffle.privacy.clipping import LARGEST, bound_l1, clip_encoded, squared_norm

entries = st.integers(-LARGEST, LARGEST)
vectors = st.lists(entries, max_size=40).map(lambda numbers: np.array(numbers, np.int64))
bounds = st.one_of(st.integers(0, 50), st.integers(0, LARGEST))


def exact_square(vector: I64) -> int:
    return sum(int(q) ** 2 for q in vector.tolist())


@settings(deadline=None, max_examples=500)
@given(vector=vectors, delta_2=bounds)
def test_a_clipped_vector_is_within_its_bound_exactly(vector: I64, delta_2: int) -> None:
    clipped = clip_encoded(vector, delta_2)
    assert exact_square(clipped) <= delta_2**2
    assert (clip_encoded(clipped, delta_2) == clipped).all()
    assert (np.abs(clipped) <= np.abs(vector)).all()
    assert (clipped * vector >= 0).all() or exact_square(vector) > 2**62  # signs stay; the product may overflow
    if exact_square(vector) <= delta_2**2:
        assert (clipped == vector).all()


@settings(deadline=None, max_examples=200)
@given(vector=vectors, delta_2=st.integers(1, LARGEST))
def test_clipping_loses_less_than_a_unit_a_coordinate_and_a_part_for_the_rounded_norm(
    vector: I64, delta_2: int
) -> None:
    norm = math.sqrt(exact_square(vector))
    if norm > delta_2:
        ideal = np.abs(vector) * (delta_2 / norm)
        assert (np.abs(clip_encoded(vector, delta_2)) > ideal * (1 - 1 / norm - 1e-12) - 1 - 1e-6).all()


@settings(deadline=None)
@given(vector=vectors)
def test_the_norm_is_exact(vector: I64) -> None:
    assert squared_norm(vector) == exact_square(vector)


def test_a_long_vector_of_the_largest_entries_does_not_overflow() -> None:
    longest = np.full(100_000, -LARGEST)
    assert squared_norm(longest) == 100_000 * 4**31
    clipped = clip_encoded(longest, LARGEST)
    assert set(clipped.tolist()) == {-(LARGEST * LARGEST // (math.isqrt(100_000 * 4**31 - 1) + 1))}
    assert squared_norm(clipped) <= LARGEST**2


def test_a_vector_on_the_edge_stays_and_one_beyond_moves() -> None:
    assert clip_encoded(np.array([3, -4]), 5).tolist() == [3, -4]
    assert clip_encoded(np.array([3, -5]), 5).tolist() == [2, -4]
    assert clip_encoded(np.array([3, -5]), 0).tolist() == [0, 0]
    assert clip_encoded(np.array([], np.int64), 0).tolist() == []


def test_a_copy_is_returned() -> None:
    vector = np.array([1, 2])
    clip_encoded(vector, 100)[0] = 9
    assert vector.tolist() == [1, 2]


@pytest.mark.parametrize("entry", [LARGEST + 1, -LARGEST - 1, -(2**63)])
def test_entries_that_could_overflow_are_refused(entry: int) -> None:
    with pytest.raises(ValueError, match="within ±2³¹"):
        clip_encoded(np.array([entry]), 5)
    with pytest.raises(ValueError, match="0 to 2³¹"):
        clip_encoded(np.array([1]), LARGEST + 1)


@given(numbers=st.lists(st.integers(-30, 30), min_size=1, max_size=12), spare=st.integers(0, 20))
def test_no_vector_within_the_l2_bound_exceeds_the_l1_bound(numbers: list[int], spare: int) -> None:
    delta_2 = math.isqrt(sum(q * q for q in numbers)) + 1
    assert sum(abs(q) for q in numbers) <= bound_l1(delta_2, len(numbers) + spare)


def test_the_l1_bound_is_reached() -> None:
    assert bound_l1(10, 4) == 20  # (5, 5, 5, 5)
    assert bound_l1(2, 100) == 4  # four ones
    assert bound_l1(3, 2) == 5  # √18, rounded up
    assert bound_l1(0, 5) == 0
