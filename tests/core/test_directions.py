"""A direction is a pure function of key, number and slice, with the moments of its distribution."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baffle.core.directions import (
    DISTRIBUTIONS,
    GAUSSIAN,
    NUMBERS_AT_ONCE,
    RADEMACHER,
    Directions,
    Distribution,
    Support,
    blocks,
    coverage,
    dense,
    gaussian_table,
)
from baffle.core.seeds import Scratch

KEY = bytes(range(32))
BOTH = pytest.mark.parametrize("distribution", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS)

supports_within_50 = st.lists(
    st.tuples(
        st.lists(st.integers(0, 50), min_size=4, max_size=4, unique=True).map(sorted), st.booleans(), st.integers(1, 4)
    ),
    max_size=12,
).map(
    lambda runs: [
        Support(a, b, (c, d) if split else (0, 0)) for (a, b, c, d), split, count in runs for _ in range(count)
    ]
)


def test_the_table_is_a_standard_normal_in_units_of_its_distribution() -> None:
    z = gaussian_table() * GAUSSIAN.unit
    assert np.mean(z) == 0
    assert np.mean(z**2) == pytest.approx(0.9999991, abs=5e-8)
    assert np.mean(z**4) / np.mean(z**2) ** 2 == pytest.approx(2.9992, abs=5e-5)


def test_the_table_is_symmetric_sorted_and_cannot_be_changed() -> None:
    table = gaussian_table()
    assert np.array_equal(table, -table[::-1])
    assert np.all(np.diff(table) >= 0)
    with pytest.raises(ValueError, match="read-only"):
        table[0] = 0


def test_a_distribution_states_its_largest_number() -> None:
    assert int(np.abs(gaussian_table()).max()) == GAUSSIAN.bound == 17715
    assert RADEMACHER.bound == 1


@pytest.mark.parametrize(("distribution", "dtype"), [(GAUSSIAN, np.int16), (RADEMACHER, np.int8)])
def test_numbers_stay_as_small_as_they_are_exact(distribution: Distribution, dtype: type) -> None:
    drawn = Directions(KEY, distribution).draw(range(3), 5, 20)
    assert drawn.dtype == dtype
    assert drawn.shape == (3, 15)


def test_rademacher_is_plus_or_minus_one() -> None:
    assert set(np.unique(Directions(KEY, RADEMACHER).draw(range(5), 0, 999)).tolist()) == {-1, 1}


@settings(deadline=None, max_examples=100)
@given(
    distribution=st.sampled_from(list(DISTRIBUTIONS.values())),
    first=st.integers(0, 2**40),
    rows=st.integers(1, 5),
    start=st.integers(0, 400),
    size=st.integers(1, 300),
)
def test_a_slice_of_some_directions_is_drawn_as_if_all_were(
    distribution: Distribution, first: int, rows: int, start: int, size: int
) -> None:
    directions = Directions(KEY, distribution)
    whole = directions.draw(range(first, first + 5), 0, 700)
    part = directions.draw(range(first + 5 - rows, first + 5), start, start + size)
    assert np.array_equal(part, whole[5 - rows :, start : start + size])


@BOTH
def test_directions_have_mean_zero_and_unit_variance_and_are_not_correlated(distribution: Distribution) -> None:
    n = 40_000
    z = Directions(KEY, distribution).draw(range(8), 0, n) * distribution.unit
    assert np.all(np.abs(z.mean(axis=1)) < 4.5 / np.sqrt(n))
    assert np.all(np.abs(z @ z.T / n - np.eye(8)) < 4.5 * np.sqrt(2 / n))
    neighbours = np.sum(z[:, 1:] * z[:, :-1], axis=1) / n
    assert np.all(np.abs(neighbours) < 4.5 / np.sqrt(n))


@BOTH
def test_another_key_gives_other_directions(distribution: Distribution) -> None:
    one, other = (Directions(bytes([i]) * 32, distribution).draw(range(1), 0, 10_000)[0] for i in (0, 1))
    assert abs(np.corrcoef(one, other)[0, 1]) < 0.045


def test_dense_directions_touch_everything() -> None:
    assert dense(7, 3) == (Support(0, 7),) * 3
    assert Support(3, 7).size == 4
    assert Support(3, 7, (9, 11)).size == 6


@settings(deadline=None)
@given(supports=supports_within_50, most=st.none() | st.integers(1, 7))
def test_blocks_name_every_direction_once_with_its_support(supports: list[Support], most: int | None) -> None:
    pieces = list(blocks(supports, most=most))
    named = [(k, support) for numbers, support in pieces for k in numbers]
    assert sorted(named) == list(enumerate(supports))
    first_seen = {support: place for place, support in reversed(list(enumerate(supports)))}
    assert named == sorted(named, key=lambda pair: (first_seen[pair[1]], pair[0]))
    assert all(1 <= len(numbers) <= (most or len(supports)) for numbers, _ in pieces)


@pytest.mark.parametrize("n", [1, 1000, NUMBERS_AT_ONCE - 1, NUMBERS_AT_ONCE + 1, 3 * NUMBERS_AT_ONCE])
def test_a_block_holds_no_more_numbers_than_fit_or_one_direction(n: int) -> None:
    sizes = [len(numbers) for numbers, _ in blocks(dense(n, 600))]
    assert sum(sizes) == 600
    assert max(sizes) == max(1, min(600, NUMBERS_AT_ONCE // n))


@settings(deadline=None)
@given(supports=supports_within_50)
def test_coverage_counts_the_directions_that_touch_a_weight(supports: list[Support]) -> None:
    counted = [sum(s.start <= i < s.stop or i in range(*s.tail) for s in supports) for i in range(50)]
    assert coverage(supports, 50).tolist() == counted


@settings(deadline=None)
@given(supports=supports_within_50, ends=st.lists(st.integers(0, 50), min_size=2, max_size=2).map(sorted))
def test_coverage_of_a_piece_is_a_piece_of_the_coverage(supports: list[Support], ends: list[int]) -> None:
    start, stop = ends
    assert coverage(supports, stop, start).tolist() == coverage(supports, 50)[start:stop].tolist()


@settings(deadline=None)
@given(supports=supports_within_50, ends=st.lists(st.integers(0, 50), min_size=2, max_size=2).map(sorted))
def test_a_range_of_weights_meets_a_range_of_a_supports_numbers(supports: list[Support], ends: list[int]) -> None:
    for support in supports:
        weights = [*range(support.start, support.stop), *range(*support.tail)]
        first, last = map(support.below, ends)
        assert weights[first:last] == [i for i in weights if ends[0] <= i < ends[1]]
        pairs = support.parts(first, last)
        assert [i for part, _ in pairs for i in range(part.start, part.stop)] == weights[first:last]
        assert [i for _, here in pairs for i in range(here.start, here.stop)] == list(range(last - first))


@BOTH
def test_scratch_memory_changes_no_number(distribution: Distribution) -> None:
    directions, scratch = Directions(bytes(32), distribution), Scratch()
    for numbers, start, stop in [
        (range(3), 5, 900),
        (range(7, 8), 0, 3),
        (range(2, 40), 1000, 2001),
        (range(3), 5, 900),
    ]:
        fresh = directions.draw(numbers, start, stop)
        assert np.array_equal(directions.draw(numbers, start, stop, scratch), fresh)


@BOTH
def test_what_is_drawn_without_scratch_memory_stays(distribution: Distribution) -> None:
    directions = Directions(bytes(32), distribution)
    one, other = directions.draw(range(2), 0, 100), directions.draw(range(2, 4), 0, 100)
    assert not np.shares_memory(one, other)
