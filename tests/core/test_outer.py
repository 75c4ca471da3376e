"""Outer directions: factors that can be drawn alone, and what they have in common with dense directions."""

from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baffle.core.arrays import F64
from baffle.core.directions import OUTER, RADEMACHER, Directions, Support, distribution_of
from baffle.core.outer import Factors, Shapes, factors, factors_at, flat, places, size_of
from baffle.core.seeds import Scratch

KEY = bytes(range(32))
LENET: Shapes = ((8, 1, 5, 5), (8,), (16, 8, 5, 5), (16,), (10, 256), (10,))

models = st.lists(st.lists(st.integers(1, 7), max_size=4).map(tuple), min_size=1, max_size=5).map(tuple)
keys = st.binary(min_size=32, max_size=32)
numbers_of_directions = st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=4)


def outer_directions(shapes: Shapes, key: bytes = KEY) -> Directions:
    return Directions(key, distribution_of(OUTER, shapes))


def product(tensor: Factors) -> F64:
    """z of one tensor, a row for each direction."""
    a = tensor.a.astype(np.float64)
    return a if tensor.b is None else np.einsum("ki,kj->kij", a, tensor.b).reshape(len(a), -1)


def test_a_matrix_has_out_and_in_numbers_and_a_vector_one_for_each_weight() -> None:
    drawn = factors(KEY, range(3), LENET)
    assert [(tensor.a.shape, None if tensor.b is None else tensor.b.shape) for tensor in drawn] == [
        ((3, 8), (3, 25)),
        ((3, 8), None),
        ((3, 16), (3, 200)),
        ((3, 16), None),
        ((3, 10), (3, 256)),
        ((3, 10), None),
    ]
    assert {int(z) for tensor in drawn for z in np.unique(tensor.a)} == {-1, 1}


def test_the_numbers_of_the_factors_are_those_of_the_stream_in_order() -> None:
    drawn = factors(KEY, [5, 2**60], LENET)
    in_order = np.concatenate([part for tensor in drawn for part in tensor if part is not None], axis=1)
    rademacher = Directions(KEY, RADEMACHER).draw([5, 2**60], 0, 8 + 25 + 8 + 16 + 200 + 16 + 10 + 256 + 10)
    assert np.array_equal(in_order, rademacher)


@settings(deadline=None)
@given(key=keys, numbers=numbers_of_directions, shapes=models)
def test_a_direction_is_the_product_of_its_factors_and_each_tensors_can_be_drawn_alone(
    key: bytes, numbers: list[int], shapes: Shapes
) -> None:
    drawn, n = factors(key, numbers, shapes), size_of(shapes)
    z = flat(key, numbers, shapes, 0, n)
    assert z.dtype == np.int8
    assert np.array_equal(z, np.concatenate([product(tensor) for tensor in drawn], axis=1))
    for place, tensor in zip(places(shapes), drawn, strict=True):
        assert np.array_equal(product(factors_at(key, numbers, place)), product(tensor))


@settings(deadline=None)
@given(shapes=models, data=st.data())
def test_a_slice_of_some_directions_is_drawn_as_if_all_were(shapes: Shapes, data: st.DataObject) -> None:
    directions, n, scratch = outer_directions(shapes), size_of(shapes), Scratch()
    whole = directions.draw(range(6), 0, n)
    for _ in range(3):
        start, stop = sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n))))
        numbers = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=6))
        assert np.array_equal(directions.draw(numbers, start, stop, scratch), whole[numbers, start:stop])


@settings(deadline=None)
@given(shapes=models, data=st.data())
def test_a_direction_over_some_tensors_is_the_whole_direction_on_them(shapes: Shapes, data: st.DataObject) -> None:
    directions, whole = outer_directions(shapes), outer_directions(shapes).draw(range(3), 0, size_of(shapes))
    edges = [0, *accumulate(size_of((shape,)) for shape in shapes)]
    chosen = sorted(data.draw(st.lists(st.sampled_from(edges), min_size=4, max_size=4)))
    support = Support(chosen[0], chosen[1], (chosen[2], chosen[3]))
    expected = np.concatenate([whole[:, slice(*chosen[:2])], whole[:, slice(*chosen[2:])]], axis=1)
    assert np.array_equal(directions.over(support, range(3)), expected)
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, support.size)] * 2)))
    assert np.array_equal(directions.over(support, range(3), start, stop), expected[:, start:stop])


@settings(deadline=None)
@given(
    ends=st.lists(st.integers(0, 50), min_size=4, max_size=4, unique=True).map(sorted),
    name=st.sampled_from(["gaussian", "rademacher", "sphere"]),
)
def test_other_directions_are_numbered_along_their_support(ends: list[int], name: str) -> None:
    directions, support = Directions(KEY, distribution_of(name)), Support(ends[0], ends[1], (ends[2], ends[3]))
    assert np.array_equal(directions.over(support, range(3)), directions.draw(range(3), 0, support.size))
    assert np.array_equal(directions.over(support, range(3), 1, 2), directions.draw(range(3), 1, 2))


def test_directions_are_not_correlated_and_every_weight_has_unit_variance() -> None:
    z = outer_directions(((4, 6), (5,))).draw(range(20_000), 0, 29).astype(np.float64)
    assert np.all(np.abs(z.T @ z / len(z) - np.eye(29)) < 5 / np.sqrt(len(z)))
    assert np.all(np.abs(z.mean(axis=0)) < 5 / np.sqrt(len(z)))


def test_outer_directions_without_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="need the shapes"):
        distribution_of(OUTER)
