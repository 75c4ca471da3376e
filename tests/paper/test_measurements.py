"""Exact scalars and the estimates from them, how much of a step rounding leaves, and losses that two schemes share."""

import math
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from baffle.core.directions import GAUSSIAN, RADEMACHER, Directions, Distribution, dense
from baffle.core.probe import SCHEMES
from baffle.paper.gradients import alignment, cosine, exact_scalars
from baffle.paper.sigma import Point, Remembered, rounded, rounded_move, working

DIRECTIONS = Directions(bytes(32), GAUSSIAN)
WEIGHTS = np.random.default_rng(0).uniform(0.5, 1, 50_000).astype(np.float32)
ONES = np.ones(len(WEIGHTS))


def test_scalars_are_products_with_directions() -> None:
    gradients = np.random.default_rng(0).normal(size=(3, 50))
    z = DIRECTIONS.draw(range(100), 0, 50) * GAUSSIAN.unit
    np.testing.assert_allclose(exact_scalars(DIRECTIONS, 100, gradients), z @ gradients.T)


def test_many_exact_scalars_point_along_the_gradient_and_their_negatives_against_it() -> None:
    gradient = np.array([3.0, -1.0, 2.0])
    scalars = exact_scalars(DIRECTIONS, 2000, gradient[None])[:, 0]
    assert alignment(scalars, DIRECTIONS, dense(3, 2000), gradient) == pytest.approx(1, abs=0.01)
    assert alignment(-scalars, DIRECTIONS, dense(3, 2000), gradient) == pytest.approx(-1, abs=0.01)
    assert alignment(0 * scalars, DIRECTIONS, dense(3, 2000), gradient) == 0


@pytest.mark.parametrize("distribution", [GAUSSIAN, RADEMACHER], ids=lambda distribution: distribution.name)
@pytest.mark.parametrize(("n", "k"), [(100, 10), (1000, 100)])
def test_the_cosine_is_as_theorem_2_predicts(n: int, k: int, distribution: Distribution) -> None:
    gradient = np.random.default_rng(n).normal(size=n)
    measured = [cosine(gradient, k, bytes([key]) * 32, distribution) for key in range(32)]
    assert np.mean(measured) == pytest.approx(math.sqrt(k / (k + n + 1)), rel=0.1)


@pytest.mark.parametrize(("dtype", "unit"), [(torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)])
@given(share=st.floats(0.01, 0.49))
def test_a_step_below_half_a_unit_is_lost_on_rounded_weights_and_right_on_average_on_others(
    dtype: torch.dtype, unit: float, share: float
) -> None:
    kept = rounded(WEIGHTS.astype(np.float64), dtype).astype(np.float32)
    inside = kept < 1  # from 1 on, units are twice as large
    assert not rounded_move(kept, ONES, share * unit, dtype, "forward")[inside].any()
    for scheme in SCHEMES:
        move = rounded_move(WEIGHTS, ONES, share * unit, dtype, scheme)
        assert np.mean(move[inside]) == pytest.approx(1, abs=0.15)
        assert np.mean(move != 0) == pytest.approx(share * (1 if scheme == "forward" else 2), abs=0.02)
        np.testing.assert_allclose(rounded_move(WEIGHTS, ONES, 1e-3, torch.float32, scheme), 1, atol=1e-3)


def test_two_schemes_share_their_losses_and_get_the_same_scalars() -> None:
    weights, supports = np.ones(6, np.float32), dense(6, 4)
    counted, plain = (Mock(spec=[], side_effect=lambda at: float(np.sum(at**2))) for _ in range(2))
    shared = Remembered(counted)
    for scheme in SCHEMES.values():
        scalars = scheme(shared, weights, DIRECTIONS, supports, 1e-2).scalars
        np.testing.assert_array_equal(scalars, scheme(plain, weights, DIRECTIONS, supports, 1e-2).scalars)
    assert (counted.call_count, plain.call_count) == (1 + 2 * 4, 1 + 3 * 4)


def test_a_step_works_from_nine_tenths_of_the_best() -> None:
    curve = [Point(sigma, cosine, 0, 0, 0) for sigma, cosine in ((1e-3, 0.8), (1e-2, 0.9), (1e-1, 1.0))]
    curves = {("trained", "forward", "float32"): curve}
    assert [point.sigma for point in working(curves, "trained", "forward", "float32")] == [1e-2, 1e-1]
