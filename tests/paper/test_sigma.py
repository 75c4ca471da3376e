"""sigma: how much of a step rounding leaves in half precision, and losses that two schemes share."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baffle.core.directions import GAUSSIAN, Directions, dense
from baffle.core.probe import SCHEMES
from baffle.paper.sigma import Point, Remembered, rounded, rounded_move, working

WEIGHTS = np.random.default_rng(0).uniform(0.5, 1, 50_000).astype(np.float32)
ONES = np.ones(len(WEIGHTS))


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


def test_in_float32_a_step_is_what_it_should_be() -> None:
    for scheme in SCHEMES:
        np.testing.assert_allclose(rounded_move(WEIGHTS, ONES, 1e-3, torch.float32, scheme), 1, atol=1e-3)


class _Counted:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, weights: object) -> float:
        self.calls += 1
        return float(np.sum(np.asarray(weights) ** 2))


def test_two_schemes_share_their_losses_and_get_the_same_scalars() -> None:
    weights, directions, supports = np.ones(6, np.float32), Directions(bytes(32), GAUSSIAN), dense(6, 4)
    counted, plain = _Counted(), _Counted()
    shared = Remembered(counted)
    for scheme in SCHEMES.values():
        scalars = scheme(shared, weights, directions, supports, 1e-2).scalars
        np.testing.assert_array_equal(scalars, scheme(plain, weights, directions, supports, 1e-2).scalars)
    assert (counted.calls, plain.calls) == (1 + 2 * 4, 1 + 3 * 4)


def test_a_step_works_from_nine_tenths_of_the_best() -> None:
    curve = [Point(sigma, cosine, 0, 0, 0) for sigma, cosine in ((1e-3, 0.8), (1e-2, 0.9), (1e-1, 1.0))]
    assert [point.sigma for point in working(curve, 1.0)] == [1e-2, 1e-1]
