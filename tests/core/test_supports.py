"""Layouts: counts that follow the law, and an order in which every prefix covers all supports."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baffle.core.directions import Support
from baffle.core.supports import Layout, LayoutEntry, allocate, lay_out, layout_of, merge, rows_of, supports

positive = st.floats(1e-6, 1e6)
families = st.lists(st.tuples(st.integers(1, 10**6), positive), min_size=1, max_size=12)
layouts = st.lists(st.integers(1, 40), min_size=1, max_size=8).map(
    lambda counts: tuple(LayoutEntry(Support(3 * i, 3 * i + 2, (100 + i, 101 + i)), n) for i, n in enumerate(counts))
)


@given(family=families, more=st.integers(0, 500))
def test_all_directions_are_given_away_and_everyone_gets_one(family: list[tuple[int, float]], more: int) -> None:
    sizes, costs = [n for n, _ in family], [c for _, c in family]
    counts = allocate(sizes, costs, len(sizes) + more)
    assert sum(counts) == len(sizes) + more
    assert min(counts) >= 1
    assert counts == allocate(sizes, costs, len(sizes) + more)


@given(family=families, more=st.integers(0, 500))
def test_counts_differ_from_the_law_by_less_than_one(family: list[tuple[int, float]], more: int) -> None:
    wanted = [math.sqrt(n / c) for n, c in family]
    counts = allocate([n for n, _ in family], [c for _, c in family], len(family) + more)
    above = [(count, want) for count, want in zip(counts, wanted, strict=True) if count > 1]
    left = len(family) + more - (len(family) - len(above))
    for count, want in above:
        share = left * want / sum(want for _, want in above)
        assert abs(count - share) <= 1 + len(family) * 1e-9 + sum(1 for n in counts if n == 1)
    order = np.argsort(wanted, kind="stable")
    assert all(counts[a] <= counts[b] + (wanted[a] == wanted[b]) for a, b in itertools.pairwise(order))


def test_an_allocation_by_hand() -> None:
    assert allocate([1, 4, 16], [1.0, 1.0, 1.0], 14) == [2, 4, 8]
    assert allocate([1, 1], [1.0, 4.0], 3) == [2, 1]
    assert allocate([1, 1, 1], [1.0, 1.0, 1.0], 4) == [2, 1, 1]
    assert allocate([1, 10**6], [1.0, 1.0], 5) == [1, 4]
    with pytest.raises(ValueError, match="a direction for each of 3 supports"):
        allocate([1, 1, 1], [1.0, 1.0, 1.0], 2)


sizes_of_layers = st.lists(st.integers(1, 1000), min_size=1, max_size=20)


def _layers(sizes: list[int]) -> tuple[Support, ...]:
    stops = list(itertools.accumulate(sizes))
    return tuple(Support(stop - size, stop) for size, stop in zip(sizes, stops, strict=True))


@given(sizes=sizes_of_layers, k=st.integers(1, 60))
def test_layers_share_all_directions_and_hold_every_weight_once(sizes: list[int], k: int) -> None:
    layout = lay_out(_layers(sizes), k)
    assert sum(entry.directions for entry in layout) == k
    assert len(layout) == min(k, len(sizes))
    edges = [(entry.support.start, entry.support.stop) for entry in layout]
    assert edges[0][0] == 0
    assert edges[-1][1] == sum(sizes)
    assert all(left[1] == right[0] for left, right in itertools.pairwise(edges))
    assert {start for start, _ in edges} <= {layer.start for layer in _layers(sizes)}
    if k >= len(sizes):
        assert [entry.support for entry in layout] == list(_layers(sizes))


def test_layers_are_shared_out_and_merged_as_by_hand() -> None:
    assert [entry.directions for entry in lay_out(_layers([1, 4, 16]), 14)] == [2, 4, 8]
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


@given(layout=layouts)
def test_a_layout_is_plain_numbers(layout: Layout) -> None:
    rows = rows_of(layout)
    assert all(len(row) == 5 and all(type(number) is int for number in row) for row in rows)
    assert layout_of(rows) == layout
