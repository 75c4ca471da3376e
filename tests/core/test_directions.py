"""Directions are not correlated, slices of them are drawn alone, and layouts share them out by their law. That two
implementations draw the same numbers is a law (tests/laws/test_direction_vectors.py)."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from baffle.core.directions import (
    DISTRIBUTIONS,
    GAUSSIAN,
    NUMBERS_AT_ONCE,
    OUTER,
    RADEMACHER,
    Directions,
    Distribution,
    Layout,
    LayoutEntry,
    Support,
    allocate,
    blocks,
    coverage,
    dense,
    distribution_of,
    gaussian_table,
    lay_out,
    layout_of,
    merge,
    rows_of,
    supports,
)
from baffle.core.outer import Shapes, size_of
from baffle.core.seeds import Scratch

KEY = bytes(range(32))
BOTH = pytest.mark.parametrize("distribution", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS)

two_ends = st.lists(st.integers(0, 50), min_size=2, max_size=2).map(sorted)
four_ends = st.lists(st.integers(0, 50), min_size=4, max_size=4, unique=True).map(sorted)
supports_within_50 = st.lists(st.tuples(four_ends, st.booleans(), st.integers(1, 4)), max_size=12).map(
    lambda runs: [
        Support(a, b, (c, d) if split else (0, 0)) for (a, b, c, d), split, count in runs for _ in range(count)
    ]
)
models = st.lists(st.lists(st.integers(1, 7), max_size=4).map(tuple), min_size=1, max_size=5).map(tuple)


def outer_directions(shapes: Shapes) -> Directions:
    return Directions(KEY, distribution_of(OUTER, shapes))


@pytest.mark.parametrize(("distribution", "dtype"), [(GAUSSIAN, np.int16), (RADEMACHER, np.int8)])
def test_numbers_stay_as_small_as_they_are_exact(distribution: Distribution, dtype: type) -> None:
    drawn = Directions(KEY, distribution).draw(range(3), 5, 20)
    assert drawn.dtype == dtype
    assert drawn.shape == (3, 15)
    assert np.abs(drawn).max() <= distribution.bound
    assert np.abs(gaussian_table()).max() == GAUSSIAN.bound


@pytest.mark.parametrize("distribution", [*DISTRIBUTIONS.values(), distribution_of(OUTER, ((200, 150), (10_000,)))])
def test_directions_have_mean_zero_and_unit_variance_and_are_not_correlated(distribution: Distribution) -> None:
    n = 40_000
    z = Directions(KEY, distribution).draw(range(8), 0, n) * distribution.unit
    assert np.all(np.abs(z.mean(axis=1)) < 4.5 / np.sqrt(n))
    assert np.all(np.abs(z @ z.T / n - np.eye(8)) < 4.5 * np.sqrt(2 / n))
    neighbours = np.sum(z[:, 1:] * z[:, :-1], axis=1) / n
    assert distribution.shapes or np.all(np.abs(neighbours) < 4.5 / np.sqrt(n))


def test_every_two_weights_of_outer_directions_are_not_correlated() -> None:
    z = outer_directions(((4, 6), (5,))).draw(range(20_000), 0, 29).astype(np.float64)
    assert np.all(np.abs(z.T @ z / len(z) - np.eye(29)) < 5 / np.sqrt(len(z)))


@settings(deadline=None)
@given(supports=supports_within_50, most=st.none() | st.integers(1, 7))
def test_blocks_name_every_direction_once_with_its_support(supports: list[Support], most: int | None) -> None:
    pieces = list(blocks(supports, most=most))
    named = [(k, support) for numbers, support in pieces for k in numbers]
    assert sorted(named) == list(enumerate(supports))
    first_seen = {support: place for place, support in reversed(list(enumerate(supports)))}
    assert named == sorted(named, key=lambda pair: (first_seen[pair[1]], pair[0]))
    assert all(1 <= len(numbers) <= (most or len(supports)) for numbers, _ in pieces)


@pytest.mark.parametrize("n", [1, NUMBERS_AT_ONCE - 1, 3 * NUMBERS_AT_ONCE])
def test_a_block_holds_no_more_numbers_than_fit_or_one_direction(n: int) -> None:
    sizes = [len(numbers) for numbers, _ in blocks(dense(n, 600))]
    assert (sum(sizes), max(sizes)) == (600, max(1, min(600, NUMBERS_AT_ONCE // n)))


@settings(deadline=None)
@given(supports=supports_within_50, ends=two_ends)
def test_a_range_of_weights_meets_a_range_of_a_supports_numbers(supports: list[Support], ends: list[int]) -> None:
    start, stop = ends
    counted = [sum(s.start <= i < s.stop or i in range(*s.tail) for s in supports) for i in range(50)]
    assert coverage(supports, 50).tolist() == counted
    assert coverage(supports, stop, start).tolist() == counted[start:stop]
    for support in supports:
        weights = [*range(support.start, support.stop), *range(*support.tail)]
        first, last = map(support.below, ends)
        assert weights[first:last] == [i for i in weights if start <= i < stop]
        pairs = support.parts(first, last)
        assert [i for part, _ in pairs for i in range(part.start, part.stop)] == weights[first:last]
        assert [i for _, here in pairs for i in range(here.start, here.stop)] == list(range(last - first))


@BOTH
def test_scratch_memory_changes_no_number_and_what_is_drawn_without_stays(distribution: Distribution) -> None:
    directions, scratch = Directions(bytes(32), distribution), Scratch()
    for numbers, start, stop in [(range(3), 5, 900), (range(7, 8), 0, 3), (range(2, 40), 1000, 2001)]:
        fresh = directions.draw(numbers, start, stop)
        assert np.array_equal(directions.draw(numbers, start, stop, scratch), fresh)
        assert not np.shares_memory(fresh, directions.draw(numbers, start, stop))


@settings(deadline=None)
@given(shapes=models, data=st.data())
def test_a_slice_of_some_outer_directions_is_drawn_as_if_all_were(shapes: Shapes, data: st.DataObject) -> None:
    directions, n, scratch = outer_directions(shapes), size_of(shapes), Scratch()
    whole = directions.draw(range(6), 0, n)
    assert whole.dtype == np.int8
    for _ in range(3):
        start, stop = sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n))))
        numbers = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=6))
        assert np.array_equal(directions.draw(numbers, start, stop, scratch), whole[numbers, start:stop])


@settings(deadline=None)
@given(shapes=models, data=st.data())
def test_a_direction_over_some_tensors_is_the_whole_direction_on_them(shapes: Shapes, data: st.DataObject) -> None:
    directions, whole = outer_directions(shapes), outer_directions(shapes).draw(range(3), 0, size_of(shapes))
    edges = [0, *itertools.accumulate(size_of((shape,)) for shape in shapes)]
    chosen = sorted(data.draw(st.lists(st.sampled_from(edges), min_size=4, max_size=4)))
    support = Support(chosen[0], chosen[1], (chosen[2], chosen[3]))
    expected = np.concatenate([whole[:, slice(*chosen[:2])], whole[:, slice(*chosen[2:])]], axis=1)
    assert np.array_equal(directions.over(support, range(3)), expected)
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, support.size)] * 2)))
    assert np.array_equal(directions.over(support, range(3), start, stop), expected[:, start:stop])


@settings(deadline=None)
@given(ends=four_ends, distribution=st.sampled_from(list(DISTRIBUTIONS.values())))
def test_other_directions_are_numbered_along_their_support(ends: list[int], distribution: Distribution) -> None:
    directions, support = Directions(KEY, distribution), Support(ends[0], ends[1], (ends[2], ends[3]))
    assert np.array_equal(directions.over(support, range(3)), directions.draw(range(3), 0, support.size))
    assert np.array_equal(directions.over(support, range(3), 1, 2), directions.draw(range(3), 1, 2))


def test_outer_directions_without_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="need the shapes"):
        distribution_of(OUTER)


# Layouts

families = st.lists(st.tuples(st.integers(1, 10**6), st.floats(1e-6, 1e6)), min_size=1, max_size=12)
layouts = st.lists(st.integers(1, 40), min_size=1, max_size=8).map(
    lambda counts: tuple(LayoutEntry(Support(3 * i, 3 * i + 2, (100 + i, 101 + i)), n) for i, n in enumerate(counts))
)


@given(family=families, more=st.integers(0, 500))
def test_everyone_gets_a_direction_and_counts_differ_from_the_law_by_less_than_one(
    family: list[tuple[int, float]], more: int
) -> None:
    wanted = [math.sqrt(n / c) for n, c in family]
    counts = allocate([n for n, _ in family], [c for _, c in family], len(family) + more)
    assert sum(counts) == len(family) + more
    assert min(counts) >= 1
    above = [(count, want) for count, want in zip(counts, wanted, strict=True) if count > 1]
    left = len(family) + more - (len(family) - len(above))
    for count, want in above:
        share = left * want / sum(want for _, want in above)
        assert abs(count - share) <= 1 + len(family) * 1e-9 + sum(1 for n in counts if n == 1)
    order = np.argsort(wanted, kind="stable")
    assert all(counts[a] <= counts[b] + (wanted[a] == wanted[b]) for a, b in itertools.pairwise(order))


def _layers(sizes: list[int]) -> tuple[Support, ...]:
    stops = list(itertools.accumulate(sizes))
    return tuple(Support(stop - size, stop) for size, stop in zip(sizes, stops, strict=True))


@given(sizes=st.lists(st.integers(1, 1000), min_size=1, max_size=20), k=st.integers(1, 60))
def test_layers_share_all_directions_and_hold_every_weight_once(sizes: list[int], k: int) -> None:
    layout = lay_out(_layers(sizes), k)
    assert (sum(entry.directions for entry in layout), len(layout)) == (k, min(k, len(sizes)))
    edges = [(entry.support.start, entry.support.stop) for entry in layout]
    assert (edges[0][0], edges[-1][1]) == (0, sum(sizes))
    assert all(left[1] == right[0] for left, right in itertools.pairwise(edges))
    assert {start for start, _ in edges} <= {layer.start for layer in _layers(sizes)}


def test_directions_are_shared_out_and_layers_merged_as_by_hand() -> None:
    assert allocate([1, 4, 16], [1.0, 1.0, 1.0], 14) == [2, 4, 8]
    assert allocate([1, 1], [1.0, 4.0], 3) == [2, 1]
    assert allocate([1, 1, 1], [1.0, 1.0, 1.0], 4) == [2, 1, 1]
    assert allocate([1, 10**6], [1.0, 1.0], 5) == [1, 4]
    with pytest.raises(ValueError, match="a direction for each of 3 supports"):
        allocate([1, 1, 1], [1.0, 1.0, 1.0], 2)
    assert merge(_layers([100, 2, 3, 50, 1]), 3) == (Support(0, 100), Support(100, 105), Support(105, 156))
    apart = (Support(0, 4, (10, 11)), Support(4, 10, (11, 13)))
    assert merge(apart, 2) == apart
    assert merge(apart, 1) == (Support(0, 13),)


@given(layout=layouts)
def test_every_prefix_covers_the_supports_in_proportion(layout: Layout) -> None:
    order = supports(layout)
    total = sum(entry.directions for entry in layout)
    assert len(order) == total
    for entry in layout:
        so_far = np.cumsum([support == entry.support for support in order])
        assert so_far[-1] == entry.directions
        share = np.arange(1, total + 1) * entry.directions / total
        # Each of the other supports can be half a direction ahead or behind.
        assert np.abs(so_far - share).max() <= 1 + len(layout) * entry.directions / total
    rows = rows_of(layout)
    assert all(len(row) == 5 and all(type(number) is int for number in row) for row in rows)
    assert layout_of(rows) == layout
