"""Outer directions on the server: the sum of products is the integers' own sum, however it is divided up, and what is
estimated along them is the gradient, as well as along dense directions."""

import math
import tracemalloc
from functools import partial
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from baffle.core.arrays import F64, I32, I64
from baffle.core.directions import NUMBERS_AT_ONCE, OUTER, Directions, Support, coverage, dense, distribution_of
from baffle.core.outer import Shapes, places, size_of
from baffle.core.rebuild import EXACT_SUM, OuterSum, Terms, gradient_from_scalars, rebuild, tiles
from baffle.core.ring import Ring
from baffle.core.seeds import Scratch, Seeds

SEEDS = Seeds(3, bytes(32))
LARGEST = 2**31 - 1
RING = Ring(clients=3, n_max=50, clip=4.0)
LENET: Shapes = ((8, 1, 5, 5), (8,), (16, 8, 5, 5), (16,), (10, 256), (10,))

models = st.lists(st.lists(st.integers(1, 9), max_size=4).map(tuple), min_size=1, max_size=5).map(tuple)
block_sizes = st.integers(1, 60) | st.just(NUMBERS_AT_ONCE)


def outer_directions(shapes: Shapes, number: int = 0) -> Directions:
    return Directions(SEEDS.key("directions", number, 0), distribution_of(OUTER, shapes))


def some_totals(k: int, seed: int = 0) -> I32:
    return np.random.default_rng(seed).integers(-(2**31), 2**31, k).astype(np.int32)


def summed(totals: I32, directions: Directions, supports: list[Support], n: int, block: int, limit: int) -> I64:
    """The whole sum, tile by tile."""
    whole, scratch = np.zeros(n, np.int64), Scratch()
    outer = OuterSum(Terms(totals, directions, supports, block), n, limit)
    for tile in tiles(directions, block):
        tile.of(whole)[:] += outer.over(tile, scratch).astype(np.int64)
    return whole


def expected_sum(totals: I32, directions: Directions, supports: list[Support], n: int) -> I64:
    """Σ T_k · z_k in int64, one direction after the other."""
    whole = np.zeros(n, np.int64)
    for k, support in enumerate(supports):
        (z,) = directions.over(support, [k]).astype(np.int64)
        for weights, here in support.parts():
            whole[weights] += int(totals[k]) * z[here]
    return whole


@st.composite
def supports_of_tensors(draw: st.DrawFn, shapes: Shapes) -> list[Support]:
    """Supports of whole tensors that overlap, repeat and leave gaps, of one slice or two."""
    edges = [0, *accumulate(map(math.prod, shapes))]
    ends = st.lists(st.sampled_from(edges), min_size=4, max_size=4).map(sorted)
    runs = draw(st.lists(st.tuples(ends, st.integers(1, 8)), min_size=1, max_size=6))
    return draw(st.permutations([Support(a, b, (c, d)) for (a, b, c, d), count in runs for _ in range(count)]))


@settings(deadline=None)
@given(shapes=models, block=block_sizes, bits=st.sampled_from([33, 34, 40, 53]), data=st.data())
def test_no_block_and_no_bound_changes_the_integers_own_sum(
    shapes: Shapes, block: int, bits: int, data: st.DataObject
) -> None:
    supports, directions, n = data.draw(supports_of_tensors(shapes)), outer_directions(shapes), size_of(shapes)
    totals = some_totals(len(supports))
    expected = expected_sum(totals, directions, supports, n)
    assert np.array_equal(summed(totals, directions, supports, n, block, 1 << bits), expected)
    assert np.array_equal(rebuild(totals, directions, supports, n, block=block), expected)


@settings(deadline=None, max_examples=40)
@given(shapes=models, block=block_sizes, threads=st.integers(1, 3), weight=st.integers(1, 1000), data=st.data())
def test_a_gradient_is_the_sum_divided_by_the_directions_that_touch_a_weight(
    shapes: Shapes, block: int, threads: int, weight: int, data: st.DataObject
) -> None:
    supports, directions, n = data.draw(supports_of_tensors(shapes)), outer_directions(shapes), size_of(shapes)
    totals = some_totals(len(supports))
    exact = expected_sum(totals, directions, supports, n)
    expected = (exact / (np.maximum(coverage(supports, n), 1) * (RING.scale * weight))).astype(np.float32)
    found = gradient_from_scalars(totals, weight, directions, supports, n, RING, block=block, threads=threads)
    assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("block", [640, 5000, NUMBERS_AT_ONCE])
def test_a_hundred_thousand_directions_are_exact(block: int) -> None:
    shapes: Shapes = ((3, 4), (2,))
    k, n, directions = 100_000, 14, outer_directions(shapes)
    z = directions.draw(range(k), 0, n).astype(np.int64)
    towards_weight_0: I32 = (z[:, 0] * LARGEST).astype(np.int32)
    for totals in (some_totals(k), np.full(k, -LARGEST - 1, np.int32), towards_weight_0):
        expected = totals.astype(np.int64) @ z
        assert np.array_equal(summed(totals, directions, list(dense(n, k)), n, block, EXACT_SUM), expected)
    assert expected[0] == k * LARGEST > 2**47


def test_a_product_never_holds_totals_beyond_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound is checked where products are made, whatever a block would allow."""
    shapes: Shapes = ((6, 7), (5,))
    k, n, limit, largest = 50, 47, 1 << 34, [0]
    directions, totals = outer_directions(shapes), np.full(50, LARGEST, np.int32)
    multiply = OuterSum._multiply

    def watched(self: OuterSum, numbers: I64, *rest: object) -> None:
        largest.append(int(np.abs(totals[numbers].astype(np.int64)).sum()))
        multiply(self, numbers, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(OuterSum, "_multiply", watched)
    found = summed(totals, directions, list(dense(n, k)), n, NUMBERS_AT_ONCE, limit)
    assert LARGEST < max(largest) < limit
    assert np.array_equal(found, expected_sum(totals, directions, list(dense(n, k)), n))


def test_a_total_beyond_every_bound_is_refused() -> None:
    directions = outer_directions(((2, 2),))
    with pytest.raises(ValueError, match="expected totals below 4, got 7"):
        summed(np.array([7], np.int32), directions, list(dense(4, 1)), 4, 10, 4)


def test_tiles_hold_every_weight_once_and_are_no_larger_than_a_block() -> None:
    shapes: Shapes = ((70, 10), (3,), (2, 9000), (9001,), ())
    n, directions = size_of(shapes), outer_directions(shapes)
    for block in (1, 7, 1000, 5000, NUMBERS_AT_ONCE):
        counted = np.zeros(n, np.int64)
        for tile in tiles(directions, block):
            tile.of(counted)[:] += 1
            assert 1 <= math.prod(tile.shape) <= block
        assert counted.tolist() == [1] * n


@pytest.mark.parametrize("support", [Support(1, 12), Support(0, 11), Support(0, 12, (13, 15)), Support(12, 14)])
def test_a_support_that_cuts_a_tensor_is_refused(support: Support) -> None:
    with pytest.raises(ValueError, match="touch whole tensors"):
        gradient_from_scalars(np.ones(1, np.int32), 1, outer_directions(((3, 4), (3,))), [support], 15, RING)


def test_tensors_of_another_model_are_refused() -> None:
    with pytest.raises(ValueError, match="expected tensors of 14 weights, got 15"):
        gradient_from_scalars(np.ones(1, np.int32), 1, outer_directions(((3, 4), (3,))), dense(14, 1), 14, RING)


@pytest.mark.parametrize("threads", [1, 3])
def test_beside_its_result_a_thread_needs_eight_megabytes(threads: int) -> None:
    shapes: Shapes = ((1000, 2000), (2000,), (1998, 1000))
    n, k = size_of(shapes), 300
    directions, totals = outer_directions(shapes), some_totals(k)
    gradient = partial(gradient_from_scalars, totals, 1, directions, dense(n, k), n, RING, threads=threads)
    tracemalloc.start()
    try:
        gradient()
        assert tracemalloc.get_traced_memory()[1] < 4 * n + threads * 8_000_000
    finally:
        tracemalloc.stop()


def estimates(gradient: F64, shapes: Shapes, k: int, keys: int) -> F64:
    """What a server estimates from exact directional derivatives, under each of some keys."""
    n, alone, rows = len(gradient), Ring(clients=1, n_max=1, clip=1000.0), list[F64]()
    for number in range(keys):
        directions = outer_directions(shapes, number)
        scalars = directions.draw(range(k), 0, n).astype(np.float64) @ gradient
        total = alone.decode(alone.encode(scalars, k, 1, 0.0), 1)
        assert total.clipped == 0
        found = gradient_from_scalars(total.totals, 1, directions, dense(n, k), n, alone)
        rows.append(found.astype(np.float64))
    return np.array(rows)


def gradient_of_a_model(shapes: Shapes, seed: int) -> F64:
    """Tensors of unlike size, each of low rank, as gradients of layers are: the worst for directions of rank one."""
    random, parts = np.random.default_rng(seed), list[F64]()
    for place in places(shapes):
        rows = random.standard_normal((place.rows, 2))
        matrix = rows @ random.standard_normal((2, place.columns)) if place.columns else rows[:, 0]
        parts.append(matrix.reshape(-1) * random.uniform(0.2, 2))
    whole = np.concatenate(parts)
    return whole / np.linalg.norm(whole)


@pytest.mark.parametrize("seed", range(3))
def test_the_mean_estimate_is_the_gradient(seed: int) -> None:
    shapes: Shapes = ((4, 2, 3), (4,), (5, 6))
    gradient = gradient_of_a_model(shapes, seed)
    found = estimates(gradient, shapes, 40, 400)
    error = found.std(axis=0, ddof=1) / math.sqrt(len(found))
    assert np.all(np.abs(found.mean(axis=0) - gradient) < 4.5 * error)


@pytest.mark.parametrize("k", [80, 320])
@pytest.mark.parametrize("seed", range(2))
def test_alignment_is_that_of_dense_directions(seed: int, k: int) -> None:
    """√(K/(K + n + 1)) within 5 %, as a mean over 50 keys."""
    gradient, n = gradient_of_a_model(LENET, seed), size_of(LENET)
    found = estimates(gradient, LENET, k, 50)
    cosines = found @ gradient / np.linalg.norm(found, axis=1)
    assert np.mean(cosines) == pytest.approx(math.sqrt(k / (k + n + 1)), rel=0.05)
