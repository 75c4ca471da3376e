"""The gradient from totals: small cases by hand, and arguments that do not fit."""

import numpy as np
import pytest

from baffle.core.directions import DISTRIBUTIONS, GAUSSIAN, RADEMACHER, Directions, Distribution, Support, dense
from baffle.core.rebuild import EXACT_DIRECTIONS, gradient_from_scalars, gradient_from_vector, rebuild
from baffle.core.ring import Ring

KEY = bytes(range(32))


def test_totals_weigh_their_directions() -> None:
    directions = Directions(KEY, GAUSSIAN)
    z = directions.draw(range(3), 0, 4).astype(int)
    rebuilt = rebuild(np.array([2, 0, -5], np.int32), directions, dense(4, 3), 4)
    assert rebuilt.dtype == np.int64
    assert rebuilt.tolist() == (2 * z[0] - 5 * z[2]).tolist()


def test_a_direction_changes_only_its_support() -> None:
    directions = Directions(KEY, RADEMACHER)
    supports = [Support(0, 2), Support(1, 4)]
    (a, b), (c, d, e) = (directions.draw(range(k, k + 1), 0, s.size)[0].tolist() for k, s in enumerate(supports))
    rebuilt = rebuild(np.array([10, 7], np.int32), directions, supports, 5)
    assert rebuilt.tolist() == [10 * a, 10 * b + 7 * c, 7 * d, 7 * e, 0]


@pytest.mark.parametrize("distribution", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS)
def test_a_product_of_the_largest_chunk_stays_where_float64_counts_integers(distribution: Distribution) -> None:
    assert EXACT_DIRECTIONS * 2**31 * distribution.bound < 2**53


def test_no_direction_gives_no_gradient() -> None:
    assert rebuild(np.empty(0, np.int32), Directions(KEY, GAUSSIAN), (), 3).tolist() == [0, 0, 0]


@pytest.mark.parametrize("count", [2, 4])
def test_another_number_of_totals_than_directions_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match=rf"a total per direction \(3\), got {count}"):
        rebuild(np.ones(count, np.int32), Directions(KEY, GAUSSIAN), dense(4, 3), 4)


@pytest.mark.parametrize("chunk", [0, -1, EXACT_DIRECTIONS + 1])
def test_a_chunk_that_could_be_inexact_is_refused(chunk: int) -> None:
    with pytest.raises(ValueError, match=f"1 to 128 directions, got {chunk}"):
        rebuild(np.ones(3, np.int32), Directions(KEY, GAUSSIAN), dense(4, 3), 4, chunk=chunk)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS)
def test_the_gradient_is_the_mean_of_scalars_times_directions(distribution: Distribution) -> None:
    ring, directions = Ring(clients=4, n_max=50, clip=8.0), Directions(KEY, distribution)
    scalars = np.array([0.5, -2.0, 0.25])
    total = ring.decode(ring.encode(scalars, 3, 40, 0.0), 1)
    rebuilt = gradient_from_scalars(total.totals, total.weight, directions, dense(6, 3), 6, ring)
    assert rebuilt.dtype == np.float32
    assert rebuilt == pytest.approx(scalars @ (directions.draw(range(3), 0, 6) * distribution.unit) / 3, rel=1e-6)


def test_the_gradient_is_rounded_once() -> None:
    ring, directions = Ring(clients=3, n_max=7, clip=1.0), Directions(KEY, GAUSSIAN)
    totals = np.array([123_456_789, -987_654_321, 2**31 - 1], np.int32)
    exact = rebuild(totals, directions, dense(50, 3), 50)
    expected = [np.float32(int(g) / (3 * 5 * 2 ** (ring.exponent + 12))) for g in exact]
    assert gradient_from_scalars(totals, 5, directions, dense(50, 3), 50, ring).tolist() == expected


def test_each_weight_is_divided_by_the_directions_that_touch_it() -> None:
    ring, directions = Ring(clients=1, n_max=1, clip=4.0), Directions(KEY, RADEMACHER)
    supports = [Support(0, 4), Support(0, 4), Support(2, 5)]
    totals = np.full(3, ring.scale, np.int32)
    exact = rebuild(totals, directions, supports, 6)
    rebuilt = gradient_from_scalars(totals, 1, directions, supports, 6, ring)
    assert rebuilt.tolist() == (exact / ring.scale / np.array([2, 2, 3, 3, 1, 1])).astype(np.float32).tolist()
    assert rebuilt[5] == 0


def test_a_vector_is_the_weighted_mean_rounded_once() -> None:
    ring, totals = Ring(clients=2, n_max=30, clip=1.0), [3, -(2**31), 2**31 - 1, 0, *range(2**24, 2**24 + 40)]
    rebuilt = gradient_from_vector(np.array(totals, np.int32), 25, ring)
    assert rebuilt.dtype == np.float32
    assert rebuilt.tolist() == [float(np.float32(total / (25 * 2**ring.exponent))) for total in totals]
